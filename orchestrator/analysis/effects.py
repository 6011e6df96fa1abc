"""Effect of each technique, and scaling over cards.

A technique is a setting of role ``choice`` (``workloads/settings.py``), such as precision or
engine. The baseline takes defaults, or commonest values where few rows have the default. Rows are
compared with the baseline of their experiment and of all experiments with the same work; a row with
several choices changed is paired with a row that lacks one of them, if the baseline has no pair for
it.

Scaling is weak: each card has its own batch. Efficiency is the throughput of N cards over N/n times
that of n, the fewest cards measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import geometric_mean
from typing import TypeAlias

from orchestrator.analysis.metrics import memory_is_known, peak_memory_bytes
from orchestrator.analysis.rankings import work_of
from orchestrator.analysis.ratio import Ratio, pooled, rate_of, ratio_of_rows
from orchestrator.analysis.selection import Setting, precision_rank
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.settings import declared_of, usual_engine
from orchestrator.util.format import scalar

#: Every choice of a row but its batch size, by name; and the same as a hashable value.
Choices = Mapping[str, str]
Technique = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A row, the row it is compared with at the same batch size, and its speed-up."""

    row: Measurement
    base: Measurement
    ratio: Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One setting changed from one value to another, at one or more batch sizes."""

    setting: Setting  # of the work; engine, isolation and techniques are those of both rows
    name: str  # "precision", "padding", …
    before: str
    after: str
    pairs: tuple[Pair, ...]  # by batch size, smallest first

    @property
    def label_setting(self) -> Setting:
        """The setting without values at their defaults, for labels."""
        setting = self.setting
        declared = declared_of(setting.workload, setting.engine or usual_engine(setting.workload))
        parameters = tuple(
            (name, value)
            for name, value in setting.parameters
            if name not in declared or scalar(declared[name].default) != value
        )
        return replace(setting, parameters=parameters)

    @property
    def ratio(self) -> Ratio:
        """Geometric mean over the batch sizes."""
        return pooled([pair.ratio for pair in self.pairs])

    @property
    def token_ratio(self) -> float | None:
        """Geometric mean ratio of real tokens/s (no padding), as steps may hold other samples."""
        ratios = [
            mine / other
            for pair in self.pairs
            if (mine := pair.row.metrics.total_tokens_per_s)
            and (other := pair.base.metrics.total_tokens_per_s)
        ]
        return geometric_mean(ratios) if len(ratios) == len(self.pairs) else None

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory over the baseline's, at the largest batch size that has both."""
        for pair in reversed(self.pairs):
            mine, other = peak_memory_bytes(pair.row), peak_memory_bytes(pair.base)
            if mine and other and memory_is_known(pair.row) and memory_is_known(pair.base):
                return mine / other
        return None


def effects_of(
    rows: Sequence[Measurement],
    settings: Mapping[str, Setting],
    bounds: Collection[str] = frozenset(),
) -> tuple[Effect, ...]:
    """Return every effect, grouped by work; within it the largest gain first. ``bounds`` are the
    job ids of rows whose throughput is a lower bound."""
    groups: dict[Setting, list[Measurement]] = {}
    for row in rows:
        if row.state is State.SUCCEEDED and rate_of(row):
            groups.setdefault(work_of(settings[row.job_id]), []).append(row)
    effects = []
    for work, group in groups.items():
        defaults = _defaults(work.workload, {settings[row.job_id].engine for row in group})
        techniques: dict[tuple[Setting, str], Technique] = {}  # shared by all batch sizes
        chosen = []
        for row in group:
            setting = settings[row.job_id]
            own = setting, row.precision
            if own not in techniques:
                known = dict(setting.parameters)
                known |= {"engine": setting.engine, "isolation": setting.isolation}
                # A choice that an engine lacks is at its default.
                values = {name: known.get(name, usual) for name, usual in defaults.items()}
                techniques[own] = frozenset((values | {"precision": row.precision}).items())
            chosen.append((row, techniques[own]))
        pairs_of_change: dict[tuple[_Change, Technique], list[Pair]] = {}
        for change, around, pair in _pairs(chosen, defaults, bounds):
            pairs_of_change.setdefault((change, around), []).append(pair)
        of_work = []
        for ((name, before, after), around), pairs in pairs_of_change.items():
            shared = dict(around)
            setting = replace(
                work,
                engine=shared.pop("engine", ""),
                isolation=shared.pop("isolation", ""),
                parameters=tuple(sorted((*work.parameters, *shared.items()))),
            )
            by_size = tuple(sorted(pairs, key=_batch))
            of_work.append(
                Effect(setting=setting, name=name, before=before, after=after, pairs=by_size)
            )
        effects += sorted(of_work, key=lambda effect: effect.ratio.value, reverse=True)
    return tuple(effects)


_Change: TypeAlias = tuple[str, str, str]  # name of a choice, its value before and after
_Chosen: TypeAlias = Sequence[tuple[Measurement, Technique]]


def _pairs(
    chosen: _Chosen, defaults: Choices, bounds: Collection[str]
) -> Iterator[tuple[_Change, Technique, Pair]]:
    """Yield each useful pair, with its change and the choices that both rows share."""
    measured: set[_Change] = set()  # by pairs nearer to the baseline
    coming: set[_Change] = set()
    seen: set[frozenset[str]] = set()
    nearness = 1
    for unusual, change, around, row, base in sorted(
        _candidates(chosen, defaults), key=lambda candidate: candidate[0]
    ):
        if unusual > nearness:
            measured, nearness = measured | coming, unusual
        name, before, after = change
        both = frozenset({row.job_id, base.job_id})
        known = unusual > 1 and bool({change, (name, after, before)} & measured)
        ratio = None if known or both in seen else ratio_of_rows(row, base, bounds)
        if ratio is not None:
            seen.add(both)
            coming.add(change)
            yield change, around, Pair(row=row, base=base, ratio=ratio)


