"""Blocks of a report as values, for ``text.py`` (terminal, Markdown) and the page's template."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Style = Literal["", "bold", "quiet", "warning", "bad", "good", "name", "heading", "log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of text, the heading of what follows, or the end of a log."""

    text: str
    style: Style = ""
    whole: bool = False  # not wrapped in a terminal, so that it can be copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Text of a table's cell; ``notes`` are further lines."""

    text: str
    notes: tuple[str, ...] = ()
    #: ``*`` for the best, ``~`` for tied first places, ``!`` for a flagged row.
    mark: str = ""
    style: Style = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells; ``numbers`` are the right-aligned columns."""

    head: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    numbers: tuple[int, ...] = ()
    most: int = 16  # rows shown in a terminal
    noun: str = "line"
    rest: str = "the page has all of them"  # where to find the others
    matrix: bool = False  # cells by two axes, shown with marks and notes in a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names with values, under an optional title."""

    title: str = ""
    about: str = ""
    pairs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Many:
    """Entries of blocks; a terminal shows only the first ``most``."""

    entries: tuple[tuple[Block, ...], ...]
    most: int = 40
    noun: str
    rest: str = "the page has all of them"


Block: TypeAlias = Line | Table | Facts | Many


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing of the page, as an ``<svg>`` element; "": there is none."""

    drawing: str
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table with its context; ``lead`` and figures are shown on the page only."""

    id: str
    title: str
    menu: str  # its name in the page's navigation
    table: Table
    note: str = ""
    lead: str = ""
    figures: Callable[[], Iterable[Figure]] = tuple
    others: Table | None = None  # folded, below the table
    others_title: str = ""
    remarks: tuple[str, ...] = ()
