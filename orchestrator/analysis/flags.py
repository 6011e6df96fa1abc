"""Flags on succeeded rows whose figure was disturbed or cannot be true.

A flagged row keeps its state and numbers, and is listed with the reason. Contention only slows, so
the throughput of a contended row is a lower bound and ranks as one; most other flags leave a row
out of rankings, fronts and baselines. Comparisons of runs have no flagged rows but those of a
league, each beside its like. Flags are derived whenever rows are read, never stored. Other packages
declare flags under the entry point group ``nightgrid.flags``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from orchestrator.analysis.plausibility import contradictions
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.util.format import plural
from workloads.base import DIVERGED, NOT_FINITE, NOTHING_LEARNED, ONE_TOKEN, OTHER_OUTPUTS
from workloads.bench.warmup import TOLERANCE
from workloads.registry import installed, outdated

if TYPE_CHECKING:
    import pyarrow as pa

#: Largest share of the timed part that may be lost to steal or waiting for a processor.
MOST_CONTENTION = 0.05
#: Fewest readings of a card whose mean utilization counts.
FEWEST_READINGS = 5
#: Seconds of its host that a kernel takes at most, from Python to the card's queue.
LAUNCH_S = 10e-6
#: Largest harmless ratio between the two speeds of a bimodal row.
MOST_APART = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A reason to keep the figure of a succeeded row apart from others."""

    name: str  # as reports and queries write it, e.g. not_steady
    description: str  # one line, for legends
    #: Return the reason, naming figure and limit; None: does not apply, or facts are missing.
    #: Called for every succeeded row of a report, so it must be cheap.
    reason: Callable[[Measurement], str | None]
    #: Return the league in which flagged rows still rank together; None: they rank nowhere.
    league: Callable[[Measurement], str] | None = None
    #: The throughput of flagged rows is a lower bound, and their times are upper bounds.
    bounds: bool = False

    @property
    def ranks(self) -> str:
        """Place of rows with this flag in rankings, for legends."""
        if self.bounds:
            return "as lower bounds"
        return "nowhere" if self.league is None else "among their like"


@dataclass(frozen=True, slots=True)
class Raised:
    """A flag that applies to a row, with the reason."""

    flag: Flag
    reason: str

    def __str__(self) -> str:
        return f"{self.flag.name}: {self.reason}"


def _compiled(row: Measurement) -> str | None:
    if not row.timed_compilations:
        return None
    verb = "was" if row.timed_compilations == 1 else "were"
    again = " once more" if (row.timed_parts or 1) > 1 else ""
    graphs = plural(row.timed_compilations, "graph")
    return f"{graphs} {verb} compiled while it was timed{again}; a steady row compiles none"


def _contention(row: Measurement) -> str | None:
    waited, stolen = _waited(row), row.stolen_share or 0.0
    lost, absorbed = waited + _stolen(row), _absorbed(row)
    if not lost - absorbed > MOST_CONTENTION:
        return None
    parts, limit = [], f"{MOST_CONTENTION:.0%} together"
    threads = _threads(row)
    if waited >= 0.005:
        most = MOST_CONTENTION / threads
        who, end = (f"its {threads} busy threads", " each") if threads > 1 else ("it", "")
        share = _beyond(waited / threads, most)
        parts.append(f"{who} waited for a processor for {share} of its timed part{end}")
        limit = f"{100 * most:.2g}%"
    if stolen >= 0.005:
        share = _beyond(stolen, MOST_CONTENTION)
        parts.append(f"{share} of the host's processor time was stolen")
        limit = f"{MOST_CONTENTION:.0%}" + " together" * (len(parts) > 1)
    waits = " (its card waited for its host)" if absorbed else ""
    return f"{' and '.join(parts)}{waits}; the most is {limit}"


def _waited(row: Measurement) -> float:
    """Return the waits of all computing threads over the timed part, above 1 if many waited."""
    # More threads than cores wait for each other; another flag reports that.
    return 0.0 if row.oversubscribed else row.processor_wait_share or 0.0


def _stolen(row: Measurement) -> float:
    # Time stolen by a hypervisor is lost to a process only while it runs.
    return (row.stolen_share or 0.0) * min(1.0, row.processor_cores or 0.0)


def _threads(row: Measurement) -> int:
    """Return the number of threads that were at work, or wanted to be."""
    waited = _waited(row)
    return max(1, math.ceil(waited), round(waited + (row.processor_cores or 0.0)))


def kept_share(row: Measurement) -> float:
    """Return the least share of a row's timed part (0 to 1) that it would need without others.
    Waits of its threads hold each other up, so they are added up; but what ran must run."""
    lost = _waited(row) + _stolen(row)
    ran = (row.processor_cores or 0.0) / _threads(row)
    return min(1.0, max(1.0 - lost, ran))