def _candidates(
    chosen: _Chosen, defaults: Choices
) -> Iterator[tuple[int, _Change, Technique, Measurement, Measurement]]:
    """Yield rows with partners that differ in one choice, pairs of one experiment first. Items:
    number of choices unlike the baseline, change, shared choices, row, partner."""
    experiments: dict[str, list[Choices]] = {}
    places: dict[tuple[str, str, Technique], Measurement] = {}  # rows of one place did the same
    for row, technique in chosen:
        experiments.setdefault(row.experiment, []).append(dict(technique))
        places.setdefault((*_size(row), technique), row)
    of_all = _baseline([one for group in experiments.values() for one in group], defaults)
    own = {name: _baseline(group, defaults, share=0.5) for name, group in experiments.items()}
    steps = cache(_steps)
    for bases in (own, dict.fromkeys(own, of_all)):
        usual = {name: frozenset(base.items()) for name, base in bases.items()}
        for row, technique in chosen:
            place = (*_size(row), technique)
            if places[place] is row:  # else another row did exactly the same
                changes = steps(technique, usual[row.experiment])
                for change, around, before in changes:
                    other = places.get((*_size(row), before))
                    if other is not None:
                        yield len(changes), change, around, row, other


def _size(row: Measurement) -> tuple[str, str]:
    return row.metrics.throughput_unit, row.batch_size_requested


def _steps(technique: Technique, base: Technique) -> list[tuple[_Change, Technique, Technique]]:
    """Return the choices that differ from the baseline: change, rest, and choices before."""
    usual = dict(base)
    changed = [(name, value) for name, value in sorted(technique) if usual[name] != value]
    return [
        (
            (name, usual[name], value),
            technique - {(name, value)},
            technique - {(name, value)} | {(name, usual[name])},
        )
        for name, value in changed
    ]


def _baseline(rows: Sequence[Choices], defaults: Choices, *, share: float = 0.0) -> Choices:
    """Return each choice's default if frequent enough, else its commonest value.

    Frequent: at least ``share`` times the count of the commonest, and not 0. Ties go to the widest
    precision, then to the first name.
    """
    usual_choices = {}
    for name in defaults:
        values = {choices[name] for choices in rows}
        if len(values) == 1:  # as most have
            (usual_choices[name],) = values
            continue
        counts = Counter(choices[name] for choices in rows)
        most = max(counts.values())
        usual = defaults[name]
        if not counts[usual] or counts[usual] < share * most:
            common = [value for value, count in counts.items() if count == most]
            usual = min(common, key=precision_rank if name == "precision" else None)
        usual_choices[name] = usual
    return usual_choices


def _batch(pair: Pair) -> tuple[bool, int]:
    size = pair.row.batch_size_requested
    return (False, int(size)) if size.isdecimal() else (True, 0)


def _defaults(workload: str, engines: Iterable[str]) -> dict[str, str]:
    declared = {n: d for engine in engines for n, d in declared_of(workload, engine).items()}
    known = {n: scalar(d.default) for n, d in declared.items() if d.role == "choice"}
    del known["batch_size"]  # rows are compared at equal ones
    return {**known, "engine": usual_engine(workload)}


# ---------------------------------------------------------------- scaling over cards


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One number of cards: speed-up over the base, and that of perfect scaling."""

    row: Measurement
    speedup: Ratio
    ideal: float

    @property
    def efficiency(self) -> float:
        """Share of perfect scaling, 0 to 1; above 1 if the base was slowed down."""
        return self.speedup.value / self.ideal


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The same job on growing numbers of cards; ``steps`` start with the base."""

    setting: Setting  # cards are the base's
    steps: tuple[Step, ...]

    @property
    def base(self) -> Measurement:
        """The row of the fewest cards."""
        return self.steps[0].row


def scalings_of(
    rows: Sequence[Measurement],
    settings: Mapping[str, Setting],
    bounds: Collection[str] = frozenset(),
) -> tuple[Scaling, ...]:
    """Return one entry for each job that succeeded on two or more numbers of cards."""
    groups: dict[tuple[Setting, str, str, str], list[Measurement]] = {}
    without_cards = cache(lambda setting: replace(setting, cards=0))  # a few serve all rows
    for row in rows:
        if row.state is State.SUCCEEDED and rate_of(row):
            setting = without_cards(settings[row.job_id])
            groups.setdefault((setting, row.precision, *_size(row)), []).append(row)
    scalings = []
    for (setting, *_), group in groups.items():
        ordered = sorted(group, key=lambda row: row.cards)
        base = ordered[0]
        # Searched batch sizes may differ, and then the cards did different work.
        ordered = [row for row in ordered if row.batch_size == base.batch_size]
        if len({row.cards for row in ordered}) < 2:
            continue
        steps = []
        for row in ordered:
            measured = ratio_of_rows(row, base, bounds) if row is not base else None
            speedup = measured or Ratio(value=1.0, low=1.0, high=1.0)
            steps.append(Step(row=row, speedup=speedup, ideal=row.cards / base.cards))
        own = replace(setting, cards=base.cards)
        scalings.append(Scaling(setting=own, steps=tuple(steps)))
    return tuple(sorted(scalings, key=lambda s: (s.setting, precision_rank(s.base.precision))))
