"""Throughput against batch size as an SVG drawing: a line each, with error bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.job import State
from orchestrator.report import units
from orchestrator.report.contests import interval
from orchestrator.report.drawing import (
    BOTTOM,
    HEIGHT,
    LETTER,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    apart,
    frame,
    mark,
    short_number,
    svg,
    word,
    x_axis,
    y_axis,
)
from orchestrator.report.tables import BATCH, SETTING, Table, uneven

#: An interval that reaches beyond this many times the largest value is clipped there: a bar of
#: three wild repeats must not press all curves into the bottom of the figure.
TALLEST_BAR = 1.35

_Line = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Point:
    batch: int
    value: float
    low: float
    high: float


def throughput_curve(table: Table, title: str) -> str:
    """The drawing of a table as an ``<svg>`` element; empty if fewer than two batch sizes ran."""
    if table.column_name != BATCH:
        return ""
    series = _series(table)
    points = [point for each in series.values() for point in each]
    sizes = {point.batch for point in points}
    if len(sizes) < 2:
        return ""
    failed = _did_not_fit(table)
    ticks = sorted(sizes | {batch for batch, _ in failed})
    x = x_axis(ticks, "batch size per card", lambda value: f"{value:.0f}")
    x = replace(x, ticks=tuple(ticks))
    y = _y_axis(points, table)
    styles = table.styles
    lines = {
        name: [(x.at(point.batch), y.at(point.value)) for point in each]
        for name, each in series.items()
    }
    parts = [frame(x, y)]
    for name, line in lines.items():
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in line)
        bars = "".join(_bar(x, y, point) for point in series[name] if point.high > point.low)
        parts.append(
            f'<g class="p{styles[name]}"><path class="line" d="{path}"/>'
            f'<path class="bar" d="{bars}"/></g>'
        )
        parts += [mark(a, b, styles[name]) for a, b in line]
    parts += _end_names(lines, styles)
    parts += _crosses(failed, x, styles)
    room = max(0.0, LETTER * max(map(len, lines)) - RIGHT + 12)
    return svg(title, *parts, size=(WIDTH + round(room), HEIGHT))


def _y_axis(points: Sequence[_Point], table: Table) -> Axis:
    """From zero; logarithmic where one value would press all others to the bottom."""
    values = [point.value for point in points if point.value > 0]  # those of flagged rows, too
    if uneven(values):
        return y_axis(values, f"{table.unit}, logarithmic", short_number, log=True)
    highest = max(point.value for point in points) * TALLEST_BAR
    top = min(max(point.high for point in points), highest)
    return y_axis([top], table.unit, lambda value: units.number(value, 3), log=False)


def clipped(table: Table) -> bool:
    """Return whether an interval of the drawing reaches beyond its frame, above or below zero."""
    points = [p for series in _series(table).values() for p in series]
    highest = max((p.value for p in points), default=0.0)
    return any(p.low < 0 or p.high > highest * TALLEST_BAR for p in points)


def _series(table: Table) -> dict[str, list[_Point]]:
    """Measured points by precision, ordered by batch size."""
    series: dict[str, list[_Point]] = {}
    for (line, _), row in table.cells.items():
        value = row.metrics.throughput
        if (
            row.state is State.SUCCEEDED
            and row.batch_size is not None
            and row.metrics.throughput_unit == table.unit
            and value is not None
            and math.isfinite(value)
        ):
            low, high = interval(row)
            series.setdefault(line, []).append(_Point(row.batch_size, value, low, high))
    return {
        line: sorted(series[line], key=lambda point: point.batch)
        for line in table.lines
        # Of settings there may be dozens with one point, which the table tells as well.
        if len(series.get(line, ())) > (table.line_name == SETTING)
    }


def _did_not_fit(table: Table) -> list[tuple[int, str]]:
    """Batch size and line of every cell that ran out of memory."""
    return [
        (row.batch_size, line)
        for (line, _), row in table.cells.items()
        if row.state is State.OUT_OF_MEMORY and row.batch_size is not None
    ]


def _bar(x: Axis, y: Axis, point: _Point) -> str:
    """An error bar; an end outside the frame is drawn as an arrow head instead of a cap."""
    at, low, high = x.at(point.batch), y.at(point.low), y.at(point.high)
    cut_below, cut_above = point.low < 0, point.high > y.high * 1.000001
    lower = f"M{at - 3:.1f} {low - 4:.1f}l3 4l3-4" if cut_below else f"M{at - 3:.1f} {low:.1f}h6"
    upper = f"M{at - 3:.1f} {high + 4:.1f}l3-4l3 4" if cut_above else f"M{at - 3:.1f} {high:.1f}h6"
    return f"M{at:.1f} {low:.1f}V{high:.1f}{upper}{lower}"


def _end_names(lines: Mapping[str, _Line], styles: Mapping[str, int]) -> list[str]:
    """The names at the ends of their lines, pushed apart where they would touch.

    A name stands beside its last point or above it where the room is free, else in the margin.
    """
    parts = []
    ends = sorted((line[-1][1], line[-1][0], name) for name, line in lines.items())
    heights = apart([end[0] for end in ends], 14, TOP, HEIGHT - BOTTOM)
    taken: list[tuple[float, float, float]] = []  # left, right, height
    for (own, last, name), height in zip(ends, heights, strict=True):
        others = [line for other, line in lines.items() if other != name]
        wide = LETTER * len(name)
        places = ((last + 9, height), (last - 11, own - 15), (last - 29, own - 10))
        free = (
            (x, y)
            for x, y in places
            if _free(x, y, wide, others)
            and all(x > right or x + wide < left or abs(y - at) > 13 for left, right, at in taken)
        )
        x, y = next(free, (max(last + 9, WIDTH - RIGHT + 2), height))
        taken.append((x, x + wide, y))
        parts.append(word(x, y + 4, name, styles[name]))
    return parts


def _free(x: float, y: float, wide: float, lines: Sequence[_Line]) -> bool:
    """Return whether none of the lines passes where a name would stand."""
    for line in lines:
        for (x1, y1), (x2, y2) in zip(line, [*line[1:], line[-1]], strict=True):
            left, right = max(x1, x - 4), min(x2, x + wide)
            if left > right:
                continue
            slope = (y2 - y1) / (x2 - x1) if x2 > x1 else 0.0
            passes = (y1 + slope * (left - x1), y1 + slope * (right - x1))
            if min(passes) < y + 9 and max(passes) > y - 9:
                return False
    return y < HEIGHT - BOTTOM - 18


def _crosses(failed: Sequence[tuple[int, str]], x: Axis, styles: Mapping[str, int]) -> list[str]:
    """A cross above the axis for each line that ran out of memory at a batch size."""
    parts = []
    seen: dict[int, int] = {}
    for batch, name in failed:
        place = seen[batch] = seen.get(batch, -1) + 1
        left, top = x.at(batch) + 9 * place - 7, HEIGHT - BOTTOM - 10
        parts.append(f'<path class="oom p{styles[name]}" d="M{left:.1f} {top}l6 6m0-6l-6 6"/>')
    return parts
