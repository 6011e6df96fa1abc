"""Settings, jobs, cards and workers as the schedule knows them.

A card is *leased* while an attempt has it, *reserved* while it is drained for a gang, and *open*
otherwise: vacant, or with a worker that is idle, starting or stopping. A gang may get any open
card, since it brings its own processes and waits for the old ones to go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from orchestrator.core.job import Job, State
from orchestrator.core.outcome import Attempt, FailureClass, Purpose
from orchestrator.core.settings import Search, search_of
from orchestrator.core.topology import Card, Node, legal_groups
from orchestrator.scheduler.batch_size import Trial, next_size, purpose_of, timed_roughly
from orchestrator.scheduler.estimator import PRIOR_START_S, SEARCH_FACTOR, Estimate

if TYPE_CHECKING:
    from orchestrator.scheduler.pool import Pool
    from orchestrator.scheduler.queues import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """Settings of a run's schedule. Times are seconds."""

    worker_start_s: float = PRIOR_START_S  # at first; the schedule learns from those it sees start
    max_attempts: int = 8  # of a job in this run, over all classes of failure
    max_start_failures: int = 5  # of workers for one job, and one more a card, till it is given up
    card_failures: int = 2  # starts without a success in between after which a card is quarantined
    card_job_failures: float = 3  # the same for jobs, less what its successes make up for
    node_failures: int = 3  # losses of a node, or failed cards (and half of all), to quarantine it
    quarantine_s: float = 300.0  # of a card at first; twice as long each time
    card_readmissions: int = 3  # quarantines that end; the next one does not
    card_rest_s: float = 5.0  # before a card whose worker failed to start is tried again
    wait_for_nodes_s: float = 900.0  # before jobs without a card set are given up; servers reboot
    breaker_failures: int = 5  # first failures, all alike and at once, that stop the run
    breaker_within_s: float = 30.0  # how soon a failure is "at once"
    succeeded_before: bool = False  # whether a job has, this very night: the surroundings are sound
    finish_running: bool = True  # after StopRequested; a second request stops them too
    work_until: float = inf  # the time of day by which the last attempt must have ended
    follow_clock: bool = True  # when the time of day is set, so is the time left; a budget stays
    stop_s: float = 30.0  # after that: for workers to end before the run counts as over
    stop_patience_s: float = 120.0  # longest wait for a stopped worker to end
    seed: int = 0  # draws the order of replicates
    check_cards: bool = False  # whether the first attempt on each card begins with its check


class Estimates(Protocol):
    """Estimates durations, such as ``estimator.Estimator``."""

    def estimate(self, job: Job) -> Estimate:
        """Seconds for ``job``."""


@runtime_checkable
class LearningEstimates(Estimates, Protocol):
    """Estimates that learn during a run."""

    def learn(self, job_id: str, job: Job, *, load_s: float, run_s: float) -> None:
        """Learn from a job of the grid, measured as ``job``."""


class Phase(Enum):
    """Phase of a job in the schedule."""

    HELD = "held"  # until the jobs that it needs have succeeded
    WAITING = "waiting"  # in a queue or a reservation
    BACKOFF = "backoff"  # until its retry is due
    LEASED = "leased"  # has cards; its workers are starting or it runs
    DONE = "done"  # its final row is written


