"""What each technique buys: rows that differ from a baseline in exactly one setting.

A technique is anything that one may choose for the same work: precision, engine, attention,
padding, gradient checkpointing, method. For each piece of work one measured row's settings are the
baseline, and every row that differs from a baseline in one setting only says what that setting is
worth. Two settings changed at once prove nothing about either and are left out. Works for any
workload: a parameter counts as a technique unless it is known to set the amount of work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import geometric_mean

from orchestrator.domain.job import State
from orchestrator.domain.measurement import Measurement
from orchestrator.report.contests import peak_memory_bytes
from orchestrator.report.grouping import Setting, precision_rank, scalar
from orchestrator.report.ratio import Ratio, pooled, rate_of, ratio_of

#: Parameters that say how much work there is, or that do not touch speed at all.
WORK_PARAMETERS = frozenset(
    {
        "output_tokens",
        "input_tokens",
        "ignore_eos",
        "prompts",
        "keep_texts",
        "steps",
        "samples",
        "max_length",
        "learning_rate",
        "save_adapter",
        "seed",
    }
)

Technique = tuple[tuple[str, str], ...]
#: The default value of each parameter of a workload, as text; empty for an unknown workload.
Defaults = Callable[[str], Mapping[str, str]]


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


def effects_of(
    rows: Sequence[Measurement],
    settings: Mapping[str, Setting],
    defaults: Defaults = lambda workload: {},
) -> tuple[Effect, ...]:
    """Every effect that the rows show, grouped by work; within it the largest gain first."""
    groups: dict[Setting, list[Measurement]] = {}
    for row in rows:
        if row.state is State.SUCCEEDED and rate_of(row.metrics, row.measure.confidence):
            groups.setdefault(_work(settings[row.job_id]), []).append(row)
    effects = []
    for work, group in groups.items():
        told = {row.job_id: _technique(row, settings[row.job_id]) for row in group}
        usual = defaults(work.workload)
        base = baseline(list(told.values()), usual)
        found = _compared(group, told, base)
        setting = _with(work, dict(base))
        effects += [
            Effect(setting=setting, name=name, before=before, after=after, pairs=tuple(pairs))
            for (name, before, after), pairs in sorted(found.items(), key=_gain, reverse=True)
        ]
    return tuple(effects)


def baseline(seen: Sequence[Technique], defaults: Mapping[str, str]) -> Technique:
    """The settings to compare with: the workload's defaults where a row has them; else those that
    most rows differ from in one setting, so that a star of a grid is read from its centre. Ties go
    to more default values, then to the widest precision.

    Raises:
        ValueError: ``seen`` is empty.
    """
    counted = Counter(seen)
    neighbours = _neighbours(counted)

    def rank(one: Technique) -> tuple[object, ...]:
        values = dict(one)
        known = [name for name in values if name in defaults]
        usual = sum(values[name] == defaults[name] for name in known)
        all_usual = bool(known) and usual == len(known)
        precision = precision_rank(values.get("precision", ""))
        return (not all_usual, -neighbours[one], -usual, precision, one)

    return min(counted, key=rank)


def _neighbours(counted: Counter[Technique]) -> Counter[Technique]:
    """How many rows differ from each in exactly one setting: those that agree in all others."""
    alike: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()
    names = {name for one in counted for name, _ in one}
    rest = {}
    for one, rows in counted.items():
        for name in names:
            rest[one, name] = (name, frozenset(p for p in one if p[0] != name and p[1]))
            alike[rest[one, name]] += rows
    return Counter(
        {one: sum(alike[rest[one, n]] - rows for n in names) for one, rows in counted.items()}
    )


def _compared(
    rows: Iterable[Measurement], told: Mapping[str, Technique], base: Technique
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
            changes = _changes(base, told[row.job_id])
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


@cache
def workload_defaults(workload: str) -> Mapping[str, str]:
    """The default of every parameter and of engine and isolation, as text; empty if unknown."""
    from workloads.registry import WORKLOADS

    entry = WORKLOADS.get(workload)
    if entry is None:
        return {}
    fields = entry.parameters.model_fields
    known = {name: scalar(field.default) for name, field in fields.items()}
    usual = {"engine": entry.default_engine, "isolation": "warm"}
    return usual | {name: value for name, value in known.items() if name not in WORK_PARAMETERS}


def _gain(entry: tuple[object, list[Pair]]) -> float:
    return pooled([pair.ratio for pair in entry[1]]).value


def _changes(base: Technique, other: Technique) -> list[tuple[str, str, str]]:
    """Name, value before and after of every setting that differs."""
    before, after = dict(base), dict(other)
    return [
        (name, before.get(name, ""), after.get(name, ""))
        for name in sorted(before.keys() | after.keys())
        if before.get(name, "") != after.get(name, "")
    ]


def _work(setting: Setting) -> Setting:
    """The setting without anything that is a technique."""
    parameters = tuple(p for p in setting.parameters if p[0] in WORK_PARAMETERS)
    parameters = tuple(p for p in parameters if p[0] != "keep_texts")
    return replace(setting, engine="", isolation="", parameters=parameters)


def _technique(row: Measurement, setting: Setting) -> Technique:
    parameters = [p for p in setting.parameters if p[0] not in WORK_PARAMETERS]
    own = [
        ("precision", row.precision),
        ("engine", setting.engine),
        ("isolation", setting.isolation),
    ]
    return (*own, *parameters)


def _with(work: Setting, base: Mapping[str, str]) -> Setting:
    """The work done in the baseline's way; the precision is told by each effect."""
    own = ("precision", "engine", "isolation")
    parameters = [*work.parameters, *((n, v) for n, v in base.items() if n not in own)]
    return replace(
        work,
        engine=base["engine"],
        isolation=base["isolation"],
        parameters=tuple(sorted(parameters)),
    )
