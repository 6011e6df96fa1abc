"""Effect of each technique: rows that differ from a baseline in exactly one setting.

A technique is any setting whose role is ``choice`` (``workloads/settings.py``): precision, engine,
attention, padding, gradient checkpointing. For each piece of work one measured row's choices are
the baseline, and every row that differs from it in one of them says what that one is worth. Two
changed at once prove nothing about either and are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import geometric_mean

from orchestrator.domain.declared import declared_of, usual_engine
from orchestrator.domain.job import State
from orchestrator.domain.measurement import Measurement
from orchestrator.report.contests import peak_memory_bytes, work_of
from orchestrator.report.grouping import Setting, precision_rank, scalar
from orchestrator.report.ratio import Ratio, pooled, rate_of, ratio_of

Technique = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A row, the baseline at the same batch size, and how many times as fast the row is."""

    row: Measurement
    base: Measurement
    ratio: Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One setting changed from the baseline's value to another, at one or more batch sizes."""

    setting: Setting  # of the work; engine, isolation and techniques are the baseline's
    name: str  # "precision", "padding", …
    before: str
    after: str
    pairs: tuple[Pair, ...]  # by batch size, smallest first

    @property
    def ratio(self) -> Ratio:
        """Geometric mean over the batch sizes."""
        return pooled([pair.ratio for pair in self.pairs])

    @property
    def token_ratio(self) -> float | None:
        """Real tokens/s (no padding) over the baseline's: geometric mean over the batch sizes.

        It differs from samples/s where a setting changes which samples a step holds.
        """
        ratios = [
            mine / other
            for pair in self.pairs
            if (mine := pair.row.metrics.total_tokens_per_s)
            and (other := pair.base.metrics.total_tokens_per_s)
        ]
        return geometric_mean(ratios) if len(ratios) == len(self.pairs) else None

    @property
    def memory_ratio(self) -> float | None:
        """Largest peak memory over the baseline's, at the largest batch size that has both."""
        for pair in reversed(self.pairs):
            mine, other = peak_memory_bytes(pair.row), peak_memory_bytes(pair.base)
            if mine and other:
                return mine / other
        return None


def effects_of(rows: Sequence[Measurement], settings: Mapping[str, Setting]) -> tuple[Effect, ...]:
    """Every effect that the rows show, grouped by work; within it the largest gain first."""
    groups: dict[Setting, list[Measurement]] = {}
    for row in rows:
        if row.state is State.SUCCEEDED and rate_of(row.metrics, row.measure.confidence):
            groups.setdefault(work_of(settings[row.job_id]), []).append(row)
    effects = []
    for work, group in groups.items():
        defaults = _defaults(work.workload, {settings[row.job_id].engine for row in group})
        told = {row.job_id: _technique(row, settings[row.job_id], defaults) for row in group}
        seen = {(told[row.job_id], row.batch_size_requested) for row in group}
        base = baseline(seen, defaults)
        found = _compared(group, told, base, defaults)
        setting = _with(work, {**defaults, **dict(base)})
        effects += [
            Effect(setting=setting, name=name, before=before, after=after, pairs=tuple(pairs))
            for (name, before, after), pairs in sorted(found.items(), key=_gain, reverse=True)
        ]
    return tuple(effects)


def baseline(seen: Collection[tuple[Technique, str]], defaults: Mapping[str, str]) -> Technique:
    """The choices to compare with, of those that rows have, each with its batch size.

    They are the nearest to the defaults among those with at least half as many comparisons as the
    centre of the grid's star has: a default in one row of a grid that is about another precision
    compares with nothing. Ties go to the centre, then to the widest precision.

    Raises:
        ValueError: ``seen`` is empty.
    """
    pairs = _pairs(set(seen))
    most = max(pairs.values())

    def rank(one: Technique) -> tuple[object, ...]:
        unusual = sum(defaults.get(name) != value for name, value in one)
        precision = precision_rank(dict(one).get("precision", ""))
        return (2 * pairs[one] < most, unusual, -pairs[one], precision, one)

    return min(pairs, key=rank)


