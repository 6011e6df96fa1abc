"""Best settings for each piece of work, Pareto fronts, and accelerators side by side.

Rows rank together if they did the same work on the same device: all settings of role ``work`` agree
(``workloads/settings.py``). Throughput decides. The fastest row wins if every other row must be
slower, by intervals; ``range_of`` widens them for rows of a single repeat, and for contended rows,
which are at least that fast. The Pareto front trades throughput for latency. Head to head matches
rows that agree in all but device and engine, and never compares emulated with real cards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache
from math import isfinite
from statistics import NormalDist
from typing import Any

from orchestrator.analysis.flags import FALSE, barred, bounded, kept_share, raised_on
from orchestrator.analysis.metrics import memory_is_known, peak_memory_bytes, reported_figure, same
from orchestrator.analysis.ratio import Ratio, pooled, ratio_of_rows
from orchestrator.analysis.selection import Setting
from orchestrator.core.job import State
from orchestrator.core.labels import labels_of
from orchestrator.core.measurement import Doubt, Measurement
from orchestrator.core.settings import FIELDS
from orchestrator.grid.objectives import COMMON
from workloads import registry
from workloads.registry import Metric
from workloads.util.statistics import pareto

#: Largest factor by which a throughput without an interval is taken to be off.
UNKNOWN_FACTOR = 2.0
#: Largest factor by which a process runs slower while others share its host's caches, memory and
#: the other thread of its core, and while its threads spin, beyond the time that it waits; and for
#: how many times that time others may run beside it, on other cores.
BESIDE_OTHERS, BESIDE_WAITS = 4.0, 3.0

#: The same for a process that hardly ran, in questions.
_LARGEST_FACTOR = 100.0
#: Figures that others on the host make worse.
_RATES = tuple(name for name, more in COMMON.items() if more)
_TIMES = tuple(name for name in COMMON if name.startswith(("ttft", "tpot", "latency")))


class Verdict(str, Enum):
    """Standing of the fastest row."""

    CLEAR_WINNER = "clear winner"  # its interval is above the second's
    TIED = "tied"  # its interval overlaps another's
    NOT_KNOWN = "not known"  # it, or a row that may be as fast, has no interval
    PROVISIONAL = "provisional"  # it, or a row that may be as fast, has a lower bound only
    ALONE = "alone"  # no second row


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The best row of a ranking by one figure of its workload."""

    metric: Metric
    row: Measurement
    value: float
    tied: int  # other rows with the same value

    @property
    def title(self) -> str:
        """Title, such as ``best loss after``."""
        return f"best {self.metric.title}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The best rows for one piece of work on one device."""

    setting: Setting  # engine and isolation are blank
    unit: str
    ranked: tuple[Measurement, ...]  # succeeded rows, the fastest first
    tied: tuple[Measurement, ...]  # rows that may be as fast as the fastest, best first
    bounds: frozenset[str] = frozenset()  # job ids of rows whose throughput is a lower bound

    @property
    def fastest(self) -> Measurement:
        """The row with the highest throughput."""
        return self.ranked[0]

    @property
    def verdict(self) -> Verdict:
        """Standing of the fastest row."""
        if len(self.ranked) == 1:
            return Verdict.ALONE
        candidates = (self.fastest, *self.tied)
        unknown = any(row.metrics.throughput_low is None for row in candidates)
        if not self.tied and not unknown:
            return Verdict.CLEAR_WINNER
        if any(map(self.at_least, candidates)):
            return Verdict.PROVISIONAL
        return Verdict.NOT_KNOWN if unknown else Verdict.TIED

    @property
    def winner(self) -> Measurement | None:
        """The row that beats all others, if any."""
        return self.fastest if self.verdict is Verdict.CLEAR_WINNER else None

    @property
    def first(self) -> tuple[Measurement, ...]:
        """The rows of which each may be the fastest; empty if one has won or is alone."""
        decided = self.verdict in (Verdict.CLEAR_WINNER, Verdict.ALONE)
        return () if decided else (self.fastest, *self.tied)

    @property
    def to_measure_again(self) -> tuple[Measurement, ...]:
        """The rows with lower bounds that leave the verdict open."""
        return tuple(row for row in self.first if self.at_least(row))

    def at_least(self, row: Measurement) -> bool:
        """Return whether the row's throughput is a lower bound, and its times upper bounds."""
        return row.job_id in self.bounds

    @property
    def lowest_latency(self) -> Measurement | None:
        """The row with the lowest median latency of a prompt."""
        timed = [row for row in self.ranked if row.metrics.latency_p50_s is not None]
        return min(timed, key=latency, default=None)

    @property
    def smallest_memory(self) -> Measurement | None:
        """The row with the smallest peak memory; None unless that of all rows is known."""
        if any(not memory_is_known(row) for row in self.ranked):
            return None
        return min(self.ranked, key=lambda row: (peak_memory_bytes(row) or 0, row.job_id))

    @property
    def most_work_per_joule(self) -> Measurement | None:
        """The row with the most work per joule, of those with known energy."""
        metered = [row for row in self.ranked if row.metrics.work_per_joule is not None]
        return max(metered, key=lambda row: row.metrics.work_per_joule or 0.0, default=None)

    @property
    def leaders(self) -> tuple[Leader, ...]:
        """The best rows by each figure of the workload that declares a better direction and varies,
        in order of declaration."""
        declared = registry.metrics_of(self.setting.workload)
        raw = any(row.samples for row in self.ranked)  # figures may be derived from them
        names = {name for row in self.ranked for name in (*row.workload_metrics, *row.details)}
        leaders = []
        for metric in declared.values():
            if metric.better is None or not (raw or metric.name in names):
                continue
            figures = ((reported_figure(row, metric.name, declared), row) for row in self.ranked)
            known = [
                (value, row) for value, row in figures if value is not None and isfinite(value)
            ]
            if len(known) < 2:
                continue
            pick = min if metric.better == "lower" else max
            value, row = pick(known, key=lambda pair: pair[0])
            alike = sum(same(value, other) for other, _ in known)
            if alike < len(known):
                leaders.append(Leader(metric=metric, row=row, value=value, tied=alike - 1))
        return tuple(leaders)


