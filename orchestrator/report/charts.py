"""Charts as SVG: cells and curves of a table, Pareto fronts, scaling, rooflines, bars of ratios."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import wrap

from orchestrator.analysis.effects import Effect, Scaling
from orchestrator.analysis.hardware import Comparison, DeviceSheet, Share
from orchestrator.analysis.rankings import Front, interval, latency, throughput
from orchestrator.analysis.ratio import Ratio
from orchestrator.analysis.selection import Differences, Setting, described
from orchestrator.analysis.serving import Point, Served
from orchestrator.analysis.tables import BATCH, PRECISION, SETTING, Table, uneven
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report import wording
from orchestrator.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LETTER,
    RIGHT,
    TOP,
    WIDE,
    WIDTH,
    Axis,
    apart,
    frame,
    mark,
    path_of,
    precision_style,
    short_number,
    svg,
    text_at,
    word,
    x_axis,
    y_axis,
)
from orchestrator.util import format as units
from orchestrator.util.format import one_line, visible

#: Clip intervals at this multiple of the largest value, so that they do not flatten the curves.
TALLEST_BAR = 1.35

_Line = Sequence[tuple[float, float]]
_Box = tuple[float, float, float, float]  # left, right, top, bottom


@dataclass(frozen=True, slots=True)
class _Point:
    batch: int
    value: float
    low: float
    high: float


def throughput_curve(table: Table, title: str) -> str:
    """Return the ``<svg>`` of a table's curves; "" for fewer than two batch sizes."""
    if table.column_name != BATCH:
        return ""
    series = _series(table)
    points = [point for line in series.values() for point in line]
    sizes = {point.batch for point in points}
    if len(sizes) < 2:
        return ""
    failed = [  # out of memory
        (row.batch_size, line)
        for (line, _), row in table.cells.items()
        if row.state is State.OUT_OF_MEMORY and row.batch_size is not None
    ]
    ticks = sorted(sizes | {batch for batch, _ in failed})
    x = x_axis(ticks, "batch size per card", lambda value: f"{value:.0f}")
    x = replace(x, ticks=tuple(ticks))
    y = _y_axis(points, table)
    styles, parts, ends = line_styles(table), [frame(x, y)], []
    for name, points_of in series.items():
        line = [(x.at(point.batch), y.at(point.value)) for point in points_of]
        bars = "".join(_bar(x, y, point) for point in points_of if point.high > point.low)
        parts += _line_of(line, styles[name], f'<path class="bar" d="{bars}"/>')
        ends.append((*line[-1], name, styles[name]))
    return _with_names(title, parts, ends, *_crosses(failed, x, styles))


def _with_names(
    title: str, parts: Sequence[str], ends: Sequence[tuple[float, float, str, int]], *more: str
) -> str:
    """Return the ``<svg>`` of a figure, as wide as the names at the ends of its lines."""
    room = max(0.0, LETTER * max(len(name) for _, _, name, _ in ends) - RIGHT + 12)
    size = (WIDTH + round(room), HEIGHT)
    return svg(title, *parts, *_names_at_ends(ends), *more, size=size)


def _line_of(points: _Line, style: int, bars: str = "") -> Iterator[str]:
    yield f'<g class="p{style}"><path class="line" d="{path_of(points)}"/>{bars}</g>'
    yield from (mark(x, y, style) for x, y in points)


def line_styles(table: Table) -> dict[str, int]:
    """Return the number of each line's colour and shape."""
    by_precision = table.line_name == PRECISION
    return {n: precision_style(n if by_precision else at) for at, n in enumerate(table.lines)}


def _y_axis(points: Sequence[_Point], table: Table) -> Axis:
    """Return an axis from zero, or logarithmic if one value would flatten the others."""
    values = [point.value for point in points if point.value > 0]  # flagged rows included
    if uneven(values):
        return y_axis(values, f"{table.unit}, logarithmic", short_number, log=True)
    highest = max(point.value for point in points) * TALLEST_BAR
    top = min(max(point.high for point in points), highest)
    return y_axis([top], table.unit, lambda value: units.number(value, 3), log=False)


def clipped(table: Table) -> bool:
    """Return whether an interval reaches beyond the frame, above or below zero."""
    points = [p for series in _series(table).values() for p in series]
    highest = max((p.value for p in points), default=0.0)
    return any(p.low < 0 or p.high > highest * TALLEST_BAR for p in points)


