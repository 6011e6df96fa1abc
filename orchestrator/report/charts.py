"""Bars: ratios of throughput with their intervals, and published figures beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from orchestrator.report import units
from orchestrator.report.drawing import WIDE, svg, text_at
from orchestrator.report.effects import Effect
from orchestrator.report.grouping import Differences, described
from orchestrator.report.plots import ratio_bars
from orchestrator.report.published import Comparison
from orchestrator.report.safe import one_line

#: Characters of a label's line left of the bars, and room for each; a longer label goes on in the
#: next line, so that a phone shows bars, too.
LABEL_CHARACTERS = 44
CHARACTER_PX = 7.0


def effects_chart(effects: Sequence[Effect], title: str) -> str:
    """Ratios of throughput on one logarithmic scale, with their intervals."""
    parts, labels = [], []
    scale, line = 2.3, 15
    apart = Differences.among([effect.told for effect in effects])
    places = {(effect.setting.model, effect.setting.where) for effect in effects}
    for effect in effects:
        change = f"{effect.before or 'unset'} → {effect.after or 'unset'}"
        about = f"{effect.name.replace('_', ' ')} {change}"
        if len(places) > 1:  # else the table below says it once
            about += f", {effect.setting.model} {effect.setting.where}"
        if others := described(apart.of(effect.told)):
            about += f" · {others}"
        labels.append(wrap(one_line(about), LABEL_CHARACTERS))
    longest = max((len(name) for names in labels for name in names), default=0)
    start = 16 + CHARACTER_PX * longest
    foot = 6
    bars = ratio_bars([effect.ratio for effect in effects])
    for effect, bar, names in zip(effects, bars, labels, strict=True):
        ratio, middle = effect.ratio, foot + 6
        kind = ("gain" if ratio.value > 1 else "loss") if ratio.decided else "unsure"
        told = units.times(ratio.value)
        if ratio.low is not None:
            told += f", {units.times(ratio.low)} to {units.times(ratio.high)}"
        low, value, end = (start + scale * v for v in (bar.low, bar.value, bar.high))
        parts += [
            *(text_at(0, middle + 4 + line * n, name) for n, name in enumerate(names)),
            f'<path class="{kind}" d="M{low:.1f} {middle}H{end:.1f}"/>',
            f'<circle class="{kind}" cx="{value:.1f}" cy="{middle}" r="3.6"/>',
            text_at(start + 100 * scale + 12, middle + 4, told, "ink"),
        ]
        foot += 9 + line * len(names)
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
    better = ", less is better" if one.lower_is_better else ""
    parts.append(text_at(start, foot, one.unit + better))
    return svg(title, *parts, size=(WIDE, foot + 6))