@dataclass(slots=True, kw_only=True, eq=False)
class JobState:
    """State of one job of the plan."""

    job: Job
    job_id: str
    order: int  # in the plan
    estimate: Estimate
    cautious: bool = False  # reckon with the margin of the estimate: there is a deadline
    first: bool = True  # goes before those that are not: see ``queues.py``
    draw: float | None = None  # of a replicated cell: its place (``planning/forecast.py``)
    cell_cards: set[Card] = field(default_factory=set)  # of all replicates; they share the set
    number: int = 0  # of its last attempt
    phase: Phase = Phase.WAITING
    state: State | None = None  # of its first final row, once there is one
    repeats: int = 0  # of its measurement, since its row was flagged (``repeats.py``)
    failures: dict[FailureClass, int] = field(default_factory=dict)
    start_failures: int = 0
    failed_on: dict[Card | str, None] = field(default_factory=dict)  # cards, node ids; newest last
    avoided: frozenset[Card | str] = frozenset()  # the newest of these, as many as now is possible
    suspects: set[Card] = field(default_factory=set)  # blamed should it work elsewhere
    accused: dict[Card, FailureClass] = field(default_factory=dict)  # quarantined at once for it
    wish: Search | None = field(init=False)  # ``batch_size: max`` or ``best``
    search: dict[int, Trial] | None = None  # of such a job: the sizes tried so far
    batch_size: int = 1  # of the next attempt
    purpose: Purpose = "measure"
    reservation: Reservation | None = None
    lease: Lease | None = None
    pool: Pool = field(init=False)  # of the cards that it wants
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
        """Set the estimate; not while the job is in a queue."""
        factor = estimate.margin if self.cautious else 1.0
        self.estimate = estimate
        self.load_s = factor * estimate.load_s if self.warm else 0.0
        self.duration = factor * (estimate.run_s if self.warm else estimate.total_s)

    @property
    def running(self) -> bool:
        """Return whether an attempt at it runs."""
        return self.lease is not None and self.lease.running

    @property
    def repeating(self) -> bool:
        """Return whether it is measured once more: it has its final row and is not done."""
        return self.state is not None and self.phase is not Phase.DONE

    @property
    def cold_s(self) -> float:
        """Seconds on a running worker without the model."""
        return self.load_s + self.duration

    @property
    def next_s(self) -> float:
        """Seconds of its next attempt on a running worker."""
        return self.duration / SEARCH_FACTOR if self.search else self.duration

    def avoids(self, card: Card) -> bool:
        """Return whether it avoids this card now, after a failure there or on its node."""
        return not self.avoided.isdisjoint((card, card.node_id))

    def send_elsewhere(self, what: Literal["", "card", "node"], cards: Iterable[Card]) -> None:
        """Avoid these cards, or their nodes, in its next attempts if possible."""
        for card in cards if what else ():
            place = card if what == "card" else card.node_id
            self.failed_on.pop(place, None)
            self.failed_on[place] = None

    def concrete_job(self) -> Job:
        """The job as its next attempt runs it."""
        if self.search is None:
            return self.job
        job = replace(self.job, batch_size=self.batch_size)
        return timed_roughly(job, self.wish) if self.wish and self.purpose == "trial" else job


class WorkerState(Enum):
    """State of a worker process. A card without a worker is in a fifth state."""

    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    STOPPING = "stopping"


@dataclass(slots=True, eq=False, kw_only=True)
class Worker:
    """One process on one card."""

    worker_id: str
    slot: Slot
    state: WorkerState
    started_at: float  # time of its ``StartWorker``
    for_lease: bool  # started for one attempt, not for whatever comes
    key: str | None = None  # the residency key of what it ran last; None: it has run nothing
    replicate: int | None = None  # that it serves, once it has run something
    spoiled: bool = False  # has survived an out-of-memory: good for probes only
    overdue: str = ""  # why it was stopped, if it hung
    abandoned: bool = False  # did not stop in time; no longer waited for
    bucket: Bucket | None = None  # whose jobs it serves

    @property
    def fresh(self) -> bool:
        """Return whether it is up and has run nothing yet, as a new one."""
        return self.state is WorkerState.IDLE and self.key is None

    @property
    def lease(self) -> Lease | None:
        """The lease of its card."""
        return self.slot.lease

    @property
    def pool(self) -> Pool:
        """The pool of its card."""
        return self.slot.server.pool


