"""The cells of a table as an SVG drawing: the darker the faster, states without a number in words.

A cell that knows its row carries its number, which leads there from the page (``tables.js``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report import cells
from orchestrator.report.drawing import LETTER, svg, text_at
from orchestrator.report.safe import one_line, visible
from orchestrator.report.tables import Table

HIGH, HEAD = 44, 38
_SIGNS = {"": "", "*": " ★", "~": " ≈", "!": " !"}
_LONGEST_NAME = 44


def heat_map(table: Table, title: str, index: Mapping[str, int] | None = None) -> str:
    """The drawing of a table as an ``<svg>`` element.

    Args:
        table: what is drawn.
        title: its name, for those who do not see it.
        index: number of each row in the page's list, by job id.
    """
    names = {line: one_line(line, _LONGEST_NAME) for line in table.lines}
    left = round(max(46.0, LETTER * max(map(len, names.values())) + 12))
    wide = _width(table)
    parts = [text_at(left, 12, table.column_name)]
    for x, column in enumerate(table.columns):
        parts.append(text_at(left + wide * (x + 0.5), 31, one_line(column, 24), anchor="middle"))
    for y, line in enumerate(table.lines):
        top = HEAD + HIGH * y
        parts.append(text_at(0, top + 26, names[line], f"name p{table.styles[line]}"))
        for x, column in enumerate(table.columns):
            row = table.cells.get((line, column))
            if row is not None:
                parts += _cell(table, row, (line, column), (left + wide * x, top, wide), index)
    foot = HEAD + HIGH * len(table.lines)
    if table.unit:
        foot += 18
        scale = ", colours on a logarithmic scale" if table.log else ""
        parts.append(text_at(left, foot, f"{table.unit}{scale}"))
    across = max(left + 190, left + wide * len(table.columns))
    drawn = svg(title, *parts, size=(across, foot + 6), kind="curve heat-map")
    return drawn.replace("<svg ", f'<svg style="--across:{across}px;width:{across}px" ', 1)


def _width(table: Table) -> int:
    """Pixels of a column: the longest text of any cell."""
    told = [cells.cell_text(table, *place) for place in table.cells]
    longest = max(
        (max((len(one.value) + 2) * 7.4, len(one.note) * 5.7) for one in told), default=0.0
    )
    heads = max((len(one_line(column, 24)) * LETTER for column in table.columns), default=0.0)
    return round(max(62.0, longest + 10, heads + 8))


def _cell(
    table: Table,
    row: Measurement,
    place: tuple[str, str],
    box: tuple[float, float, float],
    index: Mapping[str, int] | None,
) -> Iterator[str]:
    told = cells.cell_text(table, *place)
    at, top, wide = box
    number = (index or {}).get(row.job_id)
    yield f'<g data-row="{number}">' if number is not None else "<g>"
    succeeded = row.state is State.SUCCEEDED
    if not succeeded and number is None:  # else the page tells of the row
        said = f"{row.state}: {one_line(row.reason, 160)}" if row.reason else str(row.state)
        yield f"<title>{escape(visible(said))}</title>"
    shape = f'x="{at + 1:g}" y="{top + 1:g}" width="{wide - 2:g}" height="{HIGH - 2}"'
    kind = "cell" if succeeded else _state(row)
    shade = table.heat(row) * 0.58 + 0.03 if succeeded else 0.1
    yield f'<rect class="{kind}" {shape} opacity="{shade:.2g}"/>'
    if told.mark:
        ring = {"*": "first", "~": "second", "!": "third"}[told.mark]
        yield f'<rect class="ring {ring}" {shape}/>'
    middle = at + wide / 2
    kind = "best" if told.mark == "*" else "ink" if succeeded else f"{_state(row)} word"
    yield _word(middle, top + (19 if told.note else 26), told.value + _SIGNS[told.mark], kind)
    if told.note:
        yield _word(middle, top + 34, told.note, "small")
    yield "</g>"


def _word(x: float, y: float, text: str, kind: str) -> str:
    """A text in the middle of a cell, in few letters: a page has thousands."""
    return f'<text class="c {kind}" x="{x:g}" y="{y:g}">{escape(visible(text))}</text>'


def _state(row: Measurement) -> str:
    return f"state s-{str(row.state).lower()}"
