"""Throughput against batch size as an SVG drawing: one line a precision, with error bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.domain.job import State
from orchestrator.report import units
from orchestrator.report.contests import interval
from orchestrator.report.drawing import (
    BOTTOM,
    HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    apart,
    frame,
    mark,
    precision_style,
    svg,
    word,
    x_axis,
    y_axis,
)
from orchestrator.report.summary import Table

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
    series = _series(table)
    points = [point for each in series.values() for point in each]
    sizes = {point.batch for point in points}
    if len(sizes) < 2:
        return ""
    failed = _did_not_fit(table)
    ticks = sorted(sizes | {batch for batch, _ in failed})
    x = x_axis(ticks, "batch size per card", lambda value: f"{value:.0f}")
    x = replace(x, ticks=tuple(ticks))
    highest = max(point.value for point in points) * TALLEST_BAR
    top = min(max(point.high for point in points), highest)
    y = y_axis([top], table.unit, lambda value: units.number(value, 3), log=False)
    lines = {
        precision: [(x.at(point.batch), y.at(point.value)) for point in each]
        for precision, each in series.items()
    }
    parts = [frame(x, y)]
    for precision, line in lines.items():
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in line)
        bars = "".join(_bar(x, y, point) for point in series[precision] if point.high > point.low)
        parts.append(
            f'<g class="p{precision_style(precision)}"><path class="line" d="{path}"/>'
            f'<path class="bar" d="{bars}"/></g>'
        )
        parts += [mark(a, b, precision) for a, b in line]
    parts += _end_names(lines)
    parts += _crosses(failed, x)
    return svg(title, *parts)


def clipped(table: Table) -> bool:
    """Return whether an interval of the drawing reaches beyond its frame, above or below zero."""
    points = [p for series in _series(table).values() for p in series]
    highest = max((p.value for p in points), default=0.0)
    return any(p.low < 0 or p.high > highest * TALLEST_BAR for p in points)


def _series(table: Table) -> dict[str, list[_Point]]:
    """Measured points by precision, ordered by batch size."""
    series: dict[str, list[_Point]] = {}
    for (precision, _), row in table.cells.items():
        value = row.metrics.throughput
        if (
            row.state is State.SUCCEEDED
            and row.batch_size is not None
            and row.metrics.throughput_unit == table.unit
            and value is not None
            and math.isfinite(value)
        ):
            low, high = interval(row)
            series.setdefault(precision, []).append(_Point(row.batch_size, value, low, high))
    return {
        precision: sorted(series[precision], key=lambda point: point.batch)
        for precision in table.precisions
        if precision in series
    }


def _did_not_fit(table: Table) -> list[tuple[int, str]]:
    """Batch size and precision of every cell that ran out of memory."""
    return [
        (row.batch_size, precision)
        for (precision, _), row in table.cells.items()
        if row.state is State.OUT_OF_MEMORY and row.batch_size is not None
    ]


def _bar(x: Axis, y: Axis, point: _Point) -> str:
    """An error bar; an end outside the frame is drawn as an arrow head instead of a cap."""
    at, low, high = x.at(point.batch), y.at(point.low), y.at(point.high)
    cut_below, cut_above = point.low < 0, point.high > y.high * 1.000001
    lower = f"M{at - 3:.1f} {low - 4:.1f}l3 4l3-4" if cut_below else f"M{at - 3:.1f} {low:.1f}h6"
    upper = f"M{at - 3:.1f} {high + 4:.1f}l3-4l3 4" if cut_above else f"M{at - 3:.1f} {high:.1f}h6"
    return f"M{at:.1f} {low:.1f}V{high:.1f}{upper}{lower}"


def _end_names(lines: Mapping[str, _Line]) -> list[str]:
    """The precisions' names at the ends of their lines, pushed apart where they would touch.

    A name stands beside its last point or above it where the room is free, else in the margin.
    """
    parts = []
    ends = sorted((line[-1][1], line[-1][0], precision) for precision, line in lines.items())
    heights = apart([end[0] for end in ends], 14, TOP, HEIGHT - BOTTOM)
    for (own, last, precision), height in zip(ends, heights, strict=True):
        others = [line for other, line in lines.items() if other != precision]
        places = ((last + 9, height), (last - 11, own - 15), (last - 29, own - 10))
        free = (place for place in places if _free(*place, others))
        x, y = next(free, (max(last + 9, WIDTH - RIGHT + 2), height))
        parts.append(word(x, y + 4, precision, precision))
    return parts


def _free(x: float, y: float, lines: Sequence[_Line]) -> bool:
    """Return whether none of the lines passes where a name would stand."""
    for line in lines:
        for (x1, y1), (x2, y2) in zip(line, [*line[1:], line[-1]], strict=True):
            left, right = max(x1, x - 4), min(x2, x + 32)
            if left > right:
                continue
            slope = (y2 - y1) / (x2 - x1) if x2 > x1 else 0.0
            passes = (y1 + slope * (left - x1), y1 + slope * (right - x1))
            if min(passes) < y + 9 and max(passes) > y - 9:
                return False
    return y < HEIGHT - BOTTOM - 18


def _crosses(failed: Sequence[tuple[int, str]], x: Axis) -> list[str]:
    """A cross above the axis for each precision that ran out of memory at a batch size."""
    parts = []
    seen: dict[int, int] = {}
    for batch, precision in failed:
        place = seen[batch] = seen.get(batch, -1) + 1
        left, top = x.at(batch) + 9 * place - 7, HEIGHT - BOTTOM - 10
        style = precision_style(precision)
        parts.append(f'<path class="oom p{style}" d="M{left:.1f} {top}l6 6m0-6l-6 6"/>')
    return parts
