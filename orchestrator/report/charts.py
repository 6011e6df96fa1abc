"""Charts as SVG: cells and curves of a table, Pareto fronts, scaling, rooflines, bars of ratios."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

from orchestrator.analysis.effects import Effect, Scaling
from orchestrator.analysis.hardware import Comparison, Share
from orchestrator.analysis.rankings import Front, interval, latency, throughput
from orchestrator.analysis.ratio import Ratio
from orchestrator.analysis.selection import Differences, described
from orchestrator.analysis.serving import Point, Served
from orchestrator.analysis.tables import BATCH, PRECISION, SETTING, Table, uneven
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report import wording
from orchestrator.report.blocks import Cell
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
    failed = [
        (row.batch_size, line)
        for (line, _), row in table.cells.items()
        if row.state is State.OUT_OF_MEMORY and row.batch_size is not None
    ]
    every = [*sizes, *(batch for batch, _ in failed)]
    x = x_axis(every, "batch size per card", lambda value: f"{value:.0f}", only=True)
    values = [point.value for point in points if point.value > 0]  # flagged rows included
    if uneven(values):
        y = y_axis(values, f"{table.unit}, logarithmic", short_number, log=True)
    else:
        highest = max(point.value for point in points) * TALLEST_BAR
        top = min(max(point.high for point in points), highest)
        y = y_axis([top], table.unit, lambda value: units.number(value, 3), log=False)
    styles = line_styles(table)
    lines = []
    for name, points_of in series.items():
        line = [(x.at(point.batch), y.at(point.value)) for point in points_of]
        bars = "".join(_bar(x, y, point) for point in points_of if point.high > point.low)
        lines.append((name, styles[name], line, f'<path class="bar" d="{bars}"/>'))
    crosses, seen = [], Counter[int]()
    for batch, name in failed:
        left, foot = x.at(batch) + 9 * seen[batch] - 7, HEIGHT - BOTTOM - 10
        crosses.append(f'<path class="oom p{styles[name]}" d="M{left:.1f} {foot}l6 6m0-6l-6 6"/>')
        seen[batch] += 1
    return _lines(title, x, y, lines, *crosses)


def _lines(
    title: str, x: Axis, y: Axis, lines: Iterable[tuple[str, str | int, _Line, str]], *more: str
) -> str:
    """Draw lines (name, style, places and further marks) with their names at their ends."""
    parts, ends = [frame(x, y)], []
    for name, style, points, marks in lines:
        drawn = f'<path class="line" d="{path_of(points)}"/>{marks}'
        parts.append(f'<g class="p{precision_style(style)}">{drawn}</g>')
        parts += (mark(*point, style) for point in points)
        ends.append((points[-1][1], points[-1][0], name, style))
    ends.sort(key=lambda end: end[0])
    heights = apart([height for height, *_ in ends], 14, TOP + 4, HEIGHT - BOTTOM)
    for (_, at, name, style), height in zip(ends, heights, strict=True):
        parts.append(word(at + 9, height + 4, name, style))
    room = max(0.0, LETTER * max(len(name) for _, _, name, _ in ends) - RIGHT + 12)
    return svg(title, *parts, *more, size=(WIDTH + round(room), HEIGHT))


def line_styles(table: Table) -> dict[str, int]:
    """Return the number of each line's colour and shape."""
    by_precision = table.line_name == PRECISION
    return {n: precision_style(n if by_precision else at) for at, n in enumerate(table.lines)}


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


# ---------------------------------------------------------------- fronts, scaling, rooflines

MOST_LINES = 8


def short_seconds(value: float) -> str:
    """Format a tick of a time axis: ``5 ms``, ``2 s``."""
    factor, unit = (1e6, "µs") if value < 1e-3 else (1e3, "ms") if value < 1 else (1, "s")
    return f"{float(f'{value * factor:.2g}'):g} {unit}"


#: Where a name stands: to the right or the left of its mark, and pixels below its middle.
_PLACES = ((1, 4), (-1, 4), (1, 18), (-1, -10), (1, -10), (-1, 18), (1, 32), (-1, -24))