@dataclass(slots=True, eq=False, kw_only=True)
class Reservation:
    """A card set that is being drained for a gang."""

    record: JobState
    slots: tuple[Slot, ...]
    start_by: float  # when it should be free; what runs there meanwhile must have ended


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """Lease of a card set to one attempt."""

    record: JobState
    attempt: Attempt
    slots: SlotSet  # in rank order
    lasts_s: float  # estimated, once it runs
    ends_at: float  # estimated
    ready: dict[int, Worker] = field(default_factory=dict)  # by rank
    began_at: float | None = None  # time of its ``RunAttempt``
    checks_cards: bool = False  # before its attempt
    queued: bool = False  # its attempt was stopped while it waited for a CPU slot

    @property
    def running(self) -> bool:
        """Return whether its attempt runs; until then its workers are gathered."""
        return self.began_at is not None


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """A card with its lease, worker and reservation."""

    card: Card
    name: str  # as people know it, e.g. ``hpu-1/HPU3``: Ray's ids of nodes say nothing
    server: Server
    order: int
    worker: Worker | None = None
    lease: Lease | None = None
    reservation: Reservation | None = None
    quarantined: str = ""  # why
    resting: bool = False  # after a failed start, for a moment
    failures: int = 0  # of starts, or blamed on it at once, since its last success
    job_failures: float = 0.0  # of jobs that worked elsewhere, less a part of its successes
    in_a_row: int = 0  # failed jobs since its last success, whether they work elsewhere or not
    quarantines: int = 0
    barred: bool = False  # stays in quarantine: for good, or until its process has ended

    @property
    def node(self) -> Node:
        """The node that has the card."""
        return self.server.nodes[self.card.node_id]

    @property
    def usable(self) -> bool:
        """Return whether the card may be used, now or when it is free."""
        return not self.quarantined

    @property
    def open(self) -> bool:
        """Return whether nothing holds the card; it may still be reserved."""
        return self.lease is None and not self.quarantined and not self.resting

    def free_in(self, now: float) -> float:
        """Seconds until its lease should end; after an overrun, as long again as the overrun."""
        return abs(self.lease.ends_at - now) if self.lease is not None else 0.0


SlotSet = tuple[Slot, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class Server:
    """A server with this run's cards: several nodes if they were claimed at different times."""

    pool: Pool
    order: int
    nodes: dict[str, Node] = field(default_factory=dict)  # by id
    slots: dict[int, Slot] = field(default_factory=dict)  # by the card's index, in order
    _groups: dict[int, tuple[SlotSet, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of cards of the server, this run's or not."""
        return max(node.server_cards for node in self.nodes.values())

    def add(self, node: Node) -> None:
        """Add the cards of a node."""
        self.nodes[node.node_id] = node
        for card in node.cards:
            self.slots[card.index] = Slot(
                card=card,
                name=f"{node.name}/{card.accelerator}{card.index}",
                server=self,
                order=(self.order + 1) * 4096 + card.index,
            )
        self.slots = dict(sorted(self.slots.items()))
        self._groups.clear()

    def remove(self, node_id: str) -> list[Slot]:
        """Remove a node and its cards; returns their slots."""
        gone = [self.slots.pop(card.index) for card in self.nodes.pop(node_id).cards]
        self._groups.clear()
        return gone

    def groups(self, width: int) -> tuple[SlotSet, ...]:
        """Legal sets of ``width`` of its cards, best first."""
        if width not in self._groups:
            accelerator = next(iter(self.nodes.values())).accelerator
            self._groups[width] = tuple(
                tuple(self.slots[index] for index in group)
                for group in legal_groups(accelerator, width, self.size)
                if all(index in self.slots for index in group)
            )
        return self._groups[width]

    def whole(self, good: Callable[[Slot], bool]) -> bool:
        """Return whether this run has every card of the server and all are good."""
        return len(self.slots) == self.size and all(map(good, self.slots.values()))

    def broken(self, slot: Slot) -> tuple[int, int]:
        """Cards in use in its pair and quad: one-card jobs harm gangs least where both are high."""
        index = slot.card.index
        counts = []
        for size in (2, 4):
            start = index - index % size
            mates = (self.slots.get(mate) for mate in range(start, start + size))
            counts.append(sum(mate is None or mate.worker is not None for mate in mates))
        return counts[0], counts[1]