def _pairs(seen: Set[tuple[Technique, str]]) -> dict[Technique, int]:
    """Count the others that each can be compared with: at an equal batch size, in one setting."""
    names = {name for one, _ in seen for name, _ in one}
    rests: dict[tuple[Technique, str], list[Hashable]] = {
        (one, size): [(size, n, frozenset(p for p in one if p[0] != n)) for n in names]
        for one, size in seen
    }
    alike = Counter(rest for own in rests.values() for rest in own)
    found = dict.fromkeys((one for one, _ in seen), 0)
    for (one, _), own in rests.items():
        found[one] += sum(alike[rest] - 1 for rest in own)
    return found


def _compared(
    rows: Iterable[Measurement],
    told: Mapping[str, Technique],
    base: Technique,
    defaults: Mapping[str, str],
) -> dict[tuple[str, str, str], list[Pair]]:
    """Pairs by what was changed, each at one batch size."""
    by_batch: dict[str, list[Measurement]] = {}
    for row in rows:
        by_batch.setdefault(row.batch_size_requested, []).append(row)
    found: dict[tuple[str, str, str], list[Pair]] = {}
    for column in sorted(by_batch, key=lambda size: (not size.isdecimal(), size.zfill(9))):
        group = by_batch[column]
        of_base = next((row for row in group if told[row.job_id] == base), None)
        if of_base is None:
            continue
        for row in group:
            changes = _changes(base, told[row.job_id], defaults)
            if len(changes) != 1 or row.metrics.throughput_unit != of_base.metrics.throughput_unit:
                continue
            ratio = _ratio(row, of_base)
            if ratio is not None:
                pair = Pair(row=row, base=of_base, ratio=ratio)
                found.setdefault(changes[0], []).append(pair)
    return found


def _ratio(row: Measurement, base: Measurement) -> Ratio | None:
    mine = rate_of(row.metrics, row.measure.confidence)
    other = rate_of(base.metrics, base.measure.confidence)
    return ratio_of(mine, other) if mine and other else None


def _defaults(workload: str, engines: Iterable[str]) -> dict[str, str]:
    """The default of every choice that rows of these engines have, as text."""
    declared = {n: d for engine in engines for n, d in declared_of(workload, engine).items()}
    known = {n: scalar(d.default) for n, d in declared.items() if d.role == "choice"}
    del known["batch_size"]  # rows are compared at equal ones
    return {**known, "engine": usual_engine(workload)}


def _gain(entry: tuple[object, list[Pair]]) -> float:
    return pooled([pair.ratio for pair in entry[1]]).value


def _changes(
    base: Technique, other: Technique, defaults: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """Name, value before and after of every setting that differs."""
    before, after = {**defaults, **dict(base)}, {**defaults, **dict(other)}
    return [(n, before[n], after[n]) for n in sorted(before) if before[n] != after[n]]


def _technique(row: Measurement, setting: Setting, defaults: Mapping[str, str]) -> Technique:
    """The precision and every other choice of a row that is not at its default. So a setting that
    only its engine has does not tell it from rows of other engines unless it is set."""
    own = {**dict(setting.parameters), "engine": setting.engine, "isolation": setting.isolation}
    chosen = [(n, own[n]) for n in defaults if n in own and own[n] != defaults[n]]
    return (("precision", row.precision), *chosen)


def _with(work: Setting, choices: dict[str, str]) -> Setting:
    """The work done in the baseline's way; each effect names its precision."""
    del choices["precision"]
    engine, isolation = choices.pop("engine"), choices.pop("isolation")
    parameters = tuple(sorted((*work.parameters, *choices.items())))
    return replace(work, engine=engine, isolation=isolation, parameters=parameters)
