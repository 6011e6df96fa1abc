"""Compare two runs of the same jobs.

Jobs match by identity, else by the settings that both runs know. Pairs that differ in what numbers
depend on (``RULES``) are refused; others get a ratio of throughputs, with Welch's interval on the
logarithm and false discovery rate control (``ratio.py``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from orchestrator.analysis.flags import (
    Raised,
    barred,
    bounded,
    league_of,
    outdated_row,
    raised_by_job,
)
from orchestrator.analysis.ratio import (
    KNOWN,
    Ratio,
    between_runs,
    rate_of,
    ratio_of,
    significant,
)
from orchestrator.analysis.selection import files_of
from orchestrator.core.job import UNANSWERED, Scalar, State
from orchestrator.core.measurement import Measurement
from orchestrator.util.format import scalar

NO_FLAGS = "none"


@dataclass(frozen=True, slots=True)
class Rule:
    """A key on which two rows of one job may differ, and the consequence."""

    key: str
    why: str
    #: Get the value from a row and its flags; None: use the row's field of this name.
    of: Callable[[Measurement, Sequence[Raised]], Scalar] | None = None
    _: KW_ONLY
    effect: Literal["blocks", "warns"] = "blocks"
    forgivable: bool = True  # whether --allow KEY turns blocking into a warning
    only: str | None = None  # required value of both rows; None: any equal values
    goes_with: str = ""  # allowing that key allows this one too
    known: bool = False  # whether it applies only where both rows have a value

    def value(self, row: Measurement, raised: Sequence[Raised]) -> str:
        """Return the key's value in a row with these flags, as text."""
        value = getattr(row, self.key) if self.of is None else self.of(row, raised)
        return "unknown" if value is None else scalar(value)


def _files(row: Measurement, _: Sequence[Raised]) -> str | None:
    known = ((kind, files_of(row, kind)) for kind in ("model", "dataset"))
    return ", ".join(f"{kind} {files}" for kind, files in known if files) or None


#: With this key allowed, jobs are matched across accelerators, too.
DEVICE = "device"
_MAY_BE_THE_CHANGE = "may be the very change that is asked about"