def _series(table: Table) -> dict[str, list[_Point]]:
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
        # Dozens of settings may have one point each; the table shows those.
        if len(series.get(line, ())) > (table.line_name == SETTING)
    }


def _bar(x: Axis, y: Axis, point: _Point) -> str:
    """Return an error bar; an end outside the frame is an arrow head instead of a cap."""
    at, low, high = x.at(point.batch), y.at(point.low), y.at(point.high)
    cut_below, cut_above = point.low < 0, point.high > y.high * 1.000001
    lower = f"M{at - 3:.1f} {low - 4:.1f}l3 4l3-4" if cut_below else f"M{at - 3:.1f} {low:.1f}h6"
    upper = f"M{at - 3:.1f} {high + 4:.1f}l3-4l3 4" if cut_above else f"M{at - 3:.1f} {high:.1f}h6"
    return f"M{at:.1f} {low:.1f}V{high:.1f}{upper}{lower}"


def _names_at_ends(ends: Iterable[tuple[float, float, str, str | int]]) -> Iterator[str]:
    """Yield names (place, height, name and style) to the right of their lines, apart."""
    ordered = sorted(ends, key=lambda end: end[1])
    heights = apart([height for _, height, *_ in ordered], 14, TOP + 4, HEIGHT - BOTTOM)
    for (at, _, name, style), height in zip(ordered, heights, strict=True):
        yield word(at + 9, height + 4, name, style)


def _crosses(failed: Sequence[tuple[int, str]], x: Axis, styles: Mapping[str, int]) -> list[str]:
    parts, seen = [], Counter[int]()
    for batch, name in failed:
        left, top = x.at(batch) + 9 * seen[batch] - 7, HEIGHT - BOTTOM - 10
        parts.append(f'<path class="oom p{styles[name]}" d="M{left:.1f} {top}l6 6m0-6l-6 6"/>')
        seen[batch] += 1
    return parts


# ---------------------------------------------------------------- fronts, scaling, rooflines

MOST_LINES = 8


def short_seconds(value: float) -> str:
    """Format a tick of a time axis: ``5 ms``, ``2 s``."""
    factor, unit = (1e6, "µs") if value < 1e-3 else (1e3, "ms") if value < 1 else (1, "s")
    return f"{float(f'{value * factor:.2g}'):g} {unit}"


def front_figure(front: Front, title: str, chosen: Callable[[Measurement], str]) -> str:
    """Draw throughput against latency: a mark for each setting, a line through the front."""
    rows = (*front.best, *front.beaten)
    values = [throughput(row) for row in rows]
    x = x_axis([latency(row) for row in rows], "median latency of a prompt", short_seconds)
    wide = max(values) / min(values) > 8
    y = y_axis(values, front.unit, short_number, log=wide)
    line = path_of((x.at(latency(row)), y.at(throughput(row))) for row in front.best)
    parts = [frame(x, y), f'<path class="front" d="{line}"/>']
    parts += [_row_mark(row, x, y, "mark pale") for row in front.beaten]
    parts += [_row_mark(row, x, y, "mark") for row in front.best]
    parts.append(_front_names(front, x, y, chosen))
    return svg(title, *parts)


def load_figure(
    served: Served,
    title: str,
    x_name: str,
    y_name: str,
    place: Callable[[Point], tuple[float, float] | None],
    *,
    front: Sequence[Point] = (),
    over_load: bool = False,
) -> str:
    """Draw a line for each setting of servers over its loads, and a front through the best points.

    With ``over_load`` the loads are marked below, and the upward axis is logarithmic. ``place``
    returns a point's two values; None or values that are not above 0 leave it out. Knees have a
    ring. "" if fewer than two points are left.
    """

    def drawn(points: Iterable[Point]) -> list[tuple[float, float]]:
        pairs = (place(point) for point in points if not point.flagged)
        return [pair for pair in pairs if pair and min(pair) > 0]

    values = [drawn(curve.points) for curve in served.curves[:MOST_LINES]]
    every = [pair for pairs in values for pair in pairs]
    if len(every) < 2:
        return ""
    x = x_axis([at for at, _ in every], x_name, short_number)
    if over_load:
        x = replace(x, ticks=tuple(sorted({at for at, _ in every})))
    y = y_axis([value for _, value in every], y_name, short_number, log=over_load)
    parts = [frame(x, y)]
    ends = []
    for style, (curve, pairs) in enumerate(zip(served.curves, values, strict=False)):
        if not pairs:
            continue
        line = sorted((x.at(at), y.at(value)) for at, value in pairs)
        parts += _line_of(line, style)
        for at, value in drawn([curve.knee] if curve.knee else []):
            parts.append(f'<circle class="knee" cx="{x.at(at):.1f}" cy="{y.at(value):.1f}" r="8"/>')
        ends.append((*line[-1], curve.name, style))
    best = drawn(front)
    if len(best) > 1:
        parts.append(f'<path class="front" d="{path_of((x.at(a), y.at(b)) for a, b in best)}"/>')
    return _with_names(title, parts, ends)