def _absorbed(row: Measurement) -> float:
    """Return the share of the timed part that its host may lose without holding up the card.

    A card that always had work did not wait. Without readings of its utilization the launches of a
    profiled step tell how much of the step its host needs.
    """
    if row.emulated or row.accelerator.spec.host:
        return 0.0
    busy = _number(row.details.get("utilization_percent_mean"))
    if busy is not None and (_number(row.details.get("card_readings")) or 0) >= FEWEST_READINGS:
        # At most the card's idle time was lost, whatever its host lost.
        return max(0.0, _waited(row) + _stolen(row) - (1 - busy / 100))
    kernels = re.match(r"([\d.]+) kernels", row.details.get("profile_launches", ""))
    step_ms = re.search(r"([\d.]+) ms each of kernels", row.details.get("profile", ""))
    if kernels is None or step_ms is None or not float(step_ms[1]):
        return 0.0
    return max(0.0, 1 - float(kernels[1]) * LAUNCH_S / (float(step_ms[1]) / 1000))


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _beyond(share: float, limit: float) -> str:
    """Format a share as per cent, with as many digits as tell it from the limit."""
    for digits in range(6):
        text = f"{share:.{digits}%}"
        if text != f"{limit:.{digits}%}":
            break
    return text


def _incomplete(row: Measurement) -> str | None:
    if row.metrics.repeats or row.metrics.throughput is None:
        return None
    return f"no repeat was completed within {row.measure.time_limit_s:g} s"


def _not_steady(row: Measurement) -> str | None:
    if row.warmup_end == "limit":
        missed = row.shapes and row.shapes_unmet
        unmet = f" before {row.shapes_unmet} of {row.shapes} shapes were met" if missed else ""
        return f"its warm-up was cut by warmup_limit_s ({row.measure.warmup_limit_s:g} s){unmet}"
    drift = row.metrics.drift
    if drift is None or abs(drift) <= TOLERANCE:
        return None
    how = (
        f"a slow beginning makes the timed part {_beyond(drift, TOLERANCE)} slower"
        if drift > 0
        else f"its steps became slower, by {-2 * drift:.0%} from the first half to the second"
    )
    return f"{how}; at most {TOLERANCE:.0%} is steady"


def _oversubscribed(row: Measurement) -> str | None:
    if not row.oversubscribed:
        return None
    threads = f" of {plural(row.threads, 'thread')}" if row.threads else ""
    cores = f" on a host of {plural(row.host_cores, 'core')}" if row.host_cores else ""
    many = plural(row.cards, "process", "processes")
    return f"{many}{threads}{cores}: threads waited for each other"


def _bimodal(row: Measurement) -> str | None:
    ratio = row.metrics.hump_ratio
    if ratio is None or ratio <= MOST_APART:
        return None
    return f"its repeats are of two speeds, one {ratio:.2f} times the other"


def outdated_row(row: Measurement) -> str:
    """Return how a row's work differs from that of its settings now; "" if it does not."""
    return outdated(row.workload, row.engine, row.parameters, row.work_version)


def _client_bound(row: Measurement) -> str | None:
    if not row.reported("client_bound"):
        return None
    names = ("client_cpu_share", "client_lag_s", "client_late_s")
    cpu, lag, late = (row.reported(name) or 0.0 for name in names)
    return (
        f"its load generator used {cpu:.0%} of a core, its event loop was {lag * 1e3:.1f} ms late "
        f"and it sent {late * 1e3:.1f} ms late (90th percentiles)"
    )


def _detail(name: str, description: str) -> Flag:
    """Return the flag of rows whose worker gave a reason under a detail of this name."""
    return Flag(name=name, description=description, reason=lambda row: row.details.get(name))


IMPLAUSIBLE = Flag(
    name="suspect",
    description="Its figures cannot be true: they exceed what the card can do, or contradict each "
    "other.",
    reason=lambda row: None,  # computed for many rows at once, see ``raised_on``
)

