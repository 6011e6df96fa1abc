"""The image that a row keeps: small enough for a table, exact enough to compare."""

from __future__ import annotations

import io
from typing import Any

#: Larger images are scaled down: a row is read by whoever opens the table.
MOST_SIDE = 512


def png_of(image: Any) -> bytes:
    """PIL's image as PNG, at most ``MOST_SIDE`` pixels wide and high."""
    kept = image.convert("RGB")
    kept.thumbnail((MOST_SIDE, MOST_SIDE))
    file = io.BytesIO()
    kept.save(file, "PNG", optimize=True)
    return file.getvalue()


def one_colour(image: Any) -> bool:
    """Tell if all pixels are the same, as they are where numbers overflowed on the way."""
    return all(low == high for low, high in image.convert("RGB").getextrema())
