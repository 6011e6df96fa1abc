"""Chance in simulated runs: faults, scattered durations, and results of attempts.

All is drawn from one seeded generator, so a seed replays exactly. Throughput has one peak over the
batch size, which differs between jobs; memory is linear and meets the card's limit where batches
cease to fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import exp, log2
from random import Random

from orchestrator.core.events import RecordRow
from orchestrator.core.job import Job, State
from orchestrator.core.outcome import (
    Attempt,
    Failure,
    FailureClass,
    Outcome,
    RankOutcome,
    WorkerInfo,
)
from orchestrator.core.topology import Card, Node
from workloads.base import Result, whole_sample

_FIXED, _LIMIT = 2 * 10**9, 10**11  # bytes: of the weights, and of a card
_REPEATS = 3


def simulated_result(job: Job, fits_up_to: int | None, noise: float, random: Random) -> Result:
    """Result of an attempt, with this much noise in its throughput."""
    assert isinstance(job.batch_size, int)
    rate = true_rate(job)
    samples = tuple(
        whole_sample(
            repeat=repeat,
            wall_s=job.batch_size / (rate * exp(random.gauss(0.0, noise))),
            cpu_s=0.0,
            items=job.batch_size,
            input_tokens=job.batch_size,
            output_tokens=job.batch_size,
            computed_tokens=job.batch_size,
        )
        for repeat in range(_REPEATS)
    )
    per_item = (_LIMIT - _FIXED) / ((fits_up_to or 4096) + 0.5)
    return Result(
        samples=samples,
        stop_reason="max_repeats",
        peak_device_memory_bytes=int(_FIXED + per_item * job.batch_size),
        details={"card_memory_bytes": str(_LIMIT)},
    )


def true_rate(job: Job) -> float:
    """Throughput of a job without noise: one peak, between batch sizes 4 and 512."""
    assert isinstance(job.batch_size, int)
    work = (job.workload, job.model, job.dataset, job.precision, job.parameters)
    peak = Random(repr(work)).uniform(2.0, 9.0)
    away = log2(job.batch_size) - peak
    return 1000.0 * exp(-0.1 * away * away)


def outcome_of(
    attempt_id: str,
    state: State,
    width: int,
    started_at: float,
    ended_at: float,
    failure: Failure | None = None,
    failed_rank: int = 0,
) -> Outcome:
    """Outcome of an attempt on ``width`` cards, times in seconds; a failed gang has only the rank
    that failed, as when the others are killed."""
    ranks = range(width) if failure is None else [failed_rank]
    return Outcome(
        attempt_id=attempt_id,
        state=state,
        failure=failure,
        ranks=tuple(
            RankOutcome(
                rank=rank, state=state, started_at=started_at, ended_at=ended_at, failure=failure
            )
            for rank in ranks
        ),
    )


WORKER_INFO = WorkerInfo(
    worker_id="simulated",
    node_name="simulated",
    pid=0,
    device_name="simulated",
    driver_version="",
    emulated=True,
    visible_cards="",
    threads=1,
    niceness=0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Rates of faults: probabilities per attempt, start or job."""

    crash: float = 0.0  # the process of one rank dies within an attempt
    hang: float = 0.0  # an attempt stands still until the watchdog ends it
    error: float = 0.0  # an exception
    start_failure: float = 0.0  # a worker does not come up
    poison: float = 0.0  # a job that crashes wherever it runs
    bad_cards: float = 0.0  # a card on which no worker ever comes up
    node_losses: tuple[float, ...] = ()  # when a node goes, seconds
    rejoin_after_s: float | None = None  # until a lost node is back, as a new one
    no_start: float = 0.0  # a worker neither comes up nor fails, until the watchdog stops it
    stuck: float = 0.0  # a stopped process does not end
    stuck_s: float | None = 600.0  # until it ends after all; None: never
    late_results: bool = False  # a lost node had only frozen: its results come afterwards
    fits_up_to: int | None = None  # largest batch size that does
    flagged: float = 0.0  # a row that something disturbed

    @classmethod
    def at_rate(cls, rate: float, *, node_losses: tuple[float, ...] = ()) -> Faults:
        """All faults at about one rate; lost nodes come back after ten minutes."""
        return cls(
            crash=rate,
            hang=rate / 4,
            error=rate / 2,
            start_failure=rate,
            poison=rate / 10,
            bad_cards=rate / 4,
            node_losses=node_losses,
            rejoin_after_s=600.0,
            late_results=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """The virtual cluster's behaviour. Times are seconds."""

    seed: int = 0
    start_s: float = 8.0  # of a worker, at least
    stop_s: float = 0.5
    watchdog_s: float = 900.0  # until a worker that does not come up is overdue
    noise: float = 0.1  # sigma of the lognormal factor on each duration
    faults: Faults = field(default_factory=Faults)
    joins: tuple[tuple[float, Node], ...] = ()  # nodes that come later
    gather_s: float = 0.0  # events within so long are handed over together; 0: one by one
    max_events: int | None = None  # fail beyond this: the run does not end


class Chance:
    """Draws what happens in a simulated run, and counts the faults."""

    def __init__(self, settings: SimulationSettings) -> None:
        self.random = Random(settings.seed)
        self.faults = 0  # that have happened
        self._settings = settings

    def scatter(self) -> float:
        """Draw the ratio of a duration to its estimate."""
        noise = self._settings.noise
        return exp(self.random.gauss(0.0, noise)) if noise else 1.0

    def happens(self, rate: float) -> bool:
        """Draw one fault; a rate of 0 draws nothing."""
        happens = rate > 0 and self.random.random() < rate
        self.faults += happens
        return happens

    def bad_ones(self, cards: Iterable[Card]) -> set[Card]:
        """Draw the cards on which no worker will ever come up."""
        return {card for card in cards if self.random.random() < self._settings.faults.bad_cards}

    def start_fails(self, *, bad: bool) -> bool:
        """Draw whether a worker fails to come up; on a bad card it always does."""
        fails = bad or self.random.random() < self._settings.faults.start_failure
        self.faults += fails
        return fails

    def flags(self, row: RecordRow) -> str:
        """Draw whether a row was disturbed (``FlagJudge``)."""
        rate = self._settings.faults.flagged
        return "disturbed" if rate and self.random.random() < rate else ""

    def replaces(self, row: RecordRow) -> bool:
        """Draw whether a repeat is better than the row before it."""
        return not self.flags(row)

    def in_order(self, job_ids: Collection[str]) -> list[str]:
        """Sort flagged jobs by id."""
        return sorted(job_ids)

    def result(self, job: Job) -> Result:
        """Draw the result of an attempt that succeeded."""
        noise = self._settings.noise / 10
        return simulated_result(job, self._settings.faults.fits_up_to, noise, self.random)

    def fate(self, attempt: Attempt) -> tuple[State, Failure | None, float]:
        """Draw the state and failure of an attempt, and the share of its time that it ran."""
        faults, job = self._settings.faults, attempt.job
        if faults.fits_up_to is not None and int(job.batch_size) > faults.fits_up_to:
            failure = Failure(FailureClass.OUT_OF_MEMORY, "simulated")
            return State.OUT_OF_MEMORY, failure, 0.3
        poisoned = faults.poison and Random(f"{self._settings.seed}{attempt.job_id}")
        if poisoned and poisoned.random() < faults.poison:
            return self._failed(FailureClass.CRASH, State.FAILED, 0.5)
        luck = self.random.random()
        for share, failure_class, state, factor in (
            (faults.crash, FailureClass.CRASH, State.FAILED, 0.5),
            (faults.hang, FailureClass.HANG, State.TIMED_OUT, 3.0),
            (faults.error, FailureClass.ERROR, State.FAILED, 0.2),
        ):
            if luck < share:
                return self._failed(failure_class, state, factor)
            luck -= share
        return State.SUCCEEDED, None, 1.0

    def _failed(
        self, failure_class: FailureClass, state: State, factor: float
    ) -> tuple[State, Failure, float]:
        self.faults += 1
        return state, Failure(failure_class, "simulated"), factor
