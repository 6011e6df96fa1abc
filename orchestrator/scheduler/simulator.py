"""Discrete-event simulation of the real ``Schedule`` on a virtual cluster, with seeded faults.

Every command is checked (``invariants.py``). The result compares the makespan with a bound that no
schedule can beat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from orchestrator.core.events import (
    AttemptEnded,
    Command,
    Event,
    NodeJoined,
    NodeLeft,
    RecordRow,
    RunAttempt,
    StartWorker,
    StopWorker,
    Tick,
    Wake,
    WorkerOverdue,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.core.job import Job, State
from orchestrator.core.outcome import Failure, FailureClass
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Card, Node
from orchestrator.scheduler.estimator import Estimate
from orchestrator.scheduler.invariants import Invariants, InvariantViolated
from orchestrator.scheduler.repeats import Order
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.scheduler.simulated_faults import (
    WORKER_INFO,
    Chance,
    Faults,
    SimulationSettings,
    outcome_of,
)
from orchestrator.scheduler.state import Estimates, LearningEstimates


@dataclass(slots=True, eq=False)
class _Process:
    worker_id: str
    card: Card
    started_at: float
    state: str = "starting"  # starting, up, stopping, gone
    key: str | None = None
    attempt_id: str | None = None


class VirtualCluster:
    """Virtual nodes, processes and clock that execute the schedule's commands."""

    def __init__(
        self,
        schedule: Schedule,
        settings: SimulationSettings,
        truth: Callable[[Job], Estimate],
        chance: Chance,
    ) -> None:
        self.schedule, self.settings, self.truth = schedule, settings, truth
        self.invariants = Invariants()
        self.chance = chance
        self.now = 0.0
        self.queue: list[tuple[float, int, Event]] = []
        self.processes: dict[str, _Process] = {}
        self.running: dict[str, tuple[RunAttempt, float]] = {}
        self.nodes: dict[str, Node] = {}
        self._losses: list[float] = []
        self.bad: set[Card] = set()
        self.sequence = self.events = self.commands = self.other_rows = 0
        self.workers = 0
        self.busy = self.starting = self.last_row = 0.0
        self.ran: dict[str, float] = {}  # job id -> seconds its successful attempts ran
        self.gathered: dict[str, float] = {}  # job id -> seconds from its last own process to all

    def later(self, at: float, event: Event) -> None:
        """Queue an event for a time."""
        self.sequence += 1
        heappush(self.queue, (at, self.sequence, event))

    def lose_node_at(self, at: float) -> None:
        """Queue the loss of some node for a time."""
        self._losses.append(at)
        self.later(at, Tick(at=at))

    def run(self) -> None:
        """Process events until the schedule says that the run is finished."""
        settings, limit = self.settings, self.settings.max_events
        while self.queue:
            happened: list[Event] = []  # the next queued event, or all within ``gather_s``
            until = self.queue[0][0] + settings.gather_s
            while self.queue and self.queue[0][0] <= until:
                at, _, event = heappop(self.queue)
                self.now = max(self.now, at)
                happened += self.happens(event)
                if not settings.gather_s:
                    break
            self._feed(happened)
            if self.schedule.finished:
                return
            if limit is not None and self.events > limit:
                raise InvariantViolated(f"no end after {limit} events at {self.now:.0f} s")
        raise InvariantViolated(f"nothing will happen any more: {self.schedule.counts()}")

    def _feed(self, happened: list[Event]) -> None:
        """Pass events to the schedule and carry out its commands, as the driver does."""
        commands: list[Command] = []
        for event in happened:
            self.events += 1
            self.invariants.observe(event)
            answer = self.schedule.handle(event)
            self.invariants.check(answer)
            commands += answer
            if self.schedule.finished:
                break
        ended = {
            command.attempt.attempt_id
            for command in commands
            if isinstance(command, RecordRow) and command.attempt is not None
        }
        for command in commands:
            # An attempt whose node or worker was lost in this moment has its row already.
            if not (isinstance(command, RunAttempt) and command.attempt.attempt_id in ended):
                self.perform(command)

    def happens(self, event: Event) -> list[Event]:
        """Events that the schedule sees of a queued one; none if its process is gone."""
        if isinstance(event, Tick) and self._losses and self._losses[0] <= event.at:
            self._losses.pop(0)
            return [*self._lose_node(), event]
        if isinstance(event, NodeJoined):
            self.nodes[event.node.node_id] = event.node
            self.bad |= self.chance.bad_ones(event.node.cards)
        elif isinstance(event, WorkerReady | WorkerOverdue):
            process = self.processes.get(event.worker_id)
            if process is None or process.state != "starting":
                return []
            if isinstance(event, WorkerReady):
                process.state = "up"
                self.starting += self.now - process.started_at
        elif isinstance(event, WorkerStopped):
            if self.processes.pop(event.worker_id, None) is None:
                return []
        elif isinstance(event, AttemptEnded):
            return self._ends(event)
        return [event]

    def _ends(self, event: AttemptEnded) -> list[Event]:
        command = self._take_off(event.outcome.attempt_id)
        if command is None:
            return [event] if self.settings.faults.late_results else []
        failure = event.outcome.failure
        if failure is not None and failure.failure_class is FailureClass.CRASH:
            dead = command.worker_ids[event.outcome.ranks[-1].rank]
            self.later(self.now, WorkerStopped(at=self.now, worker_id=dead, failure=failure))
        return [event]

    def _lose_node(self) -> list[Event]:
        if not self.nodes:
            return []
        self.chance.faults += 1
        node_id = self.chance.random.choice(sorted(self.nodes))
        node = self.nodes.pop(node_id)
        gone = [p for p in self.processes.values() if p.card.node_id == node_id]
        for process in gone:
            del self.processes[process.worker_id]
            if process.attempt_id is not None:
                self._take_off(process.attempt_id)
        rejoin = self.settings.faults.rejoin_after_s
        if rejoin is not None:
            again = replace(node, node_id=f"{node_id}'")
            self.later(self.now + rejoin, NodeJoined(at=self.now + rejoin, node=again))
        return [NodeLeft(at=self.now, node_id=node_id, reason="simulated loss")]

    def _take_off(self, attempt_id: str) -> RunAttempt | None:
        command, started = self.running.pop(attempt_id, (None, 0.0))
        if command is not None:
            self.busy += (self.now - started) * len(command.worker_ids)
            for worker_id in command.worker_ids:
                if worker_id in self.processes:
                    self.processes[worker_id].attempt_id = None
        return command

    def perform(self, command: Command) -> None:
        """Carry out a command and queue its consequences."""
        self.commands += 1
        if isinstance(command, RunAttempt):
            self._begin(command)
        elif isinstance(command, StartWorker):
            self.start(command)
        elif isinstance(command, StopWorker):
            self._stop(command)
        elif isinstance(command, Wake):
            self.later(max(command.at, self.now), Tick(at=max(command.at, self.now)))
        elif isinstance(command, RecordRow):
            self.last_row = self.now
            self.other_rows += not command.final

    def start(self, command: StartWorker) -> None:
        """Start a worker that comes up later, or not; none on a node lost at the same moment."""
        if command.card.node_id not in self.nodes:
            return
        self.workers += 1
        process = _Process(command.worker_id, command.card, self.now)
        self.processes[command.worker_id] = process
        at = self.now + self.settings.start_s * self.chance.scatter()
        event: Event
        if self.chance.start_fails(bad=command.card in self.bad):
            failure = Failure(FailureClass.ACQUIRE, "simulated")
            event = WorkerStopped(at=at, worker_id=command.worker_id, failure=failure)
        elif self.chance.happens(self.settings.faults.no_start):
            at = self.now + self.settings.watchdog_s
            event = WorkerOverdue(at=at, worker_id=command.worker_id, reason="did not come up")
        else:
            event = WorkerReady(at=at, worker_id=command.worker_id, info=WORKER_INFO)
        self.later(at, event)

    def _stop(self, command: StopWorker) -> None:
        process = self.processes.get(command.worker_id)
        if process is None:
            return
        process.state = "stopping"
        if self.chance.happens(self.settings.faults.stuck):
            if process.attempt_id is not None:
                self._take_off(process.attempt_id)  # and nobody hears of it
            if self.settings.faults.stuck_s is not None:
                at = self.now + self.settings.faults.stuck_s
                self.later(at, WorkerStopped(at=at, worker_id=command.worker_id))
            return
        if process.attempt_id is not None:
            attempt_id = process.attempt_id
            self._take_off(attempt_id)
            failure = Failure(FailureClass.NODE_LOST, "stopped")
            lost = outcome_of(attempt_id, State.LOST, 1, self.now, self.now, failure)
            self.later(self.now, AttemptEnded(at=self.now, outcome=lost))
        at = self.now + self.settings.stop_s
        self.later(at, WorkerStopped(at=at, worker_id=command.worker_id))

    def _begin(self, command: RunAttempt) -> None:
        attempt = command.attempt
        processes = [self.processes.get(worker_id) for worker_id in command.worker_ids]
        estimate = self.truth(attempt.job)
        lasts = estimate.run_s * self.chance.scatter()
        if any(p is not None and p.key != attempt.job.residency_key for p in processes):
            lasts += estimate.load_s * self.chance.scatter()
        if attempt.purpose != "measure":
            lasts /= 4
        for process in processes:
            if process is not None:
                process.key, process.attempt_id = attempt.job.residency_key, attempt.attempt_id
        if attempt.job.alone:
            last = max((p.started_at for p in processes if p is not None), default=self.now)
            self.gathered[attempt.job_id] = self.now - last
        state, failure, factor = self.chance.fate(attempt)
        at = self.now + lasts * factor
        self.running[attempt.attempt_id] = (command, self.now)
        rank = self.chance.random.randrange(len(command.worker_ids)) if failure is not None else 0
        outcome = outcome_of(
            attempt.attempt_id, state, len(command.worker_ids), self.now, at, failure, rank
        )
        if state is State.SUCCEEDED and attempt.purpose == "measure":
            self.ran[attempt.job_id] = lasts
        elif state is State.SUCCEEDED:
            result = self.chance.result(attempt.job)
            outcome = replace(
                outcome, ranks=tuple(replace(one, result=result) for one in outcome.ranks)
            )
        self.later(at, AttemptEnded(at=at, outcome=outcome))


