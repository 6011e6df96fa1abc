"""The virtual cluster of simulated nights, and what a driver may do with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import TYPE_CHECKING

from shapes import MOST_BAD_STARTS, NOTICED_S, TOO_LONG_S, must

from orchestrator.core.errors import ClusterError
from orchestrator.core.events import (
    AttemptEnded,
    ClockSet,
    Command,
    Event,
    NodeJoined,
    NodeLeft,
    Progress,
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
from orchestrator.core.job import State
from orchestrator.core.outcome import FailureClass, Outcome
from orchestrator.core.topology import Card
from orchestrator.driver.board import MEASURE_FACTOR, PHASE_LIMITS_S
from orchestrator.scheduler.retry import POLICIES
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.scheduler.simulator import VirtualCluster
from workloads.devices.monitor.host import CardTelemetry

if TYPE_CHECKING:
    from nights import Night

_HOW = ScheduleSettings()
_MOST_LOOKS = 10_000
#: Longer than the first workers take, one after the other; a quarantine ends after 300 s.
SENSELESS_S = 120.0
_CRASHES = (
    *(FailureClass.CRASH, FailureClass.CRASH, FailureClass.CRASH),
    *(FailureClass.HOST_OUT_OF_MEMORY, FailureClass.COLLECTIVE, FailureClass.IMPORT),
)


class Watched:
    """The schedule as the driver sees it; every event and command is checked on the way."""

    def __init__(self, schedule: Schedule, executor: NightExecutor) -> None:
        self.schedule, self.executor = schedule, executor
        self.invariants, self.tally = executor.cluster.invariants, executor.night.tally

    def handle(self, event: Event) -> list[Command]:
        self.tally.events += 1
        self.invariants.observe(event)
        self.executor.heard(event)
        commands = self.schedule.handle(event)
        self.invariants.check(commands)
        self.executor.decided(commands)
        self.tally.commands += len(commands)
        return commands


class NightCluster(VirtualCluster):
    """Virtual nodes on which the processes of a dead driver live on."""

    night: Night
    driver: int
    failures: Counter[Card]  # to start, of bad cards

    def start(self, command: StartWorker) -> None:
        held = self.night.processes.get(command.card)
        must(held is None, f"{command.card} has a process of driver {held} already")
        self.night.processes[command.card] = self.driver
        super().start(command)

    def happens(self, event: Event) -> list[Event]:
        process = None
        if isinstance(event, WorkerStopped):
            process = self.processes.get(event.worker_id)
        happened = super().happens(event)
        self.night.most_bad = max(self.night.most_bad, len(self.bad))
        if process is not None:
            self.night.processes.pop(process.card, None)
            if process.state == "starting" and process.card in self.bad:
                self.failures[process.card] += 1
                count = self.failures[process.card]
                tried = f"{process.card}, on which no worker comes up, is tried {count} times"
                must(count <= MOST_BAD_STARTS, tried)
        for each in happened:
            if isinstance(each, NodeLeft):
                for card in [c for c in self.night.processes if c.node_id == each.node_id]:
                    del self.night.processes[card]
        return happened


class NightExecutor:
    """The cluster as the driver sees it: an ``Executor`` in virtual time."""

    def __init__(self, night: Night, cluster: NightCluster) -> None:
        self.night, self.cluster = night, cluster
        self.workers: dict[Card, str] = {}
        self.failed: dict[str, set[Card]] = {}  # by job id: where its last attempt failed
        self.suspects: set[Card] = set()  # where anything has failed
        self.gangs = self.overtaken = 0
        self.looks = 0  # one after the other, without waiting
        self.books = Books(night)
        self.hanging = Random(f"hanging {night.shape.seed} {cluster.driver}")
        self.hung: set[str] = set()  # attempts of which nothing more is heard

    def watch(self, schedule: Schedule) -> Watched:
        return Watched(schedule, self)

    def heard(self, event: Event) -> None:
        self.books.heard(event)
        self.night.tally.clock_steps += isinstance(event, ClockSet) and bool(event.by_s)
        if isinstance(event, WorkerOverdue) and event.worker_id in self.books.started:
            self.suspects.add(self.books.started[event.worker_id][0])

    def decided(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Wake):
                heappush(self.books.wakes, command.at)
            elif isinstance(command, RecordRow) and command.reason.startswith("the deadline came"):
                night = self.night
                early = night.knows_end() and night.left_s() > NOTICED_S
                must(not early, f"the end of the time came {night.left_s():.0f} s too early")

    def _must_be_fair(self, command: RunAttempt) -> None:
        """No gang starves, and no job is sent where it has just failed."""
        night, attempt = self.night, command.attempt
        failed = self.failed.pop(attempt.job_id, set())
        if len(attempt.cards) == 1:
            processes = self.cluster.processes.values()
            unsound = self.suspects | self.cluster.bad
            unsound |= {each.card for each in processes if each.state == "stopping"}
            decided_at = self.books.decided_at(command.worker_ids[0])
            # A node that was lost often, or of which many cards failed, is out of use as a whole.
            nodes = [
                node
                for node in self.cluster.nodes.values()
                if self.books.joined[node.node_id][1] <= decided_at
                and self.books.losses[node.name] < _HOW.node_failures
                and sum(card in unsound for card in node.cards) < _HOW.node_failures
            ]
            sound = [card for node in nodes for card in node.cards if card not in unsound]
            same = set(attempt.cards) & failed
            must(not same or not sound, f"{attempt.attempt_id} runs where the last attempt failed")
        if night.shape.crowded:
            self.gangs += len(attempt.cards) > 1
            free = night.jobs[0].job_id in night.measured()
            self.overtaken += free and len(attempt.cards) == 1 and not self.gangs
            room = sum(len(node.cards) for node in night.nodes)
            must(
                self.overtaken <= 4 * room, f"a gang starves: {self.overtaken} jobs went before it"
            )

    def perform(self, command: StartWorker | StopWorker | RunAttempt) -> None:
        night = self.night
        night.step()
        if night.trips():
            raise ClusterError("the cluster was away for a moment")
        if isinstance(command, StartWorker | RunAttempt):
            started = type(command).__name__
            must(not night.waiting, f"{started} while rows wait for room: {night.waiting}")
            late = night.knows_end() and night.left_s() < -1.0
            must(not late, f"{started} {-night.left_s():.0f} s after the end of the time")
        if isinstance(command, RunAttempt):
            attempt_id, job_id = command.attempt.attempt_id, command.attempt.job_id
            # A power failure may take the note of an attempt away, and nobody has heard of it.
            known = attempt_id in night.begun and not night.power_failed
            must(not known, f"attempt id {attempt_id} is used twice")
            must(attempt_id not in night.rowed, f"attempt {attempt_id} has ended and is started")
            must(job_id not in night.measured(), f"{job_id} is measured and runs again")
            night.begun.add(attempt_id)
            self._must_be_fair(command)
        self.books.performs(command)
        if isinstance(command, StartWorker):
            self.workers[command.card] = command.worker_id
        self.cluster.perform(command)
        can_hang = isinstance(command, RunAttempt) and night.shape.watched
        if can_hang and self.hanging.random() < 0.02:
            self.hung.add(command.attempt.attempt_id)  # type: ignore[union-attr]
            night.tally.hung += 1

    def events(self, timeout_s: float) -> list[Event]:
        night, cluster = self.night, self.cluster
        night.step()
        must(night.now < TOO_LONG_S, f"no end after {night.now:,.0f} s")
        unsafe = set() if night.no_room else night.unsafe
        must(not timeout_s or not unsafe, f"the driver waits and rows are not safe: {unsafe}")
        if timeout_s:
            self.books.must_be_punctual()
        if night.trips():
            raise ClusterError("the cluster was away for a moment")
        self.looks = 0 if timeout_s else self.looks + 1
        must(self.looks < _MOST_LOOKS, f"no end after {self.looks} looks for what never comes")
        if not cluster.queue or cluster.queue[0][0] > night.now + timeout_s:
            night.now += timeout_s
            cluster.now = night.now
            return []
        at, _, event = heappop(cluster.queue)
        night.now = cluster.now = max(cluster.now, at)
        if isinstance(event, AttemptEnded) and self._is_silent(event.outcome):
            return []
        happened = [
            self._of_some_class(each)
            for each in cluster.happens(event)
            if not isinstance(each, Tick)
        ]
        for each in happened:
            if isinstance(each, AttemptEnded):
                self._ended(each.outcome, each.at)
            elif isinstance(each, WorkerStopped) and each.failure is not None:
                self.suspects |= {c for c, w in self.workers.items() if w == each.worker_id}
        return happened

    def _of_some_class(self, event: Event) -> Event:
        failure = event.outcome.failure if isinstance(event, AttemptEnded) else None
        if failure is None or failure.failure_class is not FailureClass.CRASH:
            return event
        failure = replace(failure, failure_class=self.hanging.choice(_CRASHES))
        assert isinstance(event, AttemptEnded)
        return replace(event, outcome=replace(event.outcome, failure=failure))

    def _is_silent(self, outcome: Outcome) -> bool:
        return outcome.attempt_id in self.hung and outcome.state is not State.LOST

    def _ended(self, outcome: Outcome, at: float) -> None:
        attempt_id = outcome.attempt_id
        run = self.cluster.invariants.running.get(attempt_id)
        if run is None:
            self.night.tally.late += 1
            return
        self.night.unsafe.add(attempt_id)
        if outcome.failure is not None:
            self.suspects |= set(run.attempt.cards)
            if POLICIES[outcome.failure.failure_class].elsewhere == "card":
                self.failed[run.attempt.job_id] = set(run.attempt.cards)
            self.books.failed(run.attempt.job_id, outcome.failure.failure_class, at)

    def progress(self) -> dict[str, Progress]:
        return {
            worker_id: Progress(worker_id=worker_id, attempt_id=attempt_id, phase="measure")
            for attempt_id, (command, _) in self.cluster.running.items()
            for worker_id in command.worker_ids
        }

    def telemetry(self) -> dict[Card, CardTelemetry]:
        return {}

    def durable(self, attempt_ids: Sequence[str]) -> None:
        """Keep no outcome."""

    def close(self) -> None:
        """Nothing to close."""


class Books:
    """A driver's acts and their times, kept to judge the next; by the night's true clock."""

    def __init__(self, night: Night) -> None:
        self.night = night
        self.wakes: list[float] = []  # timers that are to come due, a heap
        self.busy_since: dict[str, tuple[float, float]] = {}  # by worker: since when, its limit
        self.failures: dict[str, Counter[FailureClass]] = {}  # of a job's attempts
        self.failed_at: dict[str, tuple[float, FailureClass]] = {}  # by job: the last of them
        self.starting: dict[str, Card] = {}  # by worker
        self.started: dict[str, tuple[Card, float]] = {}  # by worker: on which card, and when
        self.came_up: tuple[str, float] = "", 0.0  # the last worker that did, and when
        self.told_off: dict[Card, float] = {}  # when the last worker on it was told to stop
        self.no_start_at: dict[Card, float] = {}  # when a worker last failed to start
        self.losses: Counter[str] = Counter()  # of nodes, by name
        self.joined: dict[str, tuple[str, float]] = {}  # by node id: its name, and when

    def heard(self, event: Event) -> None:
        now = event.at
        if isinstance(event, Tick):
            while self.wakes and self.wakes[0] <= event.at:
                heappop(self.wakes)
        elif isinstance(event, WorkerReady):
            self.starting.pop(event.worker_id, None)
            self.busy_since.pop(event.worker_id, None)
            self.came_up = event.worker_id, self.night.now
        elif isinstance(event, WorkerStopped):
            self.busy_since.pop(event.worker_id, None)
            card = self.starting.pop(event.worker_id, None)
            if card is not None and event.failure is not None:
                self.no_start_at[card] = now
        elif isinstance(event, WorkerOverdue):
            since, limit = self.busy_since.get(event.worker_id, (-inf, 0.0))
            took = self.night.now - since
            must(took >= limit - 1.0, f"a healthy worker is called hung after {took:.0f} s")
        elif isinstance(event, NodeJoined):
            self.joined[event.node.node_id] = event.node.name, now
        elif isinstance(event, NodeLeft) and event.node_id in self.joined:
            self.losses[self.joined.pop(event.node_id)[0]] += 1

    def decided_at(self, worker_id: str) -> float:
        """The earliest time at which this worker's card may have been chosen for the attempt that
        it begins now: nodes that joined since could not be considered."""
        card, asked_at = self.started[worker_id]
        if self.came_up != (worker_id, self.night.now):
            return self.night.now
        told_off_at = self.told_off.get(card, asked_at)
        return min(asked_at, told_off_at if asked_at - told_off_at < _HOW.stop_patience_s else inf)

    def failed(self, job_id: str, kind: FailureClass, at: float) -> None:
        self.failures.setdefault(job_id, Counter())[kind] += 1
        self.failed_at[job_id] = at, kind

    def performs(self, command: StartWorker | StopWorker | RunAttempt) -> None:
        now, night = self.night.now, self.night
        if isinstance(command, StartWorker):
            card = command.card
            self.starting[command.worker_id] = card
            self.started[command.worker_id] = card, now
            self.busy_since[command.worker_id] = now, PHASE_LIMITS_S["starting"]
            rested_s = now - self.no_start_at.get(card, -inf)
            must(rested_s >= _HOW.card_rest_s - 0.01, f"{card} had {rested_s:.1f} s of rest")
            senseless = night.shape.broken and now > SENSELESS_S
            must(not senseless, f"no worker starts, and after {now:.0f} s others are tried")
            # A start that waited for room may come after its node has gone, and comes to nothing.
            name, joined_at = self.joined.get(card.node_id, ("", -inf))
            lost, here_s = self.losses[name], now - joined_at
            sound = lost < _HOW.node_failures or here_s >= _HOW.quarantine_s - 0.01
            must(sound, f"{name} was lost {lost} times and is used after {here_s:.0f} s")
        elif isinstance(command, StopWorker):
            self.starting.pop(command.worker_id, None)
            if command.worker_id in self.started:
                self.told_off[self.started[command.worker_id][0]] = now
        else:
            job = command.attempt.job
            limit = PHASE_LIMITS_S["measure"] + MEASURE_FACTOR * job.measure.time_limit_s
            for worker_id in command.worker_ids:
                self.busy_since[worker_id] = now, limit
            self._may_be_tried_again(command.attempt.job_id)

    def _may_be_tried_again(self, job_id: str) -> None:
        for kind, count in self.failures.get(job_id, Counter()).items():
            retries = POLICIES[kind].retries
            must(count <= retries, f"{job_id} failed {count} times with {kind} and is tried again")
        if job_id in self.failed_at:
            at, kind = self.failed_at[job_id]
            pause = POLICIES[kind].backoff_s * 2 ** (self.failures[job_id][kind] - 1)
            waited = self.night.now - at
            must(waited >= pause - 0.01, f"{job_id} is tried again {waited:.1f} s after {kind}")

    def must_be_punctual(self) -> None:
        late_s = self.night.now - self.wakes[0] if self.wakes else 0.0
        must(late_s <= NOTICED_S, f"a timer comes {late_s:.0f} s late")
