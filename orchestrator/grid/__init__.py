"""The grid file: strict YAML with positions, its fields and axes, and the jobs it stands for."""

from __future__ import annotations

import os
from pathlib import Path

#: In a checkout a link to its ``grids/``; an installer copies what lies there.
SHIPPED_GRIDS = Path(__file__).with_name("shipped")


def shipped_names() -> tuple[str, ...]:
    """Names of the shipped grids, without suffix."""
    return tuple(sorted(file.stem for file in SHIPPED_GRIDS.glob("*.yaml")))


def grid_path(text: str) -> Path:
    """An existing file, else a shipped grid: ``smoke``, ``smoke.yaml`` or ``grids/smoke.yaml``."""
    path = Path(text)
    shipped = SHIPPED_GRIDS / f"{path.name.removesuffix('.yaml')}.yaml"
    plain = str(path.parent) in (".", "grids")
    exists = os.path.lexists(path)  # asks of any text, however long
    return path if exists or not plain or not os.path.isfile(shipped) else shipped
