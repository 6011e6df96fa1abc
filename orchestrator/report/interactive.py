"""Drawings of what was measured one by one: prompts in three dimensions, and the cards' timeline.

The initial view of the prompts is drawn here; ``prompts_3d.js`` turns them by their coordinates in
the unit cube (``data-at``, ``data-ends``), in orthographic projection.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from orchestrator.analysis.timeline import Lane, Span, Timeline
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report import svg as drawing
from orchestrator.report.svg import SHAPES, WIDE, WIDTH, nice_top, precision_style, svg, text_at
from orchestrator.util import format as units
from orchestrator.util.format import finite, one_line, visible

MOST_POINTS = 6_000
MOST_SPANS = 20_000  # of the timeline; with more, nearby ones are merged
SLOWEST_KEPT = 100  # always shown, as they matter most
#: Initial view in radians: rotation about the upright axis, and elevation.
TURN, TILT = -0.62, 0.42
HIGH = 480
#: Centre of the cube in the drawing, and its edge in pixels.
CENTRE = (WIDTH / 2, 240.0)
EDGE = 276
AXES = ("input + output, tokens", "output, tokens", "latency, s")
#: Edge of each axis: its two other coordinates.
_EDGES: tuple[Mapping[int, float], ...] = ({1: 0, 2: 0}, {0: 0, 2: 0}, {0: 0, 1: 1})
_TICK_OFF = 18
#: Share of its edge and offset in pixels of each axis's name; a phone has room above only.
_NAMES = ((0.5, 66), (0.5, 66), (1.1, 18))

Place = tuple[float, float, float]


def prompts_figure(rows: Sequence[Measurement], points: Mapping[str, Any], title: str) -> str:
    """Return the ``<svg>`` of ``prompt_points`` of these rows; "" without a prompt."""
    if not points["row"]:
        return ""
    values = (
        [a + b for a, b in zip(points["input"], points["output"], strict=True)],
        points["output"],
        points["latency"],
    )
    limits = [nice_top(max(axis)) for axis in values]
    parts = [*_walls(limits)]
    for axis, (top, step) in enumerate(limits):
        for tick in range(axis == 2, round(top / step) + 1):
            parts.append(_text(_on(axis, tick * step / top), _TICK_OFF, f"{tick * step:g}"))
        share, off = _NAMES[axis]
        parts.append(_text(_on(axis, share), off, AXES[axis], "axis"))
    placed: dict[str, list[str]] = {}
    for *point, number in zip(*values, points["row"], strict=True):
        x, y, z = (value / top for value, (top, _) in zip(point, limits, strict=True))
        at, height, _ = projected((x, y, z))
        placed.setdefault(rows[number].precision, []).append(f"M{at:.1f} {height:.1f}")
    legend = []
    for column, (precision, marks) in enumerate(placed.items()):
        style, name = precision_style(precision), escape(visible(precision))
        shapes = "".join(mark + SHAPES[style] for mark in marks)
        parts.append(f'<path class="mark dot p{style}" data-precision="{name}" d="{shapes}"/>')
        legend.append(drawing.mark(12 + 84 * column, 12, precision))
        legend.append(drawing.word(22 + 84 * column, 16, precision, precision))
    parts.append(f'<g class="drawn-legend">{"".join(legend)}</g>')
    if len(points["row"]) < points["total"]:
        part = f"A random {len(points['row']):,} of {points['total']:,} prompts, the slowest kept"
        parts.append(text_at(0, HIGH - 6, part, "small"))
    tops = " ".join(f"{top:g}" for top, _ in limits)
    drawn = svg(title, *parts, size=(WIDTH, HIGH))
    return drawn.replace("<svg ", f'<svg data-view="{TURN} {TILT} {EDGE}" data-tops="{tops}" ', 1)


def projected(place: Place) -> Place:
    """Return position and depth of a point of the unit cube."""
    a, b, c = (value - 0.5 for value in place)
    u = a * math.cos(TURN) + b * math.sin(TURN)
    v = -a * math.sin(TURN) + b * math.cos(TURN)
    up = c * math.cos(TILT) + v * math.sin(TILT)
    depth = v * math.cos(TILT) - c * math.sin(TILT)
    return CENTRE[0] + EDGE * u, CENTRE[1] - EDGE * up, depth


def _walls(limits: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Yield the grid of all six walls; those in front of the points are hidden."""
    for axis in range(3):
        others = [other for other in range(3) if other != axis]
        for side in (0.0, 1.0):
            ends = []
            for across, along in (others, others[::-1]):
                top, step = limits[across]
                for tick in range(round(top / step) + 1):
                    fixed = {axis: side, across: tick * step / top}
                    ends.append((_point({**fixed, along: 0.0}), _point({**fixed, along: 1.0})))
            coordinates = ";".join(" ".join(f"{v:.4g}" for v in (*a, *b)) for a, b in ends)
            lines = "".join(drawing.path_of(projected(end)[:2] for end in pair) for pair in ends)
            behind = projected(_point({axis: side, others[0]: 0.5, others[1]: 0.5}))[2] > 0
            hidden = "" if behind else ' display="none"'
            yield (
                f'<path class="grid" data-wall="{axis} {side:g}" data-ends="{coordinates}" '
                f'd="{lines}"{hidden}/>'
            )


