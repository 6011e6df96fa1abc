"""Blocks of a report as values: lines, tables, facts. Each printer prints all of them.

``text.py`` prints blocks in a terminal and as Markdown, the page's template as HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Style = Literal["", "bold", "quiet", "warning", "bad", "good", "name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of text."""

    text: str
    style: Style = ""
    whole: bool = False  # a terminal does not break it: it is to be copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """The title of what follows."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The text of a table's cell. ``notes`` are further lines."""

    text: str
    notes: tuple[str, ...] = ()
    #: ``*`` for the best, ``~`` for each that shares the first place, ``!`` for a flagged one.
    mark: str = ""
    style: Style = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells. ``numbers`` are the columns that are set right."""

    head: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    numbers: tuple[int, ...] = ()
    most: int = 16  # rows that a terminal has room for
    noun: str = "line"
    rest: str = "the page has all of them"  # where those beyond are
    matrix: bool = False  # cells by two axes: marks and notes stand in a terminal, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names with values, under a title of their own."""

    title: str = ""
    about: str = ""
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The last lines of a log."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Many:
    """Entries of blocks, of which a terminal shows only the first."""

    entries: tuple[tuple[Block, ...], ...]
    most: int
    noun: str
    rest: str = "the page has all of them"


Block: TypeAlias = Line | Heading | Table | Facts | Log | Many


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing of the page, as an ``<svg>`` element."""

    drawing: str
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table with what belongs to it. ``lead`` and figures are the page's alone."""

    id: str
    title: str
    menu: str  # its name in the page's navigation
    table: Table
    note: str = ""
    lead: str = ""
    figures: Callable[[], Sequence[Figure]] = tuple
    others: Table | None = None  # folded, below
    others_title: str = ""
    remarks: tuple[str, ...] = ()