def scaling_figure(scalings: Sequence[Scaling], title: str) -> str:
    """Draw efficiency against cards, a line for each setting of one piece of work."""
    shown = scalings[:MOST_LINES]
    cards = sorted({step.row.cards for one in shown for step in one.steps})
    x = replace(x_axis(cards, "cards", lambda value: f"{value:.0f}"), ticks=tuple(cards))
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
        parts += _line_of(points, precision_style(one.precision))
        ends.append((*points[-1], f"b={one.batch_size}", one.precision))
    return svg(title, *parts, *_names_at_ends(ends))


def roofline_figure(sheet: DeviceSheet, shares: Sequence[Share], title: str) -> str:
    """Draw decoding steps under a roofline: operations/s against intensity; "" without data."""
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
    every = [min(heights), slope * x.low, *peaks, *heights]
    y = y_axis(every, "TFLOP/s", lambda value: short_number(value / 1e12), log=True)
    parts = [frame(x, y), _roof(x, y, slope, [(kind, sheet.flops[kind]) for kind in kinds])]
    parts += [mark(x.at(i), y.at(at), s.row.precision) for s, i, at in placed]
    return svg(title, *parts)


def step_flops(share: Share) -> float | None:
    """Return operations per second of a decoding step on one card."""
    step_s, weights = share.row.metrics.tpot_p50_s, share.row.weight_bytes
    return share.intensity * weights / step_s if share.intensity and step_s and weights else None


def ratio_scale(ratios: Sequence[Ratio]) -> Callable[[float], float]:
    """Return positions (0 to 100) of ratios on a log scale around 1, clipped at a factor of 16."""
    ends = [v for one in ratios for v in (one.value, one.low, one.high) if v]
    reach = math.log(min(1.05 * max(1.25, *ends, *(1 / end for end in ends)), 16.0))

    def place(value: float) -> float:
        share = math.log(value) / reach if value > 0 else -1.0
        return round(50 + 50 * min(1.0, max(-1.0, share)), 2)

    return place


def _row_mark(row: Measurement, x: Axis, y: Axis, kind: str) -> str:
    return mark(x.at(latency(row)), y.at(throughput(row)), row.precision, kind)


#: Where a name stands: to the right or the left of its mark, and pixels below its middle.
_PLACES = ((1, 4), (-1, 4), (1, 18), (-1, -10), (1, -10), (-1, 18), (1, 32), (-1, -24))


def _front_names(front: Front, x: Axis, y: Axis, chosen: Callable[[Measurement], str]) -> str:
    """Return names of the settings on the front, apart from marks and from each other."""
    parts: list[str] = []
    taken = []
    for row in (*front.best, *front.beaten):
        at, height = x.at(latency(row)), y.at(throughput(row))
        taken.append((at - 6, at + 6, height - 6, height + 6))
    # Lowest latency and highest throughput matter most, so place the ends first.
    for row in (*front.best[-1:], *front.best[:-1]):
        at, height = x.at(latency(row)), y.at(throughput(row))
        text = chosen(row)
        wide = LETTER * len(text)
        for side, below in _PLACES:
            left, line = at + 9 if side > 0 else at - 9 - wide, height + below
            box = (left, left + wide, line - 11, line + 3)
            inside = left > LEFT and left + wide < WIDTH and TOP < line < HEIGHT - BOTTOM
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                parts.append(word(left, line, text, row.precision))
                break
    return "".join(parts)


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


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
            + text_at(WIDTH - RIGHT + 6, y.at(peak) + 4, kind)
        )
    return "".join(parts)