def rankings_of(
    rows: Sequence[Measurement],
    settings: Mapping[str, Setting],
    bounds: Collection[str] = frozenset(),
) -> tuple[Ranking, ...]:
    """Return one ranking for each piece of work with a measured throughput; ``bounds`` are the job
    ids of rows whose throughput is a lower bound, here and below."""
    entered = (row for row in rows if isfinite(row.metrics.throughput or math.nan))
    rankings = []
    for (setting, unit), group in by_work(entered, settings).items():
        fastest, *others = sorted(group, key=lambda row: (-throughput(row), row.job_id))
        floor = range_of(fastest, bounds)[0]
        rankings.append(
            Ranking(
                setting=setting,
                unit=unit,
                ranked=(fastest, *others),
                tied=tuple(row for row in others if range_of(row, bounds)[1] >= floor),
                bounds=frozenset(row.job_id for row in group if row.job_id in bounds),
            )
        )
    return tuple(rankings)


def by_work(
    rows: Iterable[Measurement], settings: Mapping[str, Setting]
) -> dict[tuple[Setting, str], list[Measurement]]:
    """Group the succeeded rows by work and unit of throughput."""
    groups: dict[tuple[Setting, str], list[Measurement]] = {}
    for row in rows:
        if row.state is State.SUCCEEDED:
            key = (work_of(settings[row.job_id]), row.metrics.throughput_unit)
            groups.setdefault(key, []).append(row)
    return groups


def interval(row: Measurement) -> tuple[float, float]:
    """Return the confidence interval of the throughput; a point if there is none."""
    value = row.metrics.throughput or 0.0
    low, high = row.metrics.throughput_low, row.metrics.throughput_high
    return (value if low is None else low, value if high is None else high)


def range_of(row: Measurement, bounds: Collection[str] = frozenset()) -> tuple[float, float]:
    """Return the least and the most that a row's setting can reach, by what is known of it.

    A row in ``bounds`` reaches its lower end without others on its host, or more: up to what it
    would have reached in the part of its time that it kept, and there ``BESIDE_OTHERS`` times
    faster while others ran.
    """
    low, high = interval(row)
    if row.metrics.throughput_low is None:
        low /= UNKNOWN_FACTOR
    if row.metrics.throughput_high is None:
        high *= UNKNOWN_FACTOR
    if row.job_id in bounds:
        kept = kept_share(row)
        beside = min(1.0, BESIDE_WAITS * (1.0 - kept))
        alone = kept * (1.0 - beside * (1.0 - 1.0 / BESIDE_OTHERS))
        high = high / alone if alone > 0 else math.inf
    return low, high