def front_figure(front: Front, title: str, chosen: Callable[[Measurement], str]) -> str:
    """Draw throughput against latency: a mark for each setting, a line through the front."""
    rows = (*front.beaten, *front.best)
    values = [throughput(row) for row in rows]
    x = x_axis([latency(row) for row in rows], "median latency of a prompt", short_seconds)
    wide = max(values) / min(values) > 8
    y = y_axis(values, front.unit, short_number, log=wide)
    places = [(x.at(latency(row)), y.at(throughput(row))) for row in rows]
    best = list(zip(places, rows, strict=True))[len(front.beaten) :]
    parts = [frame(x, y), f'<path class="front" d="{path_of(place for place, _ in best)}"/>']
    for number, (place, row) in enumerate(zip(places, rows, strict=True)):
        pale = " pale" * (number < len(front.beaten))
        parts.append(mark(*place, row.precision, f"mark{pale}"))
    # Names lie apart from marks and from each other; those that find no room are left out.
    taken = [(at - 6, at + 6, height - 6, height + 6) for at, height in places]
    # Lowest latency and highest throughput matter most, so place the ends first.
    for (at, height), row in (*best[-1:], *best[:-1]):
        text = chosen(row)
        room = LETTER * len(text)
        for side, below in _PLACES:
            left, line = at + 9 if side > 0 else at - 9 - room, height + below
            right, top, foot = left + room, line - 11, line + 3
            inside = left > LEFT and right < WIDTH and TOP < line < HEIGHT - BOTTOM
            if inside and not any(
                left < box[1] and box[0] < right and top < box[3] and box[2] < foot for box in taken
            ):
                taken.append((left, right, top, foot))
                parts.append(word(left, line, text, row.precision))
                break
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
    x = x_axis([at for at, _ in every], x_name, short_number, only=over_load)
    y = y_axis([value for _, value in every], y_name, short_number, log=over_load)
    lines, more = [], []
    for style, (curve, pairs) in enumerate(zip(served.curves, values, strict=False)):
        if pairs:
            lines.append(
                (curve.name, style, sorted((x.at(at), y.at(value)) for at, value in pairs), "")
            )
        for at, value in drawn([curve.knee] if curve.knee else []):
            more.append(f'<circle class="knee" cx="{x.at(at):.1f}" cy="{y.at(value):.1f}" r="8"/>')
    best = drawn(front)
    if len(best) > 1:
        more.append(f'<path class="front" d="{path_of((x.at(a), y.at(b)) for a, b in best)}"/>')
    return _lines(title, x, y, lines, *more)


def scaling_figure(scalings: Sequence[Scaling], title: str) -> str:
    """Draw efficiency against cards, a line for each setting of one piece of work."""
    shown = scalings[:MOST_LINES]
    cards = sorted({step.row.cards for one in shown for step in one.steps})
    x = x_axis(cards, "cards", lambda value: f"{value:.0f}", only=True)
    top = max(1.0, *(step.efficiency for one in shown for step in one.steps))
    y = y_axis([top], "efficiency", lambda value: f"{value:.0%}", log=False)
    ideal = f"M{x.at(cards[0]):.1f} {y.at(1.0):.1f}H{x.at(cards[-1]):.1f}"
    lines = (
        (
            f"b={one.base.batch_size_requested}",
            one.base.precision,
            [(x.at(step.row.cards), y.at(step.efficiency)) for step in one.steps],
            "",
        )
        for one in shown
    )
    return _lines(title, x, y, lines, f'<path class="ideal" d="{ideal}"/>')


def roofline_figure(shares: Sequence[Share], title: str) -> str:
    """Draw a card's decoding steps under its roofline: operations/s against intensity; "" without
    data."""
    sheet = shares[0].sheet
    slope = sheet.bandwidth_bytes_per_s
    placed = []
    for share in shares:
        step_s, weights = share.row.metrics.tpot_p50_s, share.row.weight_bytes
        if share.intensity and step_s and weights:
            placed.append((share, share.intensity, share.intensity * weights / step_s))
    if not placed or not slope:
        return ""
    kinds = dict.fromkeys(share.arithmetic for share, _, _ in placed if share.arithmetic)
    peaks = {kind: sheet.flops[kind] for kind in kinds}
    highest = max(peaks.values(), default=0.0)
    across = [intensity for _, intensity, _ in placed]
    low, high = min(across), max(*across, highest / slope * 2)
    x = x_axis([low, high], "operations per byte of weights", short_number)
    heights = [at for _, _, at in placed]
    every = [min(heights), slope * x.low, *peaks.values(), *heights]
    y = y_axis(every, "TFLOP/s", lambda value: short_number(value / 1e12), log=True)
    corner = min((highest or slope * x.high) / slope, x.high)
    roof = path_of((x.at(i), y.at(slope * i)) for i in (x.low, corner))
    parts = [frame(x, y)]
    for kind, peak in peaks.items():
        roof += f"M{x.at(max(peak / slope, x.low)):.1f} {y.at(peak):.1f}H{WIDTH - RIGHT}"
        parts.append(text_at(WIDTH - RIGHT + 6, y.at(peak) + 4, kind))
    parts.append(f'<path class="roof" d="{roof}"/>')
    parts += [mark(x.at(i), y.at(at), share.row.precision) for share, i, at in placed]
    return svg(title, *parts)


# ---------------------------------------------------------------- bars

#: Characters of a label's line before it wraps, so that bars fit on a phone, and width of each.
LABEL_CHARACTERS = 44
CHARACTER_PX = 7.0


