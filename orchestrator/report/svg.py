"""Axes, ticks and marks of the page's SVG figures.

Drawn here rather than in the browser, so that they need no scripts, print well and can be tested.
Colours are CSS classes, to follow the dark theme; each precision also has its own shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from orchestrator.util import format as units
from orchestrator.util.format import visible

#: Marker shapes as SVG path data around the origin, in the report order of precisions.
SHAPES = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",  # circle
    "m-3.6-3.6h7.2v7.2h-7.2z",  # square
    "m0-5l5 5l-5 5l-5-5z",  # diamond
    "m0-5l4.8 8.4h-9.6z",  # triangle
    "m0 5l4.8-8.4h-9.6z",  # triangle, upside down
    "m-4.5-1.5h3v-3h3v3h3v3h-3v3h-3v-3h-3z",  # cross
)

WIDTH, HEIGHT = 520, 320
WIDE = 760  # of a figure whose lines have long names
LEFT, RIGHT, TOP, BOTTOM = 62, 64, 16, 56
LETTER = 6.8  # pixels per letter of a name


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from ``low`` to ``high`` mapped to pixels ``start`` to ``end``."""

    low: float
    high: float
    start: float  # in pixels, as ``end``
    end: float
    log: bool
    ticks: tuple[float, ...]
    name: str
    text: Callable[[float], str]

    def at(self, value: float) -> float:
        """Return the pixel of a value, clipped to the axis."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share


def x_axis(
    values: Sequence[float], name: str, text: Callable[[float], str], *, only: bool = False
) -> Axis:
    """Return a logarithmic axis along the bottom; values must be positive. ``only`` they are its
    ticks."""
    low, high = log_limits(values)
    ticks = tuple(sorted(set(values))) if only else log_ticks(low, high)
    return Axis(low, high, LEFT, WIDTH - RIGHT, True, ticks, name, text)


def y_axis(values: Sequence[float], name: str, text: Callable[[float], str], *, log: bool) -> Axis:
    """Return an axis up the left side; a linear one starts at zero."""
    if log:
        low, high = log_limits(values)
        ticks = log_ticks(low, high)
    else:
        low, (high, step) = 0.0, nice_top(max(values))
        ticks = tuple(i * step for i in range(round(high / step) + 1))
    return Axis(low, high, HEIGHT - BOTTOM, TOP, log, ticks, name, text)


def nice_top(value: float) -> tuple[float, float]:
    """Return the top of an axis that holds ``value``, and the step of its four to six ticks."""
    if not math.isfinite(value) or value <= 0:
        return 1.0, 0.25
    raw = value / 4.5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    return step * math.ceil(value / step - 1e-9), step


def log_limits(values: Sequence[float]) -> tuple[float, float]:
    """Return slightly more than the range of the values, at least a factor of two."""
    low, high = min(values), max(values)
    room = max((high / low) ** 0.06, math.sqrt(2 / min(2, high / low)), 1.05)
    return low / room, high * room


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return two to about eight round values of a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    span = math.log10(high / low)
    sets: tuple[tuple[float, ...], ...] = (
        *((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)),
        (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8),
    )
    for steps in sets if span > 1.6 else sets[2:]:
        ticks = tuple(10.0**d * m for d in decades for m in steps if low <= 10.0**d * m <= high)
        if len(ticks) >= 3:
            return ticks if len(ticks) <= 9 else ticks[:: math.ceil(len(ticks) / 9)]
    return (low, high)


def short_number(value: float) -> str:
    """Format a tick: ``1,200``, ``0.5``, ``0``."""
    text = units.number(value, 3) if value < 100 else f"{value:,.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def frame(x: Axis, y: Axis) -> str:
    """Return grid lines, ticks and the names of both axes."""
    parts = []
    for value in y.ticks:
        at = y.at(value)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(text_at(LEFT - 8, at + 4, y.text(value), anchor="end"))
    last = -100.0
    for value in x.ticks:
        at = x.at(value)
        text = x.text(value)
        if at - last >= 4 + 6.5 * len(text):
            parts.append(text_at(at, HEIGHT - BOTTOM + 20, text, anchor="middle"))
            last = at
    upright = f'<g transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">'
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(text_at(middle, HEIGHT - 10, x.name, "axis", "middle"))
    return "".join((*parts, upright, text_at(0, 0, y.name, "axis", "middle"), "</g>"))


def svg(
    title: str, *parts: str, size: tuple[float, float] = (WIDTH, HEIGHT), kind: str = "curve"
) -> str:
    """Return the ``<svg>`` element with its accessible name."""
    return (
        f'<svg class="{kind}" viewBox="0 0 {size[0]} {size[1]}" role="img">'
        f"<title>{escape(visible(title))}</title>{''.join(parts)}</svg>"
    )


def text_at(x: float, y: float, text: str, kind: str = "tick", anchor: str = "start") -> str:
    """Return text of one of the style sheet's classes."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(visible(text))}</text>"
    )


def mark(x: float, y: float, precision: str | int, kind: str = "mark") -> str:
    """Return the shape of a precision at a point, in its colour."""
    style = precision_style(precision)
    return f'<path class="{kind} p{style}" d="M{x:.1f} {y:.1f}{SHAPES[style]}"/>'


def path_of(points: Iterable[tuple[float, float]]) -> str:
    """Return path data through points."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def word(x: float, y: float, text: str, precision: str | int) -> str:
    """Return a name beside a mark, in the colour of a precision."""
    return text_at(x, y, text, f"name p{precision_style(precision)}")


def apart(places: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Return heights near ``places`` (ascending), at least ``distance`` apart, up to ``high``."""
    placed: list[float] = []
    for place in places:
        placed.append(max(place, placed[-1] + distance if placed else low))
    ceiling = high
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - distance
    return placed


def precision_style(precision: str | int) -> int:
    """Return the colour and shape (0 to 5) of a precision, or of a line by its place."""
    if isinstance(precision, int):
        return precision % len(SHAPES)
    known = {"fp32": 0, "tf32": 0, "fp16": 1, "bf16": 2, "fp8": 3, "int8": 4, "int4": 5}
    return known.get(precision, sum(map(ord, precision)) % len(SHAPES))