def scaling_groups(scalings: Sequence[Scaling]) -> list[list[Scaling]]:
    """Group scalings by piece of work; each group shares a figure."""
    groups: dict[Setting, list[Scaling]] = {}
    for one in scalings:
        groups.setdefault(one.setting, []).append(one)
    return list(groups.values())


def roofline_groups(shares: Sequence[Share]) -> list[tuple[DeviceSheet, list[Share]]]:
    """Return the rows of each card, nearest to one of its limits first."""
    groups: dict[str, list[Share]] = {}
    for share in shares:
        groups.setdefault(share.sheet.device, []).append(share)
    return [
        (group[0].sheet, sorted(group, key=nearness, reverse=True)) for group in groups.values()
    ]


def nearness(share: Share) -> float:
    """Return the larger share of the card's limits."""
    return max(share.bandwidth or 0.0, share.compute or 0.0)


# ---------------------------------------------------------------- bars

#: Characters of a label's line before it wraps, so that bars fit on a phone, and width of each.
LABEL_CHARACTERS = 44
CHARACTER_PX = 7.0


def effects_chart(effects: Sequence[Effect], title: str) -> str:
    """Draw ratios of throughput with intervals on one logarithmic scale."""
    parts, labels = [], []
    scale, line = 2.3, 15
    apart = Differences.among([effect.label_setting for effect in effects])
    places = {(effect.setting.model, effect.setting.where) for effect in effects}
    for effect in effects:
        change = f"{effect.before or 'unset'} → {effect.after or 'unset'}"
        about = f"{effect.name.replace('_', ' ')} {change}"
        if len(places) > 1:  # else the table below says it once
            about += f", {effect.setting.model} {effect.setting.where}"
        if others := described(apart.of(effect.label_setting)):
            about += f" · {others}"
        labels.append(wrap(one_line(about), LABEL_CHARACTERS))
    longest = max((len(name) for names in labels for name in names), default=0)
    start = 16 + CHARACTER_PX * longest
    foot = 6
    place = ratio_scale([effect.ratio for effect in effects])
    for effect, names in zip(effects, labels, strict=True):
        ratio, middle = effect.ratio, foot + 6
        kind = ("gain" if ratio.value > 1 else "loss") if ratio.decided else "unsure"
        written = f"{ratio.side} {units.times(ratio.value)}".lstrip()
        ends = (ratio.value, ratio.value)
        if ratio.low is not None and ratio.high is not None:
            ends = (ratio.low, ratio.high)
            written += f", {units.times(ratio.low)} to {units.times(ratio.high)}"
        low, value, end = (start + scale * place(v) for v in (ends[0], ratio.value, ends[1]))
        parts += [
            *(text_at(0, middle + 4 + line * n, name) for n, name in enumerate(names)),
            f'<path class="{kind}" d="M{low:.1f} {middle}H{end:.1f}"/>',
            f'<circle class="{kind}" cx="{value:.1f}" cy="{middle}" r="3.6"/>',
            text_at(start + 100 * scale + 12, middle + 4, written, "ink"),
        ]
        foot += 9 + line * len(names)
    parts.insert(0, f'<path class="ideal" d="M{start + 50 * scale} 0V{foot}"/>')
    parts.append(
        text_at(start + 50 * scale, foot + 14, "throughput, times the baseline's", anchor="middle")
    )
    return svg(title, *parts, size=(WIDE, foot + 20))


def published_chart(one: Comparison, title: str) -> str:
    """Draw bars of published figures and this run's."""
    start, high = 330, 26
    top = max((line.figure.value for line in one.lines), default=0.0) or 1.0
    parts = []
    for y, line in enumerate(one.lines):
        figure, at = line.figure, high * y
        who = "this run" if line.ours else "published"
        name = f"{who}: {figure.title}"
        length = 340 * figure.value / top
        kind = "ours" if line.ours else "theirs"
        box = f'y="{at + 3}" width="{length:.1f}" height="{high - 6}"'
        parts += [
            text_at(0, at + 17, one_line(name, 50)),
            f'<rect class="{kind}" x="{start}" {box}/>',
            text_at(start + length + 6, at + 17, units.number(figure.value), "ink"),
        ]
    foot = high * len(one.lines) + 16
    better = ", less is better" if one.about.metric == "latency" else ""
    parts.append(text_at(start, foot, one.about.unit + better))
    return svg(title, *parts, size=(WIDE, foot + 6))