OWN = (
    Flag(
        name="client_bound",
        description="Its load generator was too slow, so the figures are not the server's.",
        reason=_client_bound,
    ),
    Flag(
        name="compiled_in_timed_part",
        description="Graphs were compiled while it was timed, which is no speed of the model.",
        reason=_compiled,
    ),
    Flag(
        name="disturbed",
        description="Something else had the processors while its process wanted to run, or the "
        "hypervisor did.",
        reason=_contention,
        bounds=True,
    ),
    _detail(DIVERGED, "Its training diverged: a loss that is no number, or far above the first."),
    Flag(
        name="incomplete",
        description="No repeat was completed in time: its rate is of some batches, without an "
        "interval.",
        reason=_incomplete,
    ),
    _detail(NOT_FINITE, "Its model computed infinities or no numbers: not the work that is timed."),
    Flag(
        name="not_steady",
        description="It was timed before its warm-up was over, or while its steps drifted.",
        reason=_not_steady,
    ),
    _detail(NOTHING_LEARNED, "Its training learned nothing, since no token had a label."),
    Flag(
        name="older_work",
        description="A default has changed since: the same settings mean other work now.",
        reason=lambda row: outdated_row(row) or None,
        league=outdated_row,
    ),
    _detail(ONE_TOKEN, "Each of its texts is one token repeated, and the plain path's are not."),
    _detail(OTHER_OUTPUTS, "Its outputs are far from the plain path's: other work than is timed."),
    Flag(
        name="oversubscribed",
        description="Its processes had more threads than their host has cores.",
        reason=_oversubscribed,
        league=lambda row: f"oversubscribed, {row.cards} cards",
    ),
    IMPLAUSIBLE,
    Flag(
        name="two_humped",
        description="Its repeats are of two speeds (SigClust's cluster index at 1 %, and more than "
        "5 % apart), so that its mean is a speed that hardly a repeat had.",
        reason=_bimodal,
    ),
)


#: Flags of figures that are none of the setting's.
FALSE = frozenset(
    {IMPLAUSIBLE.name, NOT_FINITE, DIVERGED, NOTHING_LEARNED, ONE_TOKEN, OTHER_OUTPUTS}
)

#: Flags that the same job raises again: a repeat cannot clear them.
LASTING = FALSE | {"oversubscribed"}


@cache
def every_flag() -> tuple[Flag, ...]:
    """Return all flags, those of other packages last."""
    own = {flag.name for flag in OWN}
    others = installed("nightgrid.flags", Flag)
    return (*OWN, *(flag for name, flag in others.items() if name not in own))


def raised_on(
    rows: Sequence[Measurement], raw: pa.RecordBatch | None = None
) -> list[tuple[Raised, ...]]:
    """Return the flags of each row; ``raw`` has samples and items of rows without them."""
    raised: list[tuple[Raised, ...]] = []
    for row, impossible in zip(rows, contradictions(rows, raw), strict=True):
        flags = every_flag() if row.state is State.SUCCEEDED else ()
        more = f"; and {len(impossible) - 1} more" if len(impossible) > 1 else ""
        why = f"{impossible[0]}{more}" if impossible else None
        reasons = ((flag, why if flag is IMPLAUSIBLE else flag.reason(row)) for flag in flags)
        raised.append(tuple(Raised(flag, reason) for flag, reason in reasons if reason))
    return raised


def raised_by_job(
    rows: Sequence[Measurement],
    raw: Iterable[tuple[Sequence[Measurement], pa.RecordBatch]] = (),
) -> dict[str, tuple[Raised, ...]]:
    """Return the flags by job id; ``raw`` has samples and items of rows without them."""
    flags: dict[str, tuple[Raised, ...]] = {}
    for batch, columns in raw:
        flags |= zip((row.job_id for row in batch), raised_on(batch, columns), strict=True)
    others = [row for row in rows if row.job_id not in flags]
    flags |= zip((row.job_id for row in others), raised_on(others), strict=True)
    return {row.job_id: raised for row in rows if (raised := flags[row.job_id])}


def barred(raised: Iterable[Raised]) -> bool:
    """Return whether a row with these flags ranks nowhere."""
    return any(one.flag.league is None and not one.flag.bounds for one in raised)


def bounded(raised: Iterable[Raised]) -> bool:
    """Return whether the throughput of a row with these flags is a lower bound."""
    return any(one.flag.bounds for one in raised)


def bounds_of(raised: Mapping[str, tuple[Raised, ...]]) -> frozenset[str]:
    """Return the job ids of the rows that rank as lower bounds, given the flags by job id."""
    return frozenset(job for job, own in raised.items() if bounded(own) and not barred(own))


def ranked(
    rows: Sequence[Measurement], raised: Mapping[str, tuple[Raised, ...]]
) -> tuple[Measurement, ...]:
    """Return the rows that may be ranked, if only within a league."""
    return tuple(row for row in rows if not barred(raised.get(row.job_id, ())))


def league_of(row: Measurement, raised: Iterable[Raised]) -> str:
    """Return the row's league, "" for most; rows rank only within their league."""
    leagues = (one.flag.league(row) for one in raised if one.flag.league is not None)
    return ", ".join(dict.fromkeys(leagues))