def _on(axis: int, share: float) -> Place:
    return _point({axis: share, **_EDGES[axis]})


def _point(values: Mapping[int, float]) -> Place:
    return values[0], values[1], values[2]


def _text(place: Place, off: float, text: str, kind: str = "tick") -> str:
    """Return text offset from its place, away from the middle of the cube."""
    x, y, _ = projected(place)
    away = math.hypot(x - CENTRE[0], y - CENTRE[1]) or 1.0
    x, y = x + off * (x - CENTRE[0]) / away, y + off * (y - CENTRE[1]) / away
    coordinates = " ".join(f"{value:.4g}" for value in place)
    written = text_at(x, y + 4, text, kind, "middle")
    return written.replace("<text ", f'<text data-at="{coordinates}" data-off="{off}" ', 1)


def prompt_points(rows: Sequence[Measurement]) -> dict[str, Any]:
    """Return prompts as columns: number of the row, input and output tokens, latency in seconds."""
    every = [
        (item.latency_s, number, item.input_tokens, item.output_tokens)
        for number, row in enumerate(rows)
        if row.state is State.SUCCEEDED
        for _, item in row.items
        if finite(item.latency_s) is not None
    ]
    shown = every
    if len(every) > MOST_POINTS:
        order = sorted(range(len(every)), key=lambda i: every[i], reverse=True)
        # Seeded sample: reproducible, and independent of regularities in the dataset.
        rest = random.Random(0).sample(order[SLOWEST_KEPT:], MOST_POINTS - SLOWEST_KEPT)
        shown = [every[i] for i in sorted(order[:SLOWEST_KEPT] + rest)]
    return {
        "total": len(every),
        "row": [point[1] for point in shown],
        "input": [point[2] for point in shown],
        "output": [point[3] for point in shown],
        "latency": [finite(point[0], 5) for point in shown],
    }


# ---------------------------------------------------------------- what each card did

LEFT, RIGHT, TOP = 120, 44, 24
SPANS_WIDE = WIDE - LEFT - RIGHT
#: Largest gap between windows of several invocations, which are laid end to end.
MOST_GAP = 9.0
_NAMED_FROM = 56  # pixels of a span with room for its setting
_IN_MINUTES_S = 180.0


