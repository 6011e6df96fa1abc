"""Throughput against batch size as an SVG drawing: one line a precision, with error bars.

Drawn here and not in the browser, so that the figure is there without scripts, prints well and
can be tested. Colours are CSS classes, so it follows the page into the dark; every precision also
has a shape of its own and its name at the end of its line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from orchestrator.domain.job import State
from orchestrator.report import units
from orchestrator.report.contests import interval
from orchestrator.report.drawing import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    SHAPES,
    TOP,
    WIDTH,
    axis_names,
    nice_top,
    precision_style,
    svg,
)
from orchestrator.report.safe import visible
from orchestrator.report.summary import Table

#: An interval that reaches beyond this many times the largest value is clipped there: a bar of
#: three wild repeats must not press all curves into the bottom of the figure.
TALLEST_BAR = 1.35


@dataclass(frozen=True, slots=True)
class _Point:
    batch: int
    value: float
    low: float
    high: float


def throughput_curve(table: Table, title: str) -> str:
    """The drawing of a table as an ``<svg>`` element; empty if fewer than two batch sizes ran."""
    series = _series(table)
    sizes = sorted({p.batch for points in series.values() for p in points})
    failed = _did_not_fit(table)
    ticks_x = sorted({*sizes, *(batch for batch, _ in failed)})
    if len(sizes) < 2:
        return ""
    highest = max(p.value for points in series.values() for p in points)
    wanted = max(p.high for points in series.values() for p in points)
    top, step = nice_top(min(wanted, highest * TALLEST_BAR))
    parts = [_axes(ticks_x, top, step, table.unit)]
    ends: list[tuple[float, str]] = []
    for precision, points in series.items():
        at = [(_x(p.batch, ticks_x), p) for p in points]
        style = precision_style(precision)
        line = "M" + "L".join(f"{x:.1f} {_y(p.value, top):.1f}" for x, p in at)
        bars = "".join(_bar(x, p, top) for x, p in at if p.high > p.low)
        marks = "".join(f"M{x:.1f} {_y(p.value, top):.1f}{SHAPES[style]}" for x, p in at)
        parts.append(
            f'<g class="p{style}"><path class="line" d="{line}"/>'
            f'<path class="bar" d="{bars}"/><path class="mark" d="{marks}"/></g>'
        )
        ends.append((_y(points[-1].value, top), precision))
    parts.append(_end_labels(ends, series, ticks_x, top))
    parts.append(_crosses(failed, ticks_x))
    return svg(title, *parts)


def clipped(table: Table) -> bool:
    """Return whether an interval of the drawing reaches beyond its frame, above or below zero."""
    points = [p for series in _series(table).values() for p in series]
    highest = max((p.value for p in points), default=0.0)
    return any(p.low < 0 or p.high > highest * TALLEST_BAR for p in points)


def _bar(x: float, point: _Point, top: float) -> str:
    """An error bar; an end outside the frame is drawn as an arrow head instead of a cap."""
    low, high = _y(max(point.low, 0.0), top), _y(min(point.high, top), top)
    lower = f"M{x - 3:.1f} {low:.1f}h6" if point.low >= 0 else f"M{x - 3:.1f} {low - 4:.1f}l3 4l3-4"
    inside = point.high <= top * 1.000001
    upper = f"M{x - 3:.1f} {high:.1f}h6" if inside else f"M{x - 3:.1f} {high + 4:.1f}l3-4l3 4"
    return f"M{x:.1f} {low:.1f}V{high:.1f}{upper}{lower}"


def _series(table: Table) -> dict[str, list[_Point]]:
    """Measured points by precision, ordered by batch size."""
    series: dict[str, list[_Point]] = {}
    for precision in table.precisions:
        points = []
        for column in table.batch_sizes:
            row = table.cells.get((precision, column))
            if row is None or row.state is not State.SUCCEEDED or row.batch_size is None:
                continue
            if row.job_id in table.flagged:
                continue
            value = row.metrics.throughput
            if (
                value is None
                or not math.isfinite(value)
                or row.metrics.throughput_unit != (table.unit)
            ):
                continue
            low, high = interval(row)
            points.append(_Point(row.batch_size, value, low, high))
        if points:
            series[precision] = sorted(points, key=lambda p: p.batch)
    return series


def _did_not_fit(table: Table) -> list[tuple[int, str]]:
    """Batch size and precision of every cell that ran out of memory."""
    return [
        (row.batch_size, precision)
        for (precision, _), row in table.cells.items()
        if row.state is State.OUT_OF_MEMORY and row.batch_size is not None
    ]


def _x(batch: int, sizes: Sequence[int]) -> float:
    """Logarithmic position between the smallest and the largest batch size."""
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])
    return LEFT + 10 + (WIDTH - LEFT - RIGHT - 20) * (math.log2(batch) - low) / (high - low)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top


def _axes(sizes: Sequence[int], top: float, step: float, unit: str) -> str:
    parts = []
    for i in range(round(top / step) + 1):
        y = _y(i * step, top)
        parts.append(
            f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{units.number(i * step, 3)}</text>"
        )
    last = -100.0
    for size in sizes:
        x = _x(size, sizes)
        if x - last >= 24:
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" '
                f'text-anchor="middle">{size}</text>'
            )
            last = x
    return "".join(parts) + axis_names("batch size per card", unit)


def _end_labels(
    ends: list[tuple[float, str]],
    series: dict[str, list[_Point]],
    sizes: Sequence[int],
    top: float,
) -> str:
    """The precisions' names at the ends of their lines, pushed apart where they would touch.

    A name stands beside its last point or above it where the room is free, else in the margin.
    """
    parts = []
    floor = float("-inf")
    placed = []
    for y, precision in sorted(ends):
        floor = max(y, floor + 14)
        placed.append((floor, precision))
    overflow = max(0.0, placed[-1][0] - (HEIGHT - BOTTOM)) if placed else 0.0
    for y, precision in placed:
        last = series[precision][-1]
        x, y = _x(last.batch, sizes) + 9, y - overflow
        if not _free(x, y, precision, series, sizes, top):
            own = _y(last.value, top)
            places = ((x - 20, own - 15), (x - 38, own - 10))
            free = [p for p in places if _free(*p, precision, series, sizes, top)]
            x, y = free[0] if free else (max(x, WIDTH - RIGHT + 2), y)
        parts.append(
            f'<text class="name p{precision_style(precision)}" x="{x:.1f}" '
            f'y="{y + 4:.1f}">{escape(visible(precision))}</text>'
        )
    return "".join(parts)


def _free(
    x: float,
    y: float,
    precision: str,
    series: dict[str, list[_Point]],
    sizes: Sequence[int],
    top: float,
) -> bool:
    """Return whether no line of another precision passes where a name would stand."""
    for other, points in series.items():
        if other == precision:
            continue
        at = [(_x(p.batch, sizes), _y(p.value, top)) for p in points]
        for (x1, y1), (x2, y2) in zip(at, [*at[1:], at[-1]], strict=True):
            left, right = max(x1, x - 4), min(x2, x + 32)
            if left > right:
                continue
            slope = (y2 - y1) / (x2 - x1) if x2 > x1 else 0.0
            passes = (y1 + slope * (left - x1), y1 + slope * (right - x1))
            if min(passes) < y + 9 and max(passes) > y - 9:
                return False
    return y < HEIGHT - BOTTOM - 18


def _crosses(failed: list[tuple[int, str]], sizes: Sequence[int]) -> str:
    """A cross below the axis for each precision that ran out of memory at a batch size."""
    parts = []
    seen: dict[int, int] = {}
    for batch, precision in failed:
        place = seen.get(batch, 0)
        seen[batch] = place + 1
        x, y = _x(batch, sizes) + 9 * place - 4, HEIGHT - BOTTOM - 7
        parts.append(
            f'<path class="oom p{precision_style(precision)}" '
            f'd="M{x - 3:.1f} {y - 3}l6 6m0-6l-6 6"/>'
        )
    return "".join(parts)