def ratio_scale(ratios: Sequence[Ratio]) -> Callable[[float], float]:
    """Return positions (0 to 100) of ratios on a log scale around 1, clipped at a factor of 16."""
    ends = [v for one in ratios for v in (one.value, one.low, one.high) if v]
    reach = math.log(min(1.05 * max(1.25, *ends, *(1 / end for end in ends)), 16.0))

    def place(value: float) -> float:
        share = math.log(value) / reach if value > 0 else -1.0
        return round(50 + 50 * min(1.0, max(-1.0, share)), 2)

    return place


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
        ends = (ratio.low or ratio.value, ratio.value, ratio.high or ratio.value)
        low, value, end = (start + scale * place(v) for v in ends)
        parts += [
            *(text_at(0, middle + 4 + line * n, name) for n, name in enumerate(names)),
            f'<path class="{kind}" d="M{low:.1f} {middle}H{end:.1f}"/>',
            f'<circle class="{kind}" cx="{value:.1f}" cy="{middle}" r="3.6"/>',
            text_at(start + 100 * scale + 12, middle + 4, wording.ratio(ratio), "ink"),
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
        who = "this run" if line.row else "published"
        name = f"{who}: {figure.title}"
        length = 340 * figure.value / top
        kind = "ours" if line.row else "theirs"
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
    cells = {place: wording.cell(table, *place) for place in table.cells}
    widths = [len(one_line(column, 24)) * LETTER + 8 for column in table.columns]
    widths += [(len(cell.text) + 2) * 7.4 + 10 for cell in cells.values()]
    widths += [len(note) * 5.7 + 10 for cell in cells.values() for note in cell.notes]
    wide, styles = round(max(62.0, *widths)), line_styles(table)
    parts = [text_at(left, 12, table.column_name)]
    for x, column in enumerate(table.columns):
        parts.append(text_at(left + wide * (x + 0.5), 31, one_line(column, 24), anchor="middle"))
    for y, line in enumerate(table.lines):
        top = HEAD + HIGH * y
        parts.append(text_at(0, top + 26, names[line], f"name p{styles[line]}"))
        for x, column in enumerate(table.columns):
            row = table.cells.get((line, column))
            if row is not None:
                box = (left + wide * x, top, wide)
                number = (index or {}).get(row.job_id)
                parts += _cell(table, row, cells[line, column], box, number)
    foot = HEAD + HIGH * len(table.lines)
    if table.unit:
        foot += 18
        scale = ", colours on a logarithmic scale" if table.log else ""
        parts.append(text_at(left, foot, f"{table.unit}{scale}"))
    across = max(left + 190, left + wide * len(table.columns))
    drawn = svg(title, *parts, size=(across, foot + 6), kind="curve heat-map")
    return drawn.replace("<svg ", f'<svg style="--across:{across}px;width:{across}px" ', 1)


def _cell(
    table: Table, row: Measurement, text: Cell, box: tuple[float, float, float], number: int | None
) -> Iterator[str]:
    at, top, wide = box
    yield f'<g data-row="{number}">' if number is not None else "<g>"
    succeeded, state = row.state is State.SUCCEEDED, f"state s-{str(row.state).lower()}"
    if not succeeded and number is None:  # else the page shows the row's details
        said = f"{row.state}: {one_line(row.reason, 160)}" if row.reason else str(row.state)
        yield f"<title>{escape(visible(said))}</title>"
    shape = f'x="{at + 1:g}" y="{top + 1:g}" width="{wide - 2:g}" height="{HIGH - 2}"'
    kind = "best" if text.mark == "*" else "ink" if succeeded else f"{state} word"
    if row.job_id in table.predicted:
        kind = "predicted"
        lines = []  # diagonal ones, which no measured cell has
        for step in range(PITCH, round(wide + HIGH - 4), PITCH):
            first, last = max(0, step - HIGH + 2), min(wide - 2, step)
            start, end = (f"{at + 1 + x:g} {top + 1 + step - x:g}" for x in (first, last))
            lines.append(f"M{start}L{end}")
        yield f'<rect class="box" {shape}/><path class="hatch" d="{"".join(lines)}"/>'
    else:
        shade = table.heat(row) * 0.58 + 0.03 if succeeded else 0.1
        yield f'<rect class="{"cell" if succeeded else state}" {shape} opacity="{shade:.2g}"/>'
    if text.mark:
        ring = {"*": "first", "~": "second", "!": "third"}[text.mark]
        yield f'<rect class="ring {ring}" {shape}/>'
    words = [(19 if text.notes else 26, text.text + _SIGNS[text.mark], kind)]
    words += [(34, note, "small") for note in text.notes]
    for below, shown, kind in words:  # in little markup: a page has thousands
        place = f'x="{at + wide / 2:g}" y="{top + below:g}"'
        yield f'<text class="c {kind}" {place}>{escape(visible(shown))}</text>'
    yield "</g>"