#: docs/statistics.md shows this table; a test keeps the two in step.
RULES = (
    Rule("emulated", "a processor's number is never a card's", forgivable=False),
    Rule(
        "throughput_unit",
        "tokens and samples are not the same thing",
        lambda row, _: row.metrics.throughput_unit,
        forgivable=False,
    ),
    Rule(DEVICE, "another card is another experiment", lambda row, _: row.device_name),
    Rule("batch_size", "a search for the largest batch may find another one"),
    Rule(
        "flags",
        "a figure that was disturbed or cannot be true proves nothing",
        lambda _, raised: (
            ", ".join(one.flag.name for one in raised)
            if barred(raised) or bounded(raised)
            else NO_FLAGS
        ),
        only=NO_FLAGS,
    ),
    Rule(
        "work_version",
        "a default has changed: equal settings mean other work",
        lambda row, _: outdated_row(row) or "as now",
        forgivable=False,
    ),
    Rule(
        "league",
        "some flagged rows compare with their like only",
        lambda row, raised: league_of(row, raised) or NO_FLAGS,
    ),
    Rule(
        "threads",
        "host threads set the speed on a processor and of data loading",
        goes_with=DEVICE,
    ),
    Rule("random_weights", "other weights may end texts at other places"),
    Rule("synthetic_data", "other data has other lengths"),
    Rule("files", "the files of the model or the dataset have changed", _files, known=True),
    Rule(
        "precision_detail",
        "the same name of a precision meant another arithmetic",
        goes_with=DEVICE,
    ),
    Rule("niceness", "a nicer process waits for others", effect="warns"),
    Rule("driver", _MAY_BE_THE_CHANGE, lambda row, _: row.driver_version, effect="warns"),
    Rule(
        "versions",
        _MAY_BE_THE_CHANGE,
        lambda row, _: ", ".join(f"{name} {at}" for name, at in sorted(row.versions.items())),
        effect="warns",
    ),
    Rule("git_commit", _MAY_BE_THE_CHANGE, effect="warns"),
    Rule(
        "nodes",
        "servers of one kind still differ a little",
        lambda row, _: ", ".join(row.nodes) or None,
        effect="warns",
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
    """Return blocking and warning differences of a job's two rows; keys in ``allow`` only warn."""
    blocking: list[Difference] = []
    warning: list[Difference] = []
    for rule in RULES:
        old, new = rule.value(before, raised[0]), rule.value(after, raised[1])
        if rule.known and "unknown" in (old, new):
            continue
        if old != new or (rule.only is not None and old != rule.only):
            forgiven = rule.forgivable and (rule.key in allow or rule.goes_with in allow)
            difference = Difference(key=rule.key, before=old, after=new)
            (blocking if rule.effect == "blocks" and not forgiven else warning).append(difference)
    if before.job_id != after.job_id and set(before.parameters) != set(after.parameters):
        old, new = _unknown_there(before, after), _unknown_there(after, before)
        warning.append(Difference(key="parameters", before=old, after=new))
    return tuple(blocking), tuple(warning)


def _unknown_there(row: Measurement, other: Measurement) -> str:
    names = sorted(set(row.parameters) - set(other.parameters))
    return ", ".join(f"{name}={row.parameters[name]}" for name in names) or "unknown"


# ---------------------------------------------------------------- two runs

NOT_COMPARED = Ratio(value=math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPair:
    """One job in both runs: compared, refused, or ended in another state."""

    before: Measurement
    after: Measurement
    ratio: Ratio = NOT_COMPARED  # the second run's throughput over the first's
    significant: bool = False  # after the guard against many comparisons
    differences: tuple[Difference, ...] = ()  # that forbid a comparison

    @property
    def broken(self) -> bool:
        """Return whether the job succeeded before and fails now; no answer is no failure."""
        worked = self.before.state is State.SUCCEEDED
        return worked and self.after.state not in (*UNANSWERED, State.SUCCEEDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Result of comparing two runs."""

    before: str
    after: str
    changes: tuple[JobPair, ...]  # significant ones first, the largest loss before all
    refused: tuple[JobPair, ...]  # with what forbids a comparison
    turned: tuple[JobPair, ...]  # ended otherwise than before, in a run at least without a number
    warnings: Mapping[tuple[str, str, str], int]  # key, value before, value after: jobs
    only_before: int
    only_after: int
    noise: float  # relative standard deviation between runs that was assumed
    noise_estimated: bool  # from the jobs' own scatter
    confidence: float

    @property
    def every(self) -> tuple[JobPair, ...]:
        """All job pairs: compared, refused and changed in state."""
        return (*self.changes, *self.refused, *self.turned)

    @property
    def overall(self) -> float | None:
        """Geometric mean of all ratios."""
        if not self.changes:
            return None
        logs = [math.log(change.ratio.value) for change in self.changes]
        return math.exp(math.fsum(logs) / len(logs))

    @property
    def slower(self) -> tuple[JobPair, ...]:
        """Significant losses, the largest first."""
        return tuple(c for c in self.changes if c.significant and c.ratio.value < 1)

    @property
    def faster(self) -> tuple[JobPair, ...]:
        """Significant gains."""
        return tuple(c for c in self.changes if c.significant and c.ratio.value > 1)

    def regressions(self, limit: float) -> tuple[JobPair, ...]:
        """Significant losses of at least ``limit`` (0.05 for five per cent)."""
        return tuple(c for c in self.slower if 1 - c.ratio.value >= limit)

    @property
    def broken(self) -> tuple[JobPair, ...]:
        """Jobs that succeeded before and fail now."""
        return tuple(pair for pair in self.turned if pair.broken)


def compare(
    before: Sequence[Measurement],
    after: Sequence[Measurement],
    *,
    flags: Sequence[Mapping[str, tuple[Raised, ...]]] = (),
    names: tuple[str, str] = ("", ""),
    confidence: float = 0.95,
    noise: float | None = None,
    allow: Collection[str] = frozenset(),
) -> RunComparison:
    """Compare the newest final rows of two runs, one per job.

    ``flags`` are those of both runs by job id (empty: they are derived here).

    ``1 - confidence`` is the false discovery rate; ``noise`` is the relative standard deviation
    between runs (None: estimated); ``allow`` names keys of ``RULES`` that warn instead of block.
    """
    shared = pairs_of(before, after, across_devices=DEVICE in allow)
    raised = flags or [raised_by_job(side) for side in zip(*shared, strict=True)] or ({}, {})
    measured, rates, refused, turned = [], [], [], []
    warnings: Counter[tuple[str, str, str]] = Counter()
    for old, new in shared:
        old_rate, new_rate = (
            rate_of(row) if row.state is State.SUCCEEDED else None for row in (old, new)
        )
        if old_rate is None or new_rate is None:
            if old.state is not new.state:
                turned.append(JobPair(before=old, after=new))
            continue
        of_pair = (raised[0].get(old.job_id, ()), raised[1].get(new.job_id, ()))
        blocking, warning = differences(old, new, allow, of_pair)
        if blocking:
            refused.append(JobPair(before=old, after=new, differences=blocking))
            continue
        warnings.update((one.key, one.before, one.after) for one in warning)
        measured.append((old, new))
        rates.append((old_rate, new_rate))
    spread, degrees = between_runs(rates)
    estimated = noise is None and degrees < KNOWN
    if noise is not None:
        spread, degrees = noise, KNOWN
    ratios = [
        ratio_of(b, a, confidence=confidence, noise=spread, noise_degrees=degrees) for a, b in rates
    ]
    verdicts = significant([ratio.p_value for ratio in ratios], 1 - confidence)
    changes = [
        JobPair(before=old, after=new, ratio=ratio, significant=verdict)
        for (old, new), ratio, verdict in zip(measured, ratios, verdicts, strict=True)
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
    """Match rows by job id, else by equal known settings, with or without the accelerator."""
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
            accelerator = "" if across_devices else row.accelerator.value
            key = (
                *(row.workload, row.model, row.dataset, accelerator, str(row.cards)),
                *(row.precision, row.batch_size_requested, row.engine, row.isolation),
                *(f"{name}={row.parameters[name]!r}" for name in sorted(common[row.workload])),
            )
            candidates.setdefault(key, ([], []))[side].append(row)
    return pairs + [(a[0], b[0]) for a, b in candidates.values() if len(a) == len(b) == 1]