def cards_figure(
    timeline: Timeline,
    title: str,
    names_of: Callable[[Measurement], Sequence[str]],
    index: Mapping[str, int] | None = None,
) -> str:
    """Draw attempts coloured by state, nearby ones merged; ``index`` as in ``charts.heat_map``."""
    lanes, windows = timeline.lanes, timeline.windows
    high = 20 if len(lanes) <= 24 else 14 if len(lanes) <= 128 else 9
    gap = min(MOST_GAP, 60 / len(windows))
    wall = timeline.wall_s or 1.0
    scale = (SPANS_WIDE - gap * (len(windows) - 1)) / wall  # pixels a second
    begun, before = [], 0.0
    for number, (start, end) in enumerate(windows):
        begun.append((start, gap * number + before * scale))
        before += end - start
    states: dict[str, None] = {}
    rects, names = [], []
    for number, span, jobs in _shown_spans(timeline):
        since, at = next(one for one in reversed(begun) if one[0] <= span.start)
        x = at + (span.start - since) * scale
        wide = max(0.7, (span.end - span.start) * scale - 0.6)
        row, state = span.row, str(span.row.state)
        states[state] = None
        probe = row.purpose != "measure"
        faint = ' opacity="0.5"' if probe else ""
        place = (index or {}).get(row.job_id) if jobs == 1 else None
        linked = "" if place is None else f' data-row="{place}"'
        kind = "probe" if probe else f"attempt {row.attempt_number}"
        about = f"{state}, {kind}" if jobs == 1 else f"{jobs:,} jobs, one after the other: {state}"
        tip = f"{about}\n{lanes[number].name}: {units.moment(span.start)}, "
        tip = escape(visible(tip + units.seconds(span.end - span.start)))
        rects.append(
            f'<rect class="s-{state.lower()}" x="{x:.1f}" y="{high * number + 1}" '
            f'width="{wide:.1f}" height="{high - 2}"{faint}{linked} data-tip="{tip}"/>'
        )
        if wide > _NAMED_FROM and high > 10 and jobs == 1 and not probe:
            letters, every = max(3, int((wide - 10) / 5.6)), names_of(row)
            name = next((n for n in every if len(n) <= letters), one_line(every[-1], letters))
            names.append(text_at(LEFT + x + 5, TOP + high * (number + 0.5) + 4, name, "inside"))
    legend = []
    for place, state in enumerate(states):
        x = LEFT + 118 * place
        legend.append(
            f'<rect class="state s-{state.lower()}" x="{x}" y="3" width="9" height="9"/>'
            + text_at(x + 13, 12, state, "small")
        )
    tall = high * len(lanes)
    gaps = "".join(f"M{x - gap / 2:.1f} 0V{tall}" for _, x in begun[1:])
    bed = f"h{SPANS_WIDE}v{high - 2}h-{SPANS_WIDE}z"
    beds = "".join(f"M0 {high * number + 1}{bed}" for number in range(len(lanes)))
    return svg(
        title,
        *legend,
        text_at(WIDE, 12, "assigned", "small", "end"),
        f'<g class="spans" transform="translate({LEFT} {TOP})">',
        f'<path class="lane" d="{beds}"/><path class="ideal" d="{gaps}"/>',
        *rects,
        "</g>",
        *names,
        *_lane_names(lanes, high),
        *_times(wall, scale, len(windows), TOP + tall + 14),
        size=(WIDE, TOP + tall + 20),
    )


def _lane_names(lanes: Sequence[Lane], high: int) -> Iterator[str]:
    for number, lane in enumerate(lanes):
        y = TOP + high * (number + 0.5) + 4
        if high > 10 or number == 0 or lanes[number - 1].node != lane.node:
            yield text_at(LEFT - 6, y, one_line(lane.name, 18), "small", "end")
        if high > 10:
            yield text_at(WIDE, y, units.percent(lane.assigned), "small", "end")


def _times(wall: float, scale: float, windows: int, y: float) -> Iterator[str]:
    """Yield ticks of the time since the start, or the total length of several windows."""
    if windows > 1:
        text = f"{units.seconds(wall)} in {windows} invocations, laid end to end"
        yield text_at(LEFT, y, text, "small")
        return
    unit_s, unit = (60, "min") if wall >= _IN_MINUTES_S else (1, "s")
    _, step = nice_top(wall / unit_s)
    for tick in range(int(wall / unit_s / step) + 1):
        x = LEFT + tick * step * unit_s * scale
        yield text_at(x, y, f"{tick * step:g} {unit}", "small time", "middle")


def _shown_spans(timeline: Timeline) -> Iterator[tuple[int, Span, int]]:
    """Yield lane number, span and job count. Above ``MOST_SPANS``, spans of a lane that start in
    one slot of time and ended in the same state are merged."""
    lanes = timeline.lanes
    if sum(len(lane.spans) for lane in lanes) <= MOST_SPANS:
        yield from ((number, span, 1) for number, lane in enumerate(lanes) for span in lane.spans)
        return
    slot_s = timeline.wall_s * len(lanes) / MOST_SPANS
    for number, lane in enumerate(lanes):
        slots: dict[object, tuple[Span, float, int]] = {}
        for span in lane.spans:
            key = (span.start // slot_s, span.row.state, span.row.purpose != "measure")
            first, end, count = slots.get(key, (span, span.end, 0))
            slots[key] = (first, max(end, span.end), count + 1)
        for first, end, count in slots.values():
            yield number, replace(first, end=end), count