def doubt_of(row: Measurement) -> Doubt:
    """Return what a row leaves open about its figures, for questions and searches."""
    if row.state is not State.SUCCEEDED:
        return Doubt()
    raised = raised_on([row])[0]
    value = row.metrics.throughput or 0.0
    low, high = interval(row)
    deviations = {}
    if 0 < low < high:
        z = NormalDist().inv_cdf(0.5 + row.measure.confidence / 2)
        deviations = dict.fromkeys(_RATES, math.log(high / low) / 2 / z)
    better_by = {}
    if bounded(raised) and value:
        most = range_of(row, {row.job_id})[1]
        better_by = dict.fromkeys((*_RATES, *_TIMES), math.log(min(most / value, _LARGEST_FACTOR)))
    names = [one.flag.name for one in raised]
    flags = ", ".join(names) if barred(raised) else ""
    return Doubt(deviations, better_by, flags, usable=FALSE.isdisjoint(names))


@lru_cache(maxsize=65_536)  # a few settings serve all rows of a large run
def work_of(setting: Setting) -> Setting:
    """Return the setting of the work: without free choices, with undeclared settings."""
    declared = registry.declared_in_rows(setting.workload, setting.engine)
    parameters = tuple(
        pair
        for pair in setting.parameters
        if pair[0] not in declared or declared[pair[0]].role == "work"
    )
    names = (field.name for field in fields(Setting) if field.name in FIELDS)
    blank: dict[str, Any] = {name: "" for name in names if FIELDS[name].role != "work"}
    return replace(setting, parameters=parameters, **blank)


# ---------------------------------------------------------------- throughput against latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """One piece of work on one device; ``best`` runs from the lowest latency upwards."""

    setting: Setting  # engine and isolation are blank
    unit: str
    best: tuple[Measurement, ...]
    beaten: tuple[Measurement, ...]  # some row is no worse in both figures, and better in one


def fronts_of(rows: Sequence[Measurement], settings: Mapping[str, Setting]) -> tuple[Front, ...]:
    """Return a front for each piece of work with at least two rows that have both figures."""
    pointed = (
        row for row in rows if 0 < latency(row) < math.inf and 0 < throughput(row) < math.inf
    )
    fronts = []
    for (setting, unit), group in by_work(pointed, settings).items():
        if len(group) > 1:
            best = pareto(group, lambda row: (-latency(row), throughput(row)))
            on_it = {row.job_id for row in best}
            beaten = tuple(row for row in group if row.job_id not in on_it)
            fronts.append(Front(setting=setting, unit=unit, best=tuple(best), beaten=beaten))
    return tuple(fronts)


def throughput(row: Measurement) -> float:
    """Return the row's throughput, 0 if it has none."""
    return row.metrics.throughput or 0.0


def latency(row: Measurement) -> float:
    """Return the row's median latency of a prompt in seconds, 0 if it has none."""
    return row.metrics.latency_p50_s or 0.0


# ---------------------------------------------------------------- head to head

