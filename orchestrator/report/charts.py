"""SVG drawings of what the page shows as a table or turns about: for pictures, which travel alone.

The page's other figures go into pictures as they are. Colours are classes here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.domain.job import State
from orchestrator.domain.measurement import Measurement
from orchestrator.report import cells, units
from orchestrator.report.drawing import (
    SHAPES,
    WIDE,
    WIDTH,
    mark,
    nice_top,
    precision_style,
    svg,
    text_at,
)
from orchestrator.report.effects import Effect
from orchestrator.report.page import heat
from orchestrator.report.payload import prompt_points
from orchestrator.report.plots import ratio_bars
from orchestrator.report.published import Comparison
from orchestrator.report.safe import one_line
from orchestrator.report.summary import Table

#: Where the reader's eye is when the page opens: radians about the upright axis, and above it.
TURN, TILT = -0.62, 0.42


def heat_map(table: Table, title: str) -> str:
    """The cells of a table: precision by batch size, the darker the faster."""
    left, wide, high = 76, 66, 36
    parts = [text_at(left, 12, "batch size per card")]
    for x, size in enumerate(table.batch_sizes):
        parts.append(text_at(left + wide * (x + 0.5), 32, size, anchor="middle"))
    for y, precision in enumerate(table.precisions):
        top = 40 + high * y
        name = f"name p{precision_style(precision)}"
        parts.append(text_at(0, top + 22, precision, name))
        for x, size in enumerate(table.batch_sizes):
            row, at = table.cells.get((precision, size)), left + wide * x
            if row is None:
                continue
            told = cells.cell_text(table, precision, size)
            box = f'x="{at + 1}" y="{top + 1}" width="{wide - 2}" height="{high - 2}" rx="3"'
            if row.state is State.SUCCEEDED:
                parts.append(
                    f'<rect class="cell" {box} opacity="{heat(table, row) * 0.58 + 0.03:.3f}"/>'
                )
                kind = "best" if told.mark == "*" else "ink"
            else:
                kind = f"state s-{str(row.state).lower()}"
                parts.append(f'<rect class="{kind}" {box} opacity="0.12"/>')
            parts.append(text_at(at + wide / 2, top + 22, told.value + told.mark, kind, "middle"))
    foot = 58 + high * len(table.precisions)
    parts.append(text_at(left, foot, f"{table.unit or 'state'}; * best, ~ tied"))
    return svg(title, *parts, size=(max(420, left + wide * len(table.batch_sizes)), foot + 6))


def prompts_chart(rows: Sequence[Measurement], title: str) -> str:
    """Total length, output length and latency of each prompt, seen as the page first shows it."""
    points: dict[str, Any] = prompt_points(rows)
    values = (
        [a + b for a, b in zip(points["input"], points["output"], strict=True)],
        points["output"],
        points["latency"],
    )
    limits = [nice_top(max(axis, default=0.0)) for axis in values]
    lines = [_at(*a) + _at(*b) for a, b in _walls(limits)]
    grid = "".join(f"M{x:.1f} {y:.1f}L{u:.1f} {v:.1f}" for x, y, _, u, v, _ in lines)
    parts = [f'<path class="grid" d="{grid}"/>']
    names = ("input + output, tokens", "output, tokens", "latency, s")
    # Each axis on an edge that nothing hides: where it starts, and which way its words stand off.
    edges = (((0, 0, 0), (12, 18)), ((0, 0, 0), (-18, 14)), ((0, 1, 0), (-17, 4)))
    for axis, ((top, step), (start, (dx, dy))) in enumerate(zip(limits, edges, strict=True)):
        for tick in range(axis == 2, round(top / step) + 1):
            x, y, _ = _at(*_moved(start, axis, tick * step / top))
            parts.append(text_at(x + dx, y + dy, f"{tick * step:g}", anchor="middle"))
        x, y, _ = _at(*_moved(start, axis, 0.5))
        u, v, _ = _at(*_moved(start, axis, 1.0))
        angle = math.degrees(math.atan2(v - y, u - x))
        angle -= 180 if angle > 90 else -180 if angle < -90.01 else 0
        place = f"translate({x + 2.7 * dx:.1f} {y + 2.7 * dy:.1f}) rotate({angle:.1f})"
        parts.append(f'<text transform="{place}" text-anchor="middle">{names[axis]}</text>')
    placed = sorted(
        ((*_at(*(v / top for v, (top, _) in zip(point, limits, strict=True))), number)
         for *point, number in zip(*values, points["row"], strict=True)),
        key=lambda one: -one[2],
    )  # fmt: skip
    parts += [mark(x, y, rows[number].precision, "mark dot") for x, y, _, number in placed]
    precisions = dict.fromkeys(rows[number].precision for number in points["row"])
    for column, precision in enumerate(precisions):
        style = precision_style(precision)
        key = f'<path class="mark p{style}" d="M{12 + 84 * column} 12{SHAPES[style]}"/>'
        parts.append(key + text_at(22 + 84 * column, 16, precision, f"name p{style}"))
    if len(points["row"]) < points["total"]:
        part = f"A random {len(points['row']):,} of {points['total']:,} prompts, the slowest kept"
        parts.append(text_at(0, 474, part))
    return svg(title, *parts, size=(WIDTH, 480))


def _moved(start: tuple[int, int, int], axis: int, share: float) -> tuple[float, float, float]:
    x, y, z = (share if i == axis else float(v) for i, v in enumerate(start))
    return x, y, z


def _walls(limits: Sequence[tuple[float, float]]) -> Iterator[tuple[tuple[float, ...], ...]]:
    """The lines of the floor and of the two walls behind the points, as pairs of ends."""
    for axis, (top, step) in enumerate(limits):
        for tick in range(round(top / step) + 1):
            share = tick * step / top
            for along, far in {0: ((1, 0), (2, 1)), 1: ((0, 0), (2, 1)), 2: ((0, 1), (1, 1))}[axis]:
                other = 3 - axis - along
                ends = []
                for end in (0.0, 1.0):
                    point = {axis: share, along: end, other: float(far)}
                    ends.append((point[0], point[1], point[2]))
                yield tuple(ends)


def _at(x: float, y: float, z: float) -> tuple[float, float, float]:
    """Place of a point of the unit cube in the picture, and its depth away from the reader."""
    a, b, c = x - 0.5, y - 0.5, z - 0.5
    u = a * math.cos(TURN) + b * math.sin(TURN)
    v = -a * math.sin(TURN) + b * math.cos(TURN)
    up = c * math.cos(TILT) + v * math.sin(TILT)
    return WIDTH / 2 + 284 * u, 240 - 270 * up, v * math.cos(TILT) - c * math.sin(TILT)


def effects_chart(effects: Sequence[Effect], title: str) -> str:
    """Ratios of throughput on the page's common scale, with their intervals."""
    parts = []
    start, scale, high = 380, 2.3, 24
    for y, (effect, bar) in enumerate(
        zip(effects, ratio_bars([effect.ratio for effect in effects]), strict=True)
    ):
        ratio, middle = effect.ratio, 12 + high * y
        kind = ("gain" if ratio.value > 1 else "loss") if ratio.decided else "unsure"
        change = f"{effect.before or 'unset'} → {effect.after or 'unset'}"
        about = f"{effect.name.replace('_', ' ')} {change}, {effect.setting.model} "
        name = one_line(about + effect.setting.where, 60)
        told = units.times(ratio.value)
        if ratio.low is not None:
            told += f", {units.times(ratio.low)} to {units.times(ratio.high)}"
        low, value, end = (start + scale * v for v in (bar.low, bar.value, bar.high))
        parts += [
            text_at(0, middle + 4, name),
            f'<path class="{kind}" d="M{low:.1f} {middle}H{end:.1f}"/>',
            f'<circle class="{kind}" cx="{value:.1f}" cy="{middle}" r="3.6"/>',
            text_at(start + 100 * scale + 12, middle + 4, told, "ink"),
        ]
    foot = 6 + high * len(effects)
    parts.insert(0, f'<path class="ideal" d="M{start + 50 * scale} 0V{foot}"/>')
    parts.append(
        text_at(start + 50 * scale, foot + 14, "throughput, times the baseline's", anchor="middle")
    )
    return svg(title, *parts, size=(WIDE, foot + 20))


def published_chart(one: Comparison, title: str) -> str:
    """Bars of published figures and ours."""
    start, high = 330, 26
    top = max((line.figure.value for line in one.lines), default=0.0) or 1.0
    parts = []
    for y, line in enumerate(one.lines):
        figure, at = line.figure, high * y
        who = "this run" if line.ours else "published"
        name = f"{who}: {figure.device}, {figure.precision}, batch {figure.batch_size}"
        length = 340 * figure.value / top
        kind = "ours" if line.ours else "theirs"
        box = f'y="{at + 3}" width="{length:.1f}" height="{high - 6}"'
        parts += [
            text_at(0, at + 17, one_line(name, 50)),
            f'<rect class="{kind}" x="{start}" {box}/>',
            text_at(start + length + 6, at + 17, units.number(figure.value), "ink"),
        ]
    foot = high * len(one.lines) + 16
    better = ", less is better" if one.lower_is_better else ""
    parts.append(text_at(start, foot, one.unit + better))
    return svg(title, *parts, size=(WIDE, foot + 6))
