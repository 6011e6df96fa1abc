"""Head to head: the same settings on several accelerators or engines, side by side. Pure.

Rows are matched that agree in everything but the device and the engine, as far as all sides have
the setting. The first side of the grid is what the others are held against, with Welch's interval
on the logarithm from the repeats of both rows. Emulated cards never meet real ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.job import State
from orchestrator.core.labels import labels_of
from orchestrator.core.measurement import Measurement
from orchestrator.report.grouping import Setting, card_name
from orchestrator.report.ratio import Ratio, pooled, ratio_of_rows

#: Settings that are compared; of more, the fastest.
MOST_LINES = 1000


@dataclass(frozen=True, slots=True)
class Side:
    """One column: an accelerator with an engine."""

    accelerator: str
    device: str
    emulated: bool
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The same settings on two or more sides. ``ratios`` are over the first side that has them."""

    label: str
    rows: tuple[Measurement | None, ...]  # one a side
    ratios: tuple[Ratio | None, ...]  # None: no row, or the one that is compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadToHead:
    """All settings of one workload that two or more sides have measured."""

    workload: str
    unit: str
    sides: tuple[str, ...]  # names
    lines: tuple[Line, ...]  # the fastest first
    overall: tuple[Ratio | None, ...]  # geometric means over lines that have the first side
    left_out: int = 0  # lines beyond the limit

    @property
    def fastest(self) -> int | None:
        """The side that is faster than the first, or the first itself; None: not decided."""
        known = [(one.value, side) for side, one in enumerate(self.overall) if one is not None]
        if not known:
            return None
        value, side = max(known)
        ratio = self.overall[side]
        if value <= 1:
            every = [one for one in self.overall if one is not None]
            return 0 if all(one.decided for one in every) else None
        return side if ratio is not None and ratio.decided else None


def head_to_head(
    rows: Sequence[Measurement], settings: Mapping[str, Setting]
) -> tuple[HeadToHead, ...]:
    """One comparison for each workload, unit and kind of cards (real or emulated)."""
    groups: dict[tuple[str, str, bool], list[Measurement]] = {}
    for row in rows:
        if row.state is State.SUCCEEDED and row.metrics.throughput is not None:
            key = (row.workload, row.metrics.throughput_unit, row.emulated)
            groups.setdefault(key, []).append(row)
    found = (_compared(*key[:2], group, settings) for key, group in groups.items())
    return tuple(one for one in found if one is not None)


def _side(setting: Setting) -> Side:
    return Side(setting.accelerator, setting.device, setting.emulated, setting.engine)


def _compared(
    workload: str, unit: str, rows: Sequence[Measurement], settings: Mapping[str, Setting]
) -> HeadToHead | None:
    sides = list(dict.fromkeys(map(_side, dict.fromkeys(settings[r.job_id] for r in rows))))
    if len(sides) < 2:
        return None
    alike: dict[object, dict[int, list[Measurement]]] = {}
    known = dict.fromkeys(settings[row.job_id] for row in rows)
    common = frozenset.intersection(
        *(frozenset(name for name, _ in setting.parameters) for setting in known)
    )
    places = {setting: (_work(setting, common), sides.index(_side(setting))) for setting in known}
    for row in rows:
        work, side = places[settings[row.job_id]]
        key = (work, row.precision, row.batch_size_requested)
        alike.setdefault(key, {}).setdefault(side, []).append(row)
    # A setting of which one side has several rows is left alone: which one is meant is not known.
    matched = [
        {side: group[0] for side, group in found.items()}
        for found in alike.values()
        if len(found) > 1 and all(len(group) == 1 for group in found.values())
    ]
    if not matched:
        return None
    matched.sort(key=_fastest, reverse=True)
    shown = matched[:MOST_LINES]
    labels = _labels(shown, common)
    lines = [_line(found, len(sides), label) for found, label in zip(shown, labels, strict=True)]
    return HeadToHead(
        workload=workload,
        unit=unit,
        sides=tuple(_names(sides)),
        lines=tuple(lines),
        overall=tuple(_overall(lines, side) for side in range(len(sides))),
        left_out=len(matched) - len(shown),
    )


def _work(setting: Setting, common: frozenset[str]) -> Setting:
    """The setting as all sides can have it."""
    shared = tuple(pair for pair in setting.parameters if pair[0] in common)
    return replace(setting, accelerator="", device="", emulated=False, engine="", parameters=shared)


def _fastest(found: Mapping[int, Measurement]) -> float:
    return max(row.metrics.throughput or 0.0 for row in found.values())


def _names(sides: Sequence[Side]) -> list[str]:
    """Names of the sides: their cards, their engines, or both, whatever varies."""
    cards = {side: _cards(side) for side in sides}
    twice = {name for name, count in Counter(cards.values()).items() if count > 1}
    engines = len({side.engine for side in sides}) > 1
    names = []
    for side in sides:
        parts = [cards[side]] if len(set(cards.values())) > 1 else []
        parts += [side.engine] if engines or cards[side] in twice else []
        names.append(", ".join(parts))
    return names


def _cards(side: Side) -> str:
    return card_name(side.accelerator, side.device, emulated=side.emulated)


def _labels(found: Sequence[Mapping[int, Measurement]], common: frozenset[str]) -> list[str]:
    """The label of each line: what varies among them, without their sides."""
    first = next(iter(found[0].values()))
    stripped = []
    for rows in found:
        row = next(iter(rows.values()))
        kept = {name: value for name, value in row.parameters.items() if name in common}
        stripped.append(
            replace(row, accelerator=first.accelerator, engine=first.engine, parameters=kept)
        )
    labels = labels_of(stripped)
    return [str(labels[row.job_id]) for row in stripped]


def _line(found: Mapping[int, Measurement], sides: int, label: str) -> Line:
    rows = tuple(found.get(side) for side in range(sides))
    base = next(row for row in rows if row is not None)
    others = (row if row is not base else None for row in rows)
    ratios = (ratio_of_rows(row, base) if row is not None else None for row in others)
    return Line(label=label, rows=rows, ratios=tuple(ratios))


def _overall(lines: Iterable[Line], side: int) -> Ratio | None:
    ratios = [
        ratio
        for line in lines
        if line.rows[0] is not None and (ratio := line.ratios[side]) is not None
    ]
    return pooled(ratios) if ratios else None
