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

from orchestrator.job import State
from orchestrator.report import units
from orchestrator.report.contests import interval
from orchestrator.report.safe import visible
from orchestrator.report.summary import Table

WIDTH, HEIGHT = 520, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 64, 16, 56

#: Marker shapes as SVG path data around the origin, by place in the report order of precisions.
SHAPES = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",  # circle
    "m-3.6-3.6h7.2v7.2h-7.2z",  # square
    "m0-5l5 5l-5 5l-5-5z",  # diamond
    "m0-5l4.8 8.4h-9.6z",  # triangle
    "m0 5l4.8-8.4h-9.6z",  # triangle, upside down
    "m-4.5-1.5h3v-3h3v3h3v3h-3v3h-3v-3h-3z",  # cross
)


@dataclass(frozen=True, slots=True)
class _Point:
    batch: int
    value: float
    low: float
    high: float


def precision_style(precision: str) -> int:
    """Number of the colour and shape of a precision, from 0 to 5."""
    known = {"fp32": 0, "tf32": 0, "fp16": 1, "bf16": 2, "fp8": 3, "int8": 4, "int4": 5}
    return known.get(precision, sum(map(ord, precision)) % len(SHAPES))


def throughput_curve(table: Table, title: str) -> str:
    """The drawing of a table as an ``<svg>`` element; empty if fewer than two batch sizes ran."""
    series = _series(table)
    sizes = sorted({p.batch for points in series.values() for p in points})
    failed = _did_not_fit(table)
    ticks_x = sorted({*sizes, *(batch for batch, _ in failed)})
    if len(sizes) < 2:
        return ""
    top, step = nice_top(max(p.high for points in series.values() for p in points))
    parts = [
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape(visible(title))}</title>",
        _axes(ticks_x, top, step, table.unit),
    ]
    ends: list[tuple[float, str]] = []
    for precision, points in series.items():
        at = [(_x(p.batch, ticks_x), p) for p in points]
        style = precision_style(precision)
        line = "M" + "L".join(f"{x:.1f} {_y(p.value, top):.1f}" for x, p in at)
        bars = "".join(
            f"M{x:.1f} {_y(p.low, top):.1f}V{_y(p.high, top):.1f}"
            f"m-3 0h6M{x - 3:.1f} {_y(p.low, top):.1f}h6"
            for x, p in at
            if p.high > p.low
        )
        marks = "".join(f"M{x:.1f} {_y(p.value, top):.1f}{SHAPES[style]}" for x, p in at)
        parts.append(
            f'<g class="p{style}"><path class="line" d="{line}"/>'
            f'<path class="bar" d="{bars}"/><path class="mark" d="{marks}"/></g>'
        )
        ends.append((_y(points[-1].value, top), precision))
    parts.append(_end_labels(ends, series, ticks_x, top))
    parts.append(_crosses(failed, ticks_x))
    parts.append("</svg>")
    return "".join(parts)


def nice_top(value: float) -> tuple[float, float]:
    """The top of an axis that holds ``value``, and the step of its four to six ticks."""
    if not math.isfinite(value) or value <= 0:
        return 1.0, 0.25
    raw = value / 4.5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    return step * math.ceil(value / step - 1e-9), step


def _series(table: Table) -> dict[str, list[_Point]]:
    """Measured points by precision, ordered by batch size."""
    series: dict[str, list[_Point]] = {}
    for precision in table.precisions:
        points = []
        for column in table.batch_sizes:
            row = table.cells.get((precision, column))
            if row is None or row.state is not State.SUCCEEDED or row.batch_size is None:
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
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">'
        "batch size per card</text>"
        f'<text class="axis" transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(visible(unit))}</text>'
    )
    return "".join(parts)


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
    """Whether no line of another precision passes where a name would stand."""
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