__all__ = ["Faults", "SimulationResult", "SimulationSettings", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Outcome of a simulated run."""

    makespan_s: float  # until the last row
    work_bound_s: float  # card-seconds of running over cards, or the longest job
    bound_s: float  # the same with what a gang must pay: fresh processes that load the model
    busy_fraction: float  # of card-time, that attempts had
    start_fraction: float  # of card-time, that workers were starting
    events: int
    commands: int
    workers: int
    attempts: int
    faults: int
    rows: tuple[RecordRow, ...]  # final ones
    #: By job id: from the start of the last of its last attempt's own processes until it began.
    gathered_s: Mapping[str, float]
    other_rows: int
    repeats: int  # rows of further measurements

    @property
    def ratio(self) -> float:
        """Makespan over ``bound_s``."""
        return self.makespan_s / self.bound_s if self.bound_s else 1.0


def simulate(
    jobs: Sequence[PlannedJob],
    nodes: Sequence[Node],
    estimates: Estimates,
    *,
    settings: SimulationSettings | None = None,
    schedule_settings: ScheduleSettings | None = None,
    truth: Callable[[Job], Estimate] | None = None,
    extra_events: Iterable[Event] = (),
    order: Order | None = None,
) -> SimulationResult:
    """Run ``jobs`` on virtual ``nodes`` to the end; ``extra_events`` happen at their times.

    Durations scatter about ``truth``, by default the estimates.

    Raises InvariantViolated if the schedule broke a rule, or the run did not end.
    """
    settings = settings or SimulationSettings()
    how = schedule_settings or ScheduleSettings()
    learning = isinstance(estimates, LearningEstimates)
    if truth is None:
        truth = (deepcopy(estimates) if learning else estimates).estimate
    chance = Chance(settings)
    judge = chance if settings.faults.flagged else None
    schedule = Schedule(jobs, how, estimates, judge=judge, order=order)
    cluster = VirtualCluster(schedule, settings, truth, chance)
    cluster.invariants.judged = settings.faults.flagged > 0
    cluster.invariants.searched = order is not None
    cluster.invariants.work_until = how.work_until
    cluster.invariants.over_by = how.work_until + how.stop_s
    cluster.invariants.stop_patience_s = how.stop_patience_s
    if not learning:
        cluster.invariants.lasts_s = lambda job: estimates.estimate(job).run_s
    reused = {planned.job.job_id for planned in jobs if planned.action is Action.REUSE}
    cluster.invariants.needs = {
        planned.job.job_id: set(planned.needs) - reused for planned in jobs if planned.needs
    }
    for node in nodes:
        cluster.later(0.0, NodeJoined(at=0.0, node=node))
    for at, node in settings.joins:
        cluster.later(at, NodeJoined(at=at, node=node))
    for event in extra_events:
        cluster.later(event.at, event)
    for at in settings.faults.node_losses:
        cluster.lose_node_at(at)
    cluster.later(0.0, Tick(at=0.0))
    cluster.run()
    to_run = [p.job for p in jobs if p.action in (Action.RUN, Action.UNSUPPORTED)]
    cluster.invariants.check_end(job.job_id for job in to_run)
    joined = [*nodes, *(node for _, node in settings.joins)]
    return _result(cluster, [p.job for p in jobs if p.action is Action.RUN], joined)


def _result(
    cluster: VirtualCluster, jobs: Sequence[Job], nodes: Sequence[Node]
) -> SimulationResult:
    work_s = bound_s = 0.0
    for kind in {job.accelerator for job in jobs}:
        cards = sum(len(node.cards) for node in nodes if node.accelerator is kind)
        run_s = total_s = longest_s = longest_total_s = 0.0
        for job in jobs:
            ran = cluster.ran.get(job.job_id)
            if job.accelerator is not kind or ran is None:
                continue
            with_start = ran + cluster.settings.start_s if job.alone else ran
            run_s += ran * job.cards
            total_s += with_start * job.cards
            longest_s, longest_total_s = max(longest_s, ran), max(longest_total_s, with_start)
        if cards:
            work_s = max(work_s, run_s / cards, longest_s)
            bound_s = max(bound_s, total_s / cards, longest_total_s)
    card_time = cluster.last_row * sum(len(node.cards) for node in nodes)
    return SimulationResult(
        makespan_s=cluster.last_row,
        work_bound_s=work_s,
        bound_s=bound_s,
        busy_fraction=cluster.busy / card_time if card_time else 0.0,
        start_fraction=cluster.starting / card_time if card_time else 0.0,
        events=cluster.events,
        commands=cluster.commands,
        workers=cluster.workers,
        attempts=sum(cluster.invariants.attempts.values()),
        faults=cluster.chance.faults,
        rows=tuple(cluster.invariants.final.values()),
        gathered_s=cluster.gathered,
        other_rows=cluster.other_rows,
        repeats=cluster.invariants.repeats.total(),
    )
