"""The schedule's settings, and what it knows of each job while the run lasts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from orchestrator.core.job import Job, State
from orchestrator.core.outcome import FailureClass, Purpose
from orchestrator.core.settings import Search, search_of
from orchestrator.core.topology import Card
from orchestrator.scheduling.batch_search import Trial, next_size
from orchestrator.scheduling.estimate import PRIOR_START_S, SEARCH_FACTOR, Estimate
from orchestrator.scheduling.trials import purpose_of, timed_roughly
from workloads.base import MeasureSettings

if TYPE_CHECKING:
    from orchestrator.scheduling.cards import Reservation
    from orchestrator.scheduling.queue import DurationQueue

_ANY_MEASURE = MeasureSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """Settings of a run's schedule. Times are seconds."""

    worker_start_s: float = (
        PRIOR_START_S  # first guess; the schedule learns from the workers it sees start
    )
    max_starting: int | None = None  # warm workers that may be starting at once; None: any number
    max_attempts: int = 8  # of a job in this run, over all classes of failure
    max_start_failures: int = 5  # of workers for one job, and one more a card, till it is given up
    card_failures: int = 2  # failures after which a card is quarantined
    node_failures: int = 3  # losses of a node, or failed cards of it that are also half of its
    # cards, after which all its cards are quarantined
    quarantine_s: float = 300.0  # of a card at first; twice as long each time
    card_readmissions: int = 3  # quarantines that end; the next one does not
    card_rest_s: float = 5.0  # before a card whose worker failed to start is tried again
    wait_for_nodes_s: float = 60.0  # before a job that no card set is left for is given up
    breaker_failures: int = 5  # first failures, all alike and at once, that stop the run
    breaker_within_s: float = 30.0  # how soon a failure is "at once"
    succeeded_before: bool = (
        False  # whether a job has, in this very night: the surroundings are sound
    )
    finish_running: bool = True  # after StopRequested; a second request stops them too
    urgency: float = 5.0  # a job goes before wider ones when less than so often its length is left
    work_until: float = inf  # the time of day by which the last attempt must have ended
    follow_clock: bool = True  # when the time of day is set, so is the time left; a budget stays
    stop_s: float = 30.0  # after that: for workers to end before the run counts as over
    stop_patience_s: float = 120.0  # with a worker that was told to stop and does not end
    seed: int = 0  # draws the order of replicates
    passports: bool = False  # whether the first attempt on each card begins with its passport


class Estimates(Protocol):
    """Anything that guesses durations, such as ``estimate.Estimator``."""

    def estimate(self, job: Job) -> Estimate:
        """Seconds for ``job``."""


@runtime_checkable
class LearningEstimates(Estimates, Protocol):
    """Guesses that get better while a run lasts."""

    def learn(self, job_id: str, job: Job, *, load_s: float, run_s: float) -> None:
        """A job of the grid has been measured as ``job``."""


class Phase(Enum):
    """Phase of a job on its way through the schedule."""

    HELD = "held"  # until the jobs that it needs have succeeded
    WAITING = "waiting"  # in a queue or a reservation
    BACKOFF = "backoff"  # until its retry is due
    LEASED = "leased"  # has cards; its workers are starting or it runs
    DONE = "done"  # its final row is written


@dataclass(slots=True, kw_only=True, eq=False)
class JobRecord:
    """One job of the plan and what has become of it so far."""

    job: Job
    job_id: str
    order: int  # in the plan
    estimate: Estimate
    cautious: bool = False  # reckon with the margin of the estimate: there is a deadline
    first: bool = True  # goes before those that are not: see ``pending.py``
    draw: float | None = None  # of a replicated cell: its place in the order (``replicates.py``)
    cell_cards: set[Card] = field(default_factory=set)  # of all replicates; they share the set
    number: int = 0  # of its last attempt
    phase: Phase = Phase.WAITING
    state: State | None = None  # once DONE
    failures: dict[FailureClass, int] = field(default_factory=dict)
    start_failures: int = 0
    failed_on: dict[Card | str, None] = field(default_factory=dict)  # cards, node ids; newest last
    avoided: frozenset[Card | str] = frozenset()  # the newest of these, as many as now is possible
    suspects: set[Card] = field(default_factory=set)  # blamed should it work elsewhere
    wish: Search | None = field(init=False)  # ``batch_size: max`` or ``best``
    search: dict[int, Trial] | None = None  # of such a job: the sizes tried so far
    batch_size: int = 1  # of the next attempt
    purpose: Purpose = "measure"
    queue: DurationQueue | None = None
    token: int = 0  # of its newest entry in a queue; older ones are void
    reservation: Reservation | None = None
    key: str = field(init=False)
    width: int = field(init=False)  # cards
    warm: bool = field(init=False)  # may use a worker that ran other jobs
    load_s: float = field(init=False)  # of its model, for a warm worker
    duration: float = field(init=False)  # what queues are sorted by; ``load_s`` is not in it

    def __post_init__(self) -> None:
        self.width = self.job.cards
        self.warm = not self.job.alone
        number = self.job.replicate
        self.key = self.job.residency_key + (f"|replicate {number}" if number > 1 else "")
        self.expect(self.estimate)
        self.wish = search_of(self.job.batch_size)
        if isinstance(self.job.batch_size, int):
            self.batch_size = self.job.batch_size
        elif self.wish is not None:
            self.search = {}
            self.purpose = purpose_of(self.wish.goal)
            self.batch_size = next_size({}, self.wish) or 1

    def expect(self, estimate: Estimate) -> None:
        """Reckon with this estimate from now on; not while the job waits in a queue."""
        factor = estimate.margin if self.cautious else 1.0
        self.estimate = estimate
        self.load_s = factor * estimate.load_s if self.warm else 0.0
        self.duration = factor * (estimate.run_s if self.warm else estimate.total_s)

    @property
    def cold_s(self) -> float:
        """Seconds on a worker that is up and does not hold the model."""
        return self.load_s + self.duration

    @property
    def next_s(self) -> float:
        """Seconds that its next attempt needs on a worker that is up."""
        return self.duration / SEARCH_FACTOR if self.search else self.duration

    @property
    def particular(self) -> bool:
        """Return whether it must avoid some cards, after a failure there."""
        return bool(self.avoided)

    def avoids(self, card: Card) -> bool:
        """Return whether it must not run on this card now, having failed there or on its node."""
        return card in self.avoided or card.node_id in self.avoided

    def send_elsewhere(self, what: Literal["", "card", "node"], cards: Iterable[Card]) -> None:
        """Keep its next attempts off these cards, or off their nodes, where that is possible."""
        for card in cards if what else ():
            place = card if what == "card" else card.node_id
            self.failed_on.pop(place, None)
            self.failed_on[place] = None

    def avoid_newest(self, count: int) -> None:
        """Avoid the ``count`` places where it failed last, and no others."""
        self.avoided = frozenset(list(self.failed_on)[len(self.failed_on) - count :])

    def concrete_job(self) -> Job:
        """The job as its next attempt runs it."""
        if self.search is None:
            return self.job
        job = replace(self.job, batch_size=self.batch_size)
        return timed_roughly(job, self.wish) if self.wish and self.purpose == "trial" else job


def configuration_of(job: Job) -> Job:
    """The job without its batch size, its replicate and what has no meaning: equal for those that
    out of memory at one batch size says something about."""
    return replace(job, batch_size=1, experiment="", measure=_ANY_MEASURE, replicate=1)
