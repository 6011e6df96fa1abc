"""Two runs of the same jobs: what became slower, what faster, and what cannot be compared. Pure.

Jobs are matched by identity, which a later version's settings do not change unless they are set.
Jobs that one run alone has are matched by the settings that both runs know, where that is not
ambiguous, and the comparison says so. A pair that differs in what a number depends on is refused,
and the keys that differ are named (``RULES``: which differences block, which only warn). For the
others the ratio of throughputs is computed from the raw repeats of both runs, with Welch's interval
on the logarithm (``ratio.py``).

Two guards keep it from crying at noise. Repeats do not show what differs from one process to the
next, so the scatter of all jobs' ratios around their median, beyond what repeats explain, is taken
for the noise between runs (at least ``LEAST_NOISE``; that alone with fewer than ``ENOUGH_JOBS``).
And many jobs are many chances of an accident, so significance is Benjamini and Hochberg's: of the
changes called significant at most 1 - confidence are expected to be false.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.domain.job import State
from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags import barred, league_of, raised_on
from orchestrator.report.ratio import KNOWN, Rate, Ratio, rate_of, ratio_of
from orchestrator.results.derive import metrics_of
from workloads import registry

#: Relative standard deviation between two runs of a quiet machine; never assumed to be less.
LEAST_NOISE = 0.005
#: With fewer jobs their scatter says little, and this is assumed.
ASSUMED_NOISE = 0.02
ENOUGH_JOBS = 8

#: Text of a row without flags.
NO_FLAGS = "none"

#: Ends that say nothing of a job. One that had succeeded and ends otherwise has got worse.
_NO_ANSWER = frozenset({State.LOST, State.NOT_STARTED, State.PENDING, State.RUNNING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A key on which two rows of one job may differ, and what then follows."""

    key: str
    effect: Literal["blocks", "warns"]
    value: Callable[[Measurement], str]
    why: str
    forgivable: bool = True  # whether --allow KEY turns blocking into a warning
    only: str | None = None  # the one value that both rows must have; None: any, if it is one
    goes_with: str = ""  # a key that, where it is allowed, allows this one too


def _versions(row: Measurement) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(row.versions.items()))


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flags(row: Measurement) -> str:
    raised = raised_on(row)
    return ", ".join(one.flag.name for one in raised) if barred(raised) else NO_FLAGS


#: With this key allowed, jobs are matched across accelerators, too.
DEVICE = "device"