MOST_LINES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The same settings on two or more sides; ``ratios`` are over the first side that has them."""

    label: str
    rows: tuple[Measurement | None, ...]  # one a side
    ratios: tuple[Ratio | None, ...]  # None: no row, or the base itself


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadToHead:
    """All settings of one workload that two or more sides have measured."""

    workload: str
    unit: str
    sides: tuple[str, ...]  # names
    lines: tuple[Line, ...]  # the fastest first
    left_out: int = 0  # lines beyond the limit

    def over_first(self, side: int) -> list[Ratio]:
        """Return the ratios of a side over the first: those with an interval, if any has one."""
        ratios = [line.ratios[side] for line in self.lines if line.rows[0] is not None]
        known = [ratio for ratio in ratios if ratio is not None]
        # One setting of a single repeat says nothing against what the others show.
        return [ratio for ratio in known if ratio.low is not None] or known

    @property
    def overall(self) -> tuple[Ratio | None, ...]:
        """Geometric means of ``over_first`` for each side."""
        of_sides = map(self.over_first, range(len(self.sides)))
        return tuple(pooled(ratios) if ratios else None for ratios in of_sides)

    @property
    def fastest(self) -> int | None:
        """The side that is significantly fastest; None: undecided."""
        known = {side: ratio for side, ratio in enumerate(self.overall) if ratio is not None}
        if not known:
            return None
        side = max(known, key=lambda side: (known[side].value, side))
        if known[side].value <= 1:
            return 0 if all(ratio.decided for ratio in known.values()) else None
        return side if known[side].decided else None


def head_to_head(
    rows: Sequence[Measurement],
    settings: Mapping[str, Setting],
    bounds: Collection[str] = frozenset(),
) -> tuple[HeadToHead, ...]:
    """Return one comparison for each workload, unit and kind of cards (real or emulated)."""
    groups: dict[tuple[str, str, bool], list[Measurement]] = {}
    for row in rows:
        if row.state is State.SUCCEEDED and row.metrics.throughput is not None:
            key = (row.workload, row.metrics.throughput_unit, row.emulated)
            groups.setdefault(key, []).append(row)
    comparisons = (_compared(*key[:2], group, settings, bounds) for key, group in groups.items())
    return tuple(one for one in comparisons if one is not None)


def _compared(
    workload: str,
    unit: str,
    rows: Sequence[Measurement],
    settings: Mapping[str, Setting],
    bounds: Collection[str],
) -> HeadToHead | None:
    known = dict.fromkeys(settings[row.job_id] for row in rows)
    side_of = {one: (one.accelerator, one.device, one.emulated, one.engine) for one in known}
    sides = {side: setting for setting, side in reversed(side_of.items())}
    if len(sides) < 2:
        return None
    order = {side: place for place, side in enumerate(dict.fromkeys(side_of.values()))}
    common = frozenset.intersection(*(frozenset(dict(one.parameters)) for one in known))
    works = {
        one: replace(  # only what all sides can have
            one,
            accelerator="",
            device="",
            emulated=False,
            engine="",
            parameters=tuple(pair for pair in one.parameters if pair[0] in common),
        )
        for one in known
    }
    alike: dict[object, dict[int, list[Measurement]]] = {}
    for row in rows:
        setting = settings[row.job_id]
        key = (works[setting], row.precision, row.batch_size_requested)
        alike.setdefault(key, {}).setdefault(order[side_of[setting]], []).append(row)
    # Settings with several rows on one side are ambiguous and left out.
    matched = [
        {side: group[0] for side, group in by_side.items()}
        for by_side in alike.values()
        if len(by_side) > 1 and all(len(group) == 1 for group in by_side.values())
    ]
    if not matched:
        return None
    matched.sort(key=lambda by_side: max(map(throughput, by_side.values())), reverse=True)
    shown = matched[:MOST_LINES]
    labels = _labels(shown, common)
    lines = []
    for by_side, label in zip(shown, labels, strict=True):
        of_sides = tuple(by_side.get(side) for side in range(len(order)))
        base = next(row for row in of_sides if row is not None)
        ratios = (
            ratio_of_rows(row, base, bounds) if row is not None and row is not base else None
            for row in of_sides
        )
        lines.append(Line(label=label, rows=of_sides, ratios=tuple(ratios)))
    return HeadToHead(
        workload=workload,
        unit=unit,
        sides=tuple(_names([sides[side] for side in order])),
        lines=tuple(lines),
        left_out=len(matched) - len(shown),
    )


def _names(sides: Sequence[Setting]) -> Iterator[str]:
    cards = Counter(side.card for side in sides)
    engines = len({side.engine for side in sides}) > 1
    for side in sides:
        parts = [side.card] if len(cards) > 1 else []
        parts += [side.engine] if engines or cards[side.card] > 1 else []
        yield ", ".join(parts)


def _labels(matched: Sequence[Mapping[int, Measurement]], common: frozenset[str]) -> list[str]:
    first = next(iter(matched[0].values()))
    stripped = []
    for rows in matched:
        row = next(iter(rows.values()))
        parameters = {name: value for name, value in row.parameters.items() if name in common}
        stripped.append(
            replace(row, accelerator=first.accelerator, engine=first.engine, parameters=parameters)
        )
    labels = labels_of(stripped)
    return [str(labels[row.job_id]) for row in stripped]