# ---------------------------------------------------------------- the cells of a table

HIGH, HEAD = 44, 38
#: Distance of the lines of hatched boxes.
PITCH = 8
_SIGNS = {"": "", "*": " ★", "~": " ≈", "!": " !"}
_LONGEST_NAME = 44


def heat_map(table: Table, title: str, index: Mapping[str, int] | None = None) -> str:
    """Return the ``<svg>`` of a table's cells; ``index`` is each row's number by job id."""
    names = {line: one_line(line, _LONGEST_NAME) for line in table.lines}
    if len(set(names.values())) < len(names):  # the cut names would not tell lines apart
        names = {line: one_line(line) for line in table.lines}
    left = round(max(46.0, LETTER * max(map(len, names.values())) + 12))
    wide, styles = _width(table), line_styles(table)
    parts = [text_at(left, 12, table.column_name)]
    for x, column in enumerate(table.columns):
        parts.append(text_at(left + wide * (x + 0.5), 31, one_line(column, 24), anchor="middle"))
    for y, line in enumerate(table.lines):
        top = HEAD + HIGH * y
        parts.append(text_at(0, top + 26, names[line], f"name p{styles[line]}"))
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
    cells = [wording.cell(table, *place) for place in table.cells]
    widths = [(len(cell.text) + 2) * 7.4 for cell in cells]
    widths += [len(note) * 5.7 for cell in cells for note in cell.notes]
    longest = max(widths, default=0.0)
    heads = max((len(one_line(column, 24)) * LETTER for column in table.columns), default=0.0)
    return round(max(62.0, longest + 10, heads + 8))


def _cell(
    table: Table,
    row: Measurement,
    place: tuple[str, str],
    box: tuple[float, float, float],
    index: Mapping[str, int] | None,
) -> Iterator[str]:
    text = wording.cell(table, *place)
    at, top, wide = box
    number = (index or {}).get(row.job_id)
    yield f'<g data-row="{number}">' if number is not None else "<g>"
    succeeded = row.state is State.SUCCEEDED
    if not succeeded and number is None:  # else the page shows the row's details
        said = f"{row.state}: {one_line(row.reason, 160)}" if row.reason else str(row.state)
        yield f"<title>{escape(visible(said))}</title>"
    shape = f'x="{at + 1:g}" y="{top + 1:g}" width="{wide - 2:g}" height="{HIGH - 2}"'
    kind = "cell" if succeeded else _state(row)
    shade = table.heat(row) * 0.58 + 0.03 if succeeded else 0.1
    predicted = table.predicted.get(row.job_id)
    if predicted is None:
        yield f'<rect class="{kind}" {shape} opacity="{shade:.2g}"/>'
    else:
        yield _hatched(at + 1, top + 1, wide - 2, HIGH - 2, shape)
    if text.mark:
        ring = {"*": "first", "~": "second", "!": "third"}[text.mark]
        yield f'<rect class="ring {ring}" {shape}/>'
    middle = at + wide / 2
    kind = "best" if text.mark == "*" else "ink" if succeeded else f"{_state(row)} word"
    kind = "predicted" if predicted is not None else kind
    yield _word(middle, top + (19 if text.notes else 26), text.text + _SIGNS[text.mark], kind)
    for note in text.notes:
        yield _word(middle, top + 34, note, "small")
    yield "</g>"


def _hatched(x: float, y: float, wide: float, high: float, shape: str) -> str:
    """Return a box with diagonal lines, which no measured cell has."""
    lines = []
    for step in range(PITCH, round(wide + high), PITCH):
        first, last = max(0, step - high), min(wide, step)
        lines.append(f"M{x + first:g} {y + step - first:g}L{x + last:g} {y + step - last:g}")
    return f'<rect class="box" {shape}/><path class="hatch" d="{"".join(lines)}"/>'


def _word(x: float, y: float, text: str, kind: str) -> str:
    """Return centred text in little markup: a page has thousands."""
    return f'<text class="c {kind}" x="{x:g}" y="{y:g}">{escape(visible(text))}</text>'


def _state(row: Measurement) -> str:
    return f"state s-{str(row.state).lower()}"
