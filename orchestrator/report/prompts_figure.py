"""Total length, output length and latency of prompts in three dimensions, as an SVG drawing.

Everything is drawn here, as it is first seen; the page turns it (``scatter.js``): what has a place
in the unit cube says so (``data-at``, ``data-ends``), and is moved to where the new view has it.
Points of one precision are one path. The projection is orthographic, so that equal lengths look
equal wherever they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from orchestrator.core.measurement import Measurement
from orchestrator.report.drawing import SHAPES, WIDTH, nice_top, precision_style, svg, text_at
from orchestrator.report.safe import visible

#: Where the reader's eye is at first: radians about the upright axis, and above it.
TURN, TILT = -0.62, 0.42
HIGH = 480
#: The middle of the cube in the drawing, and the pixels of its edge.
CENTRE = (WIDTH / 2, 240.0)
EDGE = 276
AXES = ("input + output, tokens", "output, tokens", "latency, s")
#: The edge on which each axis stands: what its other two coordinates are.
_EDGES: tuple[Mapping[int, float], ...] = ({1: 0, 2: 0}, {0: 0, 2: 0}, {0: 0, 1: 1})
_TICK_OFF = 18
#: Place of each axis's name: the share of its edge, and pixels off it. The upright one has its name
#: above its end, since beside it there is no room on a phone.
_NAMES = ((0.5, 66), (0.5, 66), (1.1, 18))

Place = tuple[float, float, float]


def prompts_figure(rows: Sequence[Measurement], points: Mapping[str, Any], title: str) -> str:
    """The drawing as an ``<svg>`` element; empty without a prompt.

    Args:
        rows: those whose numbers ``points`` has.
        points: of ``payload.prompt_points``.
        title: its name, for those who do not see it.
    """
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
        precision = rows[number].precision
        shape = SHAPES[precision_style(precision)]
        placed.setdefault(precision, []).append(f"M{at:.1f} {height:.1f}{shape}")
    for precision, marks in placed.items():
        parts.append(
            f'<path class="mark dot p{precision_style(precision)}" '
            f'data-precision="{escape(visible(precision))}" d="{"".join(marks)}"/>'
        )
    parts.append(f'<g class="drawn-legend">{"".join(_legend(list(placed)))}</g>')
    if len(points["row"]) < points["total"]:
        part = f"A random {len(points['row']):,} of {points['total']:,} prompts, the slowest kept"
        parts.append(text_at(0, HIGH - 6, part, "small"))
    tops = " ".join(f"{top:g}" for top, _ in limits)
    drawn = svg(title, *parts, size=(WIDTH, HIGH))
    return drawn.replace("<svg ", f'<svg data-view="{TURN} {TILT} {EDGE}" data-tops="{tops}" ', 1)


def projected(place: Place) -> Place:
    """Place of a point of the unit cube in the drawing, and its depth away from the reader."""
    a, b, c = (value - 0.5 for value in place)
    u = a * math.cos(TURN) + b * math.sin(TURN)
    v = -a * math.sin(TURN) + b * math.cos(TURN)
    up = c * math.cos(TILT) + v * math.sin(TILT)
    depth = v * math.cos(TILT) - c * math.sin(TILT)
    return CENTRE[0] + EDGE * u, CENTRE[1] - EDGE * up, depth


def _walls(limits: Sequence[tuple[float, float]]) -> Iterator[str]:
    """The grid of all six walls; those between the reader and the points are hidden."""
    for axis in range(3):
        others = [other for other in range(3) if other != axis]
        for side in (0.0, 1.0):
            ends = []
            for across, along in (others, others[::-1]):
                top, step = limits[across]
                for tick in range(round(top / step) + 1):
                    fixed = {axis: side, across: tick * step / top}
                    ends.append((_point({**fixed, along: 0.0}), _point({**fixed, along: 1.0})))
            told = ";".join(" ".join(f"{v:.4g}" for v in (*a, *b)) for a, b in ends)
            lines = "".join(_segment(a, b) for a, b in ends)
            behind = projected(_point({axis: side, others[0]: 0.5, others[1]: 0.5}))[2] > 0
            hidden = "" if behind else ' display="none"'
            yield (
                f'<path class="grid" data-wall="{axis} {side:g}" data-ends="{told}" '
                f'd="{lines}"{hidden}/>'
            )


def _segment(start: Place, end: Place) -> str:
    x, y, _ = projected(start)
    u, v, _ = projected(end)
    return f"M{x:.1f} {y:.1f}L{u:.1f} {v:.1f}"


def _on(axis: int, share: float) -> Place:
    return _point({axis: share, **_EDGES[axis]})


def _point(values: Mapping[int, float]) -> Place:
    return values[0], values[1], values[2]


def _text(place: Place, off: float, text: str, kind: str = "tick") -> str:
    """A text that stands off from its place, away from the middle of the cube."""
    x, y, _ = projected(place)
    away = math.hypot(x - CENTRE[0], y - CENTRE[1]) or 1.0
    x, y = x + off * (x - CENTRE[0]) / away, y + off * (y - CENTRE[1]) / away
    told = " ".join(f"{value:.4g}" for value in place)
    written = text_at(x, y + 4, text, kind, "middle")
    return written.replace("<text ", f'<text data-at="{told}" data-off="{off}" ', 1)


def _legend(precisions: Sequence[str]) -> Iterator[str]:
    for column, precision in enumerate(precisions):
        style = precision_style(precision)
        key = f'<path class="mark p{style}" d="M{12 + 84 * column} 12{SHAPES[style]}"/>'
        yield key + text_at(22 + 84 * column, 16, precision, f"name p{style}")
