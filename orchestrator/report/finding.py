"""A table of the report, as the terminal, Markdown and the page show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One table. ``numbers`` are the columns that are set right; ``note`` stands below it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...]
    note: str = ""
