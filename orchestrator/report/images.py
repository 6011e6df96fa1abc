"""The images that rows keep, for the page: as many as it can carry.

They come from files that anybody may have written, so only what begins as a PNG does is shown, as
the source of an image element: a browser decodes it, and nothing in it runs.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.measurement import Measurement

_PNG = b"\x89PNG\r\n\x1a\n"
#: Bytes of all images of a page; further ones stay in the rows.
MOST_BYTES = 6_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One image, and the row that keeps it."""

    row: Measurement
    source: str  # a data URL


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of a page, and how many it leaves out."""

    shown: tuple[Shown, ...] = ()
    left_out: int = 0
    random_weights: bool = False  # whether all of them are of models that were never trained


def images_of(rows: Sequence[Measurement]) -> Images:
    """The images of these rows, in their order, up to ``MOST_BYTES``."""
    kept = [(row, row.image) for row in rows if row.image and row.image.startswith(_PNG)]
    shown: list[Shown] = []
    left = MOST_BYTES
    for row, image in kept:
        if len(image) <= left:
            left -= len(image)
            text = base64.b64encode(image).decode()
            shown.append(Shown(row=row, source=f"data:image/png;base64,{text}"))
    return Images(
        shown=tuple(shown),
        left_out=len(kept) - len(shown),
        random_weights=all(one.row.random_weights for one in shown),
    )
