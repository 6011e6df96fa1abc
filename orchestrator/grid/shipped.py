"""The grids that come with Nightgrid, found from everywhere: an installation has them, too."""

from __future__ import annotations

import os
from pathlib import Path

#: In a checkout a link to its ``grids/``; an installer copies what lies there.
DIRECTORY = Path(__file__).with_name("shipped")


def names() -> tuple[str, ...]:
    """Their names, without suffix."""
    return tuple(sorted(file.stem for file in DIRECTORY.glob("*.yaml")))


def found(text: str) -> Path:
    """The file that somebody means: theirs if it is there, else the shipped grid of this name,
    written as ``smoke``, ``smoke.yaml`` or ``grids/smoke.yaml``."""
    path = Path(text)
    shipped = DIRECTORY / f"{path.name.removesuffix('.yaml')}.yaml"
    plain = str(path.parent) in (".", "grids")
    theirs = os.path.lexists(path)  # asks of any text, however long
    return path if theirs or not plain or not os.path.isfile(shipped) else shipped
