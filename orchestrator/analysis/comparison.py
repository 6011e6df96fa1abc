"""Comparison of two runs of the same jobs: what became slower, faster, or cannot be compared.

Jobs are matched by identity, which a later version's settings do not change unless they are set.
Jobs that one run alone has are matched by the settings that both runs know, where that is not
ambiguous, and the comparison says so. A pair that differs in what a number depends on is refused
(``RULES``), and the keys that differ are named. For the others the ratio of throughputs is computed
from the raw repeats of both runs, with Welch's interval on the logarithm; of the changes called
significant at most 1 - confidence are expected to be false (``ratio.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.analysis.flags import Raised, barred, league_of, raised_by_job
from orchestrator.analysis.ratio import (
    KNOWN,
    Rate,
    Ratio,
    between_runs,
    rate_of,
    rate_of_metrics,
    ratio_of,
    significant,
)
from orchestrator.analysis.samples import metrics_of
from orchestrator.core.job import Scalar, State
from orchestrator.core.measurement import Measurement
from orchestrator.util.format import scalar
from workloads import registry

#: Text of a row without flags.
NO_FLAGS = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A key on which two rows of one job may differ, and what then follows."""

    key: str
    effect: Literal["blocks", "warns"]
    why: str
    #: The value in a row with these flags; None: the row's field of this name.
    of: Callable[[Measurement, Sequence[Raised]], Scalar] | None = None
    forgivable: bool = True  # whether --allow KEY turns blocking into a warning
    only: str | None = None  # the one value that both rows must have; None: any, if it is one
    goes_with: str = ""  # a key that, where it is allowed, allows this one too

    def value(self, row: Measurement, raised: Sequence[Raised]) -> str:
        """The value of this key in a row with these flags, as text."""
        return _text(getattr(row, self.key) if self.of is None else self.of(row, raised))


def _versions(row: Measurement, _: Sequence[Raised]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(row.versions.items()))


def _text(value: Scalar) -> str:
    return "unknown" if value is None else scalar(value)


def _flags(_: Measurement, raised: Sequence[Raised]) -> str:
    return ", ".join(one.flag.name for one in raised) if barred(raised) else NO_FLAGS


#: With this key allowed, jobs are matched across accelerators, too.
DEVICE = "device"

#: docs/statistics.md shows this table; a test holds the two together.
RULES: tuple[Rule, ...] = (
    Rule(
        key="emulated",
        effect="blocks",
        why="a processor's number is never a card's",
        forgivable=False,
    ),
    Rule(
        key="throughput_unit",
        effect="blocks",
        of=lambda row, _: row.metrics.throughput_unit,
        why="tokens and samples are not the same thing",
        forgivable=False,
    ),
    Rule(
        key=DEVICE,
        effect="blocks",
        of=lambda row, _: row.device_name,
        why="another card is another experiment",
    ),
    Rule(
        key="batch_size",
        effect="blocks",
        why="a search for the largest batch may find another one",
    ),
    Rule(
        key="flags",
        effect="blocks",
        of=_flags,
        why="a figure that was disturbed or cannot be true proves nothing",
        only=NO_FLAGS,
    ),
    Rule(
        key="league",
        effect="blocks",
        of=lambda row, raised: league_of(row, raised) or NO_FLAGS,
        why="some flagged rows compare with their like only",
    ),
    Rule(
        key="threads",
        effect="blocks",
        why="host threads set the speed on a processor and of data loading",
        goes_with=DEVICE,
    ),
    Rule(
        key="random_weights",
        effect="blocks",
        why="other weights may end texts at other places",
    ),
    Rule(
        key="synthetic_data",
        effect="blocks",
        why="other data has other lengths",
    ),
    Rule(
        key="precision_detail",
        effect="blocks",
        why="the same name of a precision meant another arithmetic",
        goes_with=DEVICE,
    ),
    Rule(
        key="niceness",
        effect="warns",
        why="a nicer process waits for others",
    ),
    Rule(
        key="driver",
        effect="warns",
        of=lambda row, _: row.driver_version,
        why="may be the very change that is asked about",
    ),
    Rule(
        key="versions",
        effect="warns",
        of=_versions,
        why="may be the very change that is asked about",
    ),
    Rule(
        key="git_commit",
        effect="warns",
        why="may be the very change that is asked about",
    ),
    Rule(
        key="nodes",
        effect="warns",
        of=lambda row, _: ", ".join(row.nodes) or None,
        why="servers of one kind still differ a little",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key on which the two rows differ."""

    key: str
    before: str
    after: str


def differences(
    before: Measurement,
    after: Measurement,
    allow: Collection[str] = frozenset(),
    raised: tuple[Sequence[Raised], Sequence[Raised]] = ((), ()),
) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """Differences between two rows of one job: those that forbid a comparison, and those that are
    only worth knowing.

    Args:
        before: the row of the first run.
        after: that of the second.
        allow: keys that warn instead of block.
        raised: the flags of both rows.
    """
    blocking: list[Difference] = []
    warning: list[Difference] = []
    for rule in RULES:
        old, new = rule.value(before, raised[0]), rule.value(after, raised[1])
        if old != new or (rule.only is not None and old != rule.only):
            forgiven = rule.forgivable and (rule.key in allow or rule.goes_with in allow)
            difference = Difference(key=rule.key, before=old, after=new)
            (blocking if rule.effect == "blocks" and not forgiven else warning).append(difference)
    if before.job_id != after.job_id and set(before.parameters) != set(after.parameters):
        old, new = _unknown_there(before, after), _unknown_there(after, before)
        warning.append(Difference(key="parameters", before=old, after=new))
    return tuple(blocking), tuple(warning)


def _unknown_there(row: Measurement, other: Measurement) -> str:
    """The parameters that only ``row`` knows, with their values."""
    names = sorted(set(row.parameters) - set(other.parameters))
    return ", ".join(f"{name}={row.parameters[name]}" for name in names) or "unknown"


# ---------------------------------------------------------------- two runs

#: Ends that say nothing of a job. One that had succeeded and ends otherwise has got worse.
_NO_ANSWER = frozenset({State.LOST, State.NOT_STARTED, State.PENDING, State.RUNNING})


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
    raised = [raised_by_job(side) for side in zip(*shared, strict=True)] or [{}, {}]
    measured, refused, turned = [], [], []
    warnings: dict[tuple[str, str, str], int] = {}
    for old, new in shared:
        rates = (_rate(old, confidence), _rate(new, confidence))
        if rates[0] is None or rates[1] is None:
            if old.state is not new.state:
                turned.append(Turned(before=old, after=new))
            continue
        flags = (raised[0].get(old.job_id, ()), raised[1].get(new.job_id, ()))
        blocking, warning = differences(old, new, allow, flags)
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


def _rate(row: Measurement, confidence: float) -> Rate | None:
    """The throughput from the raw repeats; from the stored interval where there are none."""
    if row.state is not State.SUCCEEDED:
        return None
    if row.samples and row.metrics.processes == 1:
        return rate_of_metrics(
            metrics_of(
                row.samples, confidence=confidence, throughput=registry.throughput_of(row.workload)
            ),
            confidence,
        )
    return rate_of(row)