#: docs/compare.md shows this table; a test holds the two together.
RULES: tuple[Rule, ...] = (
    Rule(
        key="emulated",
        effect="blocks",
        value=lambda row: _text(row.emulated),
        why="a processor's number is never a card's",
        forgivable=False,
    ),
    Rule(
        key="throughput_unit",
        effect="blocks",
        value=lambda row: row.metrics.throughput_unit,
        why="tokens and samples are not the same thing",
        forgivable=False,
    ),
    Rule(
        key=DEVICE,
        effect="blocks",
        value=lambda row: _text(row.device_name),
        why="another card is another experiment",
    ),
    Rule(
        key="batch_size",
        effect="blocks",
        value=lambda row: _text(row.batch_size),
        why="a search for the largest batch may find another one",
    ),
    Rule(
        key="flags",
        effect="blocks",
        value=_flags,
        why="a figure that was disturbed or cannot be true proves nothing",
        only=NO_FLAGS,
    ),
    Rule(
        key="league",
        effect="blocks",
        value=lambda row: league_of(row, raised_on(row)) or "none",
        why="some flagged rows compare with their like only",
    ),
    Rule(
        key="threads",
        effect="blocks",
        value=lambda row: _text(row.threads),
        why="host threads set the speed on a processor and of data loading",
        goes_with=DEVICE,
    ),
    Rule(
        key="random_weights",
        effect="blocks",
        value=lambda row: _text(row.random_weights),
        why="other weights may end texts at other places",
    ),
    Rule(
        key="synthetic_data",
        effect="blocks",
        value=lambda row: _text(row.synthetic_data),
        why="other data has other lengths",
    ),
    Rule(
        key="precision_detail",
        effect="blocks",
        value=lambda row: _text(row.precision_detail),
        why="the same name of a precision meant another arithmetic",
        goes_with=DEVICE,
    ),
    Rule(
        key="niceness",
        effect="warns",
        value=lambda row: _text(row.niceness),
        why="a nicer process waits for others",
    ),
    Rule(
        key="driver",
        effect="warns",
        value=lambda row: _text(row.driver_version),
        why="may be the very change that is asked about",
    ),
    Rule(
        key="versions",
        effect="warns",
        value=_versions,
        why="may be the very change that is asked about",
    ),
    Rule(
        key="git_commit",
        effect="warns",
        value=lambda row: _text(row.git_commit),
        why="may be the very change that is asked about",
    ),
    Rule(
        key="nodes",
        effect="warns",
        value=lambda row: ", ".join(row.nodes) or "unknown",
        why="servers of one kind still differ a little",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key on which the two rows differ."""

    key: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One job that both runs measured. ``ratio`` is the second run's throughput over the first's;
    ``significant`` stands after the guard against many comparisons."""

    before: Measurement
    after: Measurement
    ratio: Ratio
    significant: bool

    @property
    def slower_by(self) -> float:
        """Loss of throughput as a share, 0.1 for ten per cent; negative for a gain."""
        return 1 - self.ratio.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """One job of both runs that may not be compared, and the keys that forbid it."""

    before: Measurement
    after: Measurement
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """One job that ended otherwise than before, in at least one run without a number."""

    before: Measurement
    after: Measurement

    @property
    def broken(self) -> bool:
        """Return whether it worked before and does not any more."""
        worked = self.before.state is State.SUCCEEDED
        return worked and self.after.state not in (_NO_ANSWER | {State.SUCCEEDED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Everything that two runs say about each other."""

    before: str
    after: str
    changes: tuple[Change, ...]  # significant ones first, the largest loss before all
    refused: tuple[Refused, ...]
    turned: tuple[Turned, ...]
    warnings: Mapping[tuple[str, str, str], int]  # key, value before, value after: jobs
    only_before: int
    only_after: int
    noise: float  # relative standard deviation between runs that was assumed
    noise_estimated: bool  # from the jobs' own scatter
    confidence: float

    @property
    def every(self) -> tuple[Change | Refused | Turned, ...]:
        """All jobs of both runs that are told of."""
        return (*self.changes, *self.refused, *self.turned)

    @property
    def overall(self) -> float | None:
        """Geometric mean of all ratios."""
        if not self.changes:
            return None
        logs = [math.log(change.ratio.value) for change in self.changes]
        return math.exp(math.fsum(logs) / len(logs))

    def regressions(self, limit: float) -> tuple[Change, ...]:
        """Significant losses of at least ``limit`` (0.05 for five per cent)."""
        return tuple(c for c in self.changes if c.significant and c.slower_by >= limit)

    @property
    def broken(self) -> tuple[Turned, ...]:
        """Jobs that worked and do not any more."""
        return tuple(turned for turned in self.turned if turned.broken)


def compare(
    before: Sequence[Measurement],
    after: Sequence[Measurement],
    *,
    names: tuple[str, str] = ("", ""),
    confidence: float = 0.95,
    noise: float | None = None,
    allow: Collection[str] = frozenset(),
) -> RunComparison:
    """Compare the newest final rows of two runs.

    Args:
        before: one row a job, with its raw samples.
        after: the same of the other run.
        names: of the runs.
        confidence: level of the intervals; 1 minus it is the share of false alarms.
        noise: relative standard deviation between runs; None estimates it.
        allow: keys of ``RULES`` that shall warn instead of block.
    """
    shared = pairs_of(before, after, across_devices=DEVICE in allow)
    measured, refused, turned = [], [], []
    warnings: dict[tuple[str, str, str], int] = {}
    for old, new in shared:
        rates = (_rate(old, confidence), _rate(new, confidence))
        if rates[0] is None or rates[1] is None:
            if old.state is not new.state:
                turned.append(Turned(before=old, after=new))
            continue
        blocking, warning = differences(old, new, allow)
        if blocking:
            refused.append(Refused(before=old, after=new, differences=blocking))
            continue
        for one in warning:
            key = (one.key, one.before, one.after)
            warnings[key] = warnings.get(key, 0) + 1
        measured.append((old, new, rates[0], rates[1]))
    spread, degrees = between_runs([(a, b) for _, _, a, b in measured])
    estimated = noise is None and degrees < KNOWN
    if noise is not None:
        spread, degrees = noise, KNOWN
    ratios = [
        ratio_of(b, a, confidence=confidence, noise=spread, noise_degrees=degrees)
        for _, _, a, b in measured
    ]
    verdicts = significant([ratio.p_value for ratio in ratios], 1 - confidence)
    changes = [
        Change(before=old, after=new, ratio=ratio, significant=verdict)
        for (old, new, _, _), ratio, verdict in zip(measured, ratios, verdicts, strict=True)
    ]
    return RunComparison(
        before=names[0],
        after=names[1],
        changes=tuple(sorted(changes, key=lambda c: (not c.significant, c.ratio.value))),
        refused=tuple(refused),
        turned=tuple(sorted(turned, key=lambda t: not t.broken)),
        warnings=warnings,
        only_before=len(before) - len(shared),
        only_after=len(after) - len(shared),
        noise=spread,
        noise_estimated=estimated,
        confidence=confidence,
    )


def pairs_of(
    before: Sequence[Measurement], after: Sequence[Measurement], *, across_devices: bool = False
) -> list[tuple[Measurement, Measurement]]:
    """Rows of the same job: of one identity, else of equal settings as far as both runs know them.

    A job of which the other run has several in that sense is left alone.

    Args:
        before: one row a job.
        after: the same of the other run.
        across_devices: leave the accelerator out of the settings, so that the same work on
            another kind of card is the same job.
    """
    second = {row.job_id: row for row in after}
    pairs = [(row, second[row.job_id]) for row in before if row.job_id in second]
    matched = {row.job_id for row, _ in pairs}
    left = [row for row in before if row.job_id not in matched]
    right = [row for row in after if row.job_id not in matched]
    common: dict[str, set[str]] = {}
    for row in (*left, *right):
        common[row.workload] = common.get(row.workload, set(row.parameters)) & set(row.parameters)
    candidates: dict[tuple[str, ...], tuple[list[Measurement], list[Measurement]]] = {}
    for side, rows in enumerate((left, right)):
        for row in rows:
            key = _settings(row, common[row.workload], across_devices)
            candidates.setdefault(key, ([], []))[side].append(row)
    return pairs + [(a[0], b[0]) for a, b in candidates.values() if len(a) == len(b) == 1]


def _settings(row: Measurement, names: set[str], across_devices: bool) -> tuple[str, ...]:
    accelerator = "" if across_devices else row.accelerator.value
    fields = (
        *(row.workload, row.model, row.dataset, accelerator, str(row.cards)),
        *(row.precision, row.batch_size_requested, row.engine, row.isolation),
    )
    return (*fields, *(f"{name}={row.parameters[name]!r}" for name in sorted(names)))


def differences(
    before: Measurement, after: Measurement, allow: Collection[str] = frozenset()
) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """Differences between two rows of one job: those that forbid a comparison, and those that are
    only worth knowing."""
    blocking: list[Difference] = []
    warning: list[Difference] = []
    for rule in RULES:
        old, new = rule.value(before), rule.value(after)
        if old != new or (rule.only is not None and old != rule.only):
            forgiven = rule.forgivable and (rule.key in allow or rule.goes_with in allow)
            found = Difference(key=rule.key, before=old, after=new)
            (blocking if rule.effect == "blocks" and not forgiven else warning).append(found)
    if before.job_id != after.job_id and set(before.parameters) != set(after.parameters):
        old, new = _unknown_there(before, after), _unknown_there(after, before)
        warning.append(Difference(key="parameters", before=old, after=new))
    return tuple(blocking), tuple(warning)


def _unknown_there(row: Measurement, other: Measurement) -> str:
    """The parameters that only ``row`` knows, with their values."""
    names = sorted(set(row.parameters) - set(other.parameters))
    return ", ".join(f"{name}={row.parameters[name]}" for name in names) or "unknown"


def between_runs(pairs: Sequence[tuple[Rate, Rate]]) -> tuple[float, float]:
    """The noise between runs that the jobs' own ratios show, and its degrees of freedom.

    The spread of the logarithms around their median (by the median of absolute deviations, which
    a few real changes do not move), less what repeats explain. A change that all jobs share moves
    the median and is not taken for noise.
    """
    told = [(math.log(b.value / a.value), a.error, b.error) for a, b in pairs]
    known = [(log, a, b) for log, a, b in told if a is not None and b is not None]
    if len(known) < ENOUGH_JOBS:
        return ASSUMED_NOISE, KNOWN
    middle = statistics.median(log for log, _, _ in known)
    spread = 1.4826 * statistics.median(abs(log - middle) for log, _, _ in known)
    within = statistics.median(a**2 + b**2 for _, a, b in known)
    noise = math.sqrt(max(0.0, spread**2 - within))
    # The median of absolute deviations has about 37 % of the normal's efficiency.
    return max(noise, LEAST_NOISE), max(1.0, 0.37 * (len(known) - 1))


def significant(p_values: Sequence[float | None], level: float) -> list[bool]:
    """Benjamini and Hochberg's step-up rule; a comparison without a p-value never is."""
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    last = max(
        (rank for rank, (p, _) in enumerate(order, 1) if p <= level * rank / len(order)), default=0
    )
    chosen = {index for _, index in order[:last]}
    return [index in chosen for index in range(len(p_values))]


def _rate(row: Measurement, confidence: float) -> Rate | None:
    """The throughput from the raw repeats; from the stored interval where there are none."""
    if row.state is not State.SUCCEEDED:
        return None
    if row.samples and row.metrics.processes == 1:
        return rate_of(
            metrics_of(
                row.samples, confidence=confidence, throughput=registry.throughput_of(row.workload)
            ),
            confidence,
        )
    return rate_of(row.metrics, row.measure.confidence)
