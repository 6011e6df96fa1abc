"""The page's further figures: Pareto front, scaling over cards, roofline, and bars of ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.measurement import Measurement
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
    precision_style,
    short_number,
    svg,
    word,
    x_axis,
    y_axis,
)
from orchestrator.report.fronts import Front, latency, throughput
from orchestrator.report.ratio import Ratio
from orchestrator.report.reference_data import DeviceSheet
from orchestrator.report.roofline import Share
from orchestrator.report.scaling import Scaling

#: Lines in one figure of scaling; more would hide each other. The table has all.
MOST_LINES = 8


def short_seconds(value: float) -> str:
    """A tick of an axis of time: ``5 ms``, ``2 s``."""
    factor, unit = (1e6, "µs") if value < 1e-3 else (1e3, "ms") if value < 1 else (1, "s")
    return f"{float(f'{value * factor:.2g}'):g} {unit}"


def front_figure(front: Front, title: str, chosen: Callable[[Measurement], str]) -> str:
    """Throughput against latency: every setting a mark, the front a line through its own."""
    rows = (*front.best, *front.beaten)
    values = [throughput(row) for row in rows]
    x = x_axis([latency(row) for row in rows], "median latency of a prompt", short_seconds)
    wide = max(values) / min(values) > 8
    y = y_axis(values, front.unit, short_number, log=wide)
    line = "M" + "L".join(f"{x.at(latency(r)):.1f} {y.at(throughput(r)):.1f}" for r in front.best)
    parts = [frame(x, y), f'<path class="front" d="{line}"/>']
    parts += [_row_mark(row, x, y, "mark pale") for row in front.beaten]
    parts += [_row_mark(row, x, y, "mark") for row in front.best]
    parts.append(_front_names(front, x, y, chosen))
    return svg(title, *parts)


def scaling_figure(scalings: Sequence[Scaling], title: str) -> str:
    """Efficiency against the number of cards, a line for each setting; all of one piece of work."""
    shown = scalings[:MOST_LINES]
    cards = sorted({step.row.cards for one in shown for step in one.steps})
    x = x_axis(cards, "cards", lambda value: f"{value:.0f}")
    x = _with_ticks(x, cards)
    top = max(1.0, *(step.efficiency for one in shown for step in one.steps))
    y = y_axis([top], "efficiency", lambda value: f"{value:.0%}", log=False)
    ideal = y.at(1.0)
    parts = [
        frame(x, y),
        f'<path class="ideal" d="M{x.at(cards[0]):.1f} {ideal:.1f}H{x.at(cards[-1]):.1f}"/>',
    ]
    ends = []
    for one in shown:
        points = [(x.at(s.row.cards), y.at(s.efficiency)) for s in one.steps]
        line = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        parts.append(
            f'<g class="p{precision_style(one.precision)}"><path class="line" d="{line}"/></g>'
        )
        parts += [mark(a, b, one.precision) for a, b in points]
        ends.append((points[-1][1], points[-1][0], one))
    ends.sort(key=lambda end: end[0])
    heights = apart([height for height, _, _ in ends], 14, TOP + 4, HEIGHT - BOTTOM)
    for (_, at, one), height in zip(ends, heights, strict=True):
        parts.append(word(at + 9, height + 4, f"b={one.batch_size}", one.precision))
    return svg(title, *parts)


def roofline_figure(sheet: DeviceSheet, shares: Sequence[Share], title: str) -> str:
    """Decoding steps under the roof of one card: operations per second against intensity.

    Empty where no row has both figures, or the sheet has no bandwidth.
    """
    placed = [(s, s.intensity, at) for s in shares if s.intensity and (at := step_flops(s))]
    if not placed or not sheet.bandwidth_bytes_per_s:
        return ""
    kinds = list(dict.fromkeys(s.arithmetic for s, _, _ in placed if s.arithmetic))
    peaks = [sheet.flops[kind] for kind in kinds]
    ridge = max(peaks, default=0.0) / sheet.bandwidth_bytes_per_s
    across = [intensity for _, intensity, _ in placed]
    low, high = min(across), max(*across, ridge * 2)
    x = x_axis([low, high], "operations per byte of weights", short_number)
    slope = sheet.bandwidth_bytes_per_s
    heights = [at for _, _, at in placed]
    y = y_axis([min(heights), slope * x.low, *peaks, *heights], "TFLOP/s", _tera, log=True)
    parts = [frame(x, y), _roof(x, y, slope, [(kind, sheet.flops[kind]) for kind in kinds])]
    parts += [mark(x.at(i), y.at(at), s.row.precision) for s, i, at in placed]
    return svg(title, *parts)


def step_flops(share: Share) -> float | None:
    """Operations per second of a decoding step on one card."""
    step_s, weights = share.row.metrics.tpot_p50_s, share.row.weight_bytes
    if not share.intensity or not step_s or not weights:
        return None
    return share.intensity * weights / step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioBar:
    """Places on a bar 0 to 100 wide, whose scale is logarithmic."""

    one: float  # where the ratio is 1
    value: float
    low: float
    high: float


def ratio_bars(ratios: Sequence[Ratio]) -> list[RatioBar]:
    """Bars of one list of ratios on one scale; ends beyond a factor of 16 are clipped."""
    reach = 1.25
    for ratio in ratios:
        for value in (ratio.value, ratio.low, ratio.high):
            if value:
                reach = max(reach, value, 1 / value)
    reach = math.log(min(reach * 1.05, 16.0))

    def place(value: float) -> float:
        share = math.log(value) / reach if value > 0 else -1.0
        return round(50 + 50 * min(1.0, max(-1.0, share)), 2)

    return [
        RatioBar(
            one=50.0,
            value=place(ratio.value),
            low=place(ratio.value if ratio.low is None else ratio.low),
            high=place(ratio.value if ratio.high is None else ratio.high),
        )
        for ratio in ratios
    ]


def _row_mark(row: Measurement, x: Axis, y: Axis, kind: str) -> str:
    return mark(x.at(latency(row)), y.at(throughput(row)), row.precision, kind)


def _front_names(front: Front, x: Axis, y: Axis, chosen: Callable[[Measurement], str]) -> str:
    """Names of the settings on the front, left out where they would touch another."""
    parts: list[str] = []
    taken: list[tuple[float, float, float]] = []  # left, right, height
    # The ends first: lowest latency and highest throughput are what one looks for.
    order = [*front.best[-1:], *front.best[:-1]]
    for row in order:
        at, height = x.at(latency(row)), y.at(throughput(row))
        text = chosen(row)
        wide = LETTER * len(text)
        room = at + 10 + wide < WIDTH
        left = at + 9 if room else at - 9 - wide
        line = height + 14 if room else height - 8
        if any(left < b and left + wide > a and abs(line - h) < 15 for a, b, h in taken):
            continue
        taken.append((left, left + wide, line))
        parts.append(word(left, line, text, row.precision))
    return "".join(parts)


def _roof(x: Axis, y: Axis, slope: float, peaks: Sequence[tuple[str, float]]) -> str:
    top = max((peak for _, peak in peaks), default=slope * x.high)
    corner = min(top / slope, x.high)
    parts = [
        f'<path class="roof" d="M{x.at(x.low):.1f} {y.at(slope * x.low):.1f}'
        f'L{x.at(corner):.1f} {y.at(slope * corner):.1f}"/>'
    ]
    for kind, peak in peaks:
        start = max(peak / slope, x.low)
        parts.append(
            f'<path class="roof" d="M{x.at(start):.1f} {y.at(peak):.1f}H{WIDTH - RIGHT}"/>'
            f'<text class="tick" x="{WIDTH - RIGHT + 6}" y="{y.at(peak) + 4:.1f}">{kind}</text>'
        )
    return "".join(parts)


def _tera(value: float) -> str:
    return short_number(value / 1e12)


def _with_ticks(axis: Axis, values: Sequence[float]) -> Axis:
    return replace(axis, ticks=tuple(values))
