"""Helpers for tests of the schedule: jobs, nodes, fixed estimates, and a hand-driven cluster that
checks the invariants at every step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from random import Random

from core_cases import a_job, a_sample, a_worker

from orchestrator.core.events import (
    AttemptEnded,
    Command,
    Event,
    NodeJoined,
    NodeLeft,
    RecordRow,
    RunAttempt,
    RunFinished,
    StartWorker,
    StopRequested,
    StopWorker,
    Tick,
    Wake,
    WorkerQueued,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.outcome import Attempt, Failure, FailureClass, Outcome, RankOutcome
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Card, Node
from orchestrator.scheduler.estimator import Estimate
from orchestrator.scheduler.invariants import Invariants
from orchestrator.scheduler.repeats import FlagJudge
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from workloads.base import Result


def result_of(size: int, rate: float) -> Result:
    """Three repeats of a batch at so many tokens a second."""
    samples = (
        a_sample(
            repeat=repeat,
            wall_s=size / (rate * (1 + (repeat - 1) / 1e4)),
            items=size,
            output_tokens=size,
        )
        for repeat in range(3)
    )
    return Result(samples=tuple(samples), stop_reason="max_repeats")


def job(name: str = "a", **changes: object) -> Job:
    """A job; ``name`` makes it another one without changing its residency key."""
    return a_job(**{"model": "tiny", "dataset": name, **changes})


def planned(*jobs: Job) -> list[PlannedJob]:
    return [PlannedJob(job=each, action=Action.RUN) for each in jobs]


def node(name: str = "n1", cards: int = 8, **changes: object) -> Node:
    """A whole Gaudi server by default."""
    fields: dict[str, object] = {
        "node_id": name,
        "name": name,
        "accelerator": Accelerator.HPU,
        "card_indices": tuple(range(cards)),
        "server_cards": cards,
    }
    return Node(**(fields | changes))  # type: ignore[arg-type]


def numbered(count: int, **changes: object) -> list[Job]:
    return [job(str(number), **changes) for number in range(count)]


def nodes(count: int, cards: int = 8) -> list[Node]:
    return [node(f"n{number}", cards) for number in range(1, count + 1)]


class Fixed:
    """Estimates by dataset name or batch size, the same for all other jobs."""

    def __init__(
        self,
        run_s: float = 100.0,
        load_s: float = 10.0,
        by_name: Mapping[str, float] | None = None,
        by_batch: Mapping[object, float] | None = None,
    ) -> None:
        self.run_s, self.load_s = run_s, load_s
        self.by_name, self.by_batch = by_name or {}, by_batch or {}

    def estimate(self, job: Job) -> Estimate:
        by_batch = self.by_batch.get(job.batch_size, self.run_s)
        return Estimate(load_s=self.load_s, run_s=self.by_name.get(job.dataset, by_batch))


#: How an attempt ends: its state, or that it failed with this class.
End = State | FailureClass | Callable[[Attempt], State | FailureClass]


class Spread:
    """Estimates from half a minute to ten minutes, by job."""

    def estimate(self, job: Job) -> Estimate:
        return Estimate(load_s=20.0, run_s=Random(job.dataset).uniform(30, 600))


class Cluster:
    """A cluster in the hands of a test: it says what happens, and sees what is commanded."""

    def __init__(
        self,
        jobs: Iterable[PlannedJob],
        *,
        estimates: Fixed | None = None,
        attempts_before: Mapping[str, int] | None = None,
        cards_before: Mapping[str, Collection[tuple[str, int]]] | None = None,
        judge: FlagJudge | None = None,
        again: Mapping[str, int] | None = None,
        **settings: object,
    ) -> None:
        self.jobs = list(jobs)
        self.schedule = Schedule(
            self.jobs,
            ScheduleSettings(**settings),  # type: ignore[arg-type]
            estimates or Fixed(),
            attempts_before=attempts_before,
            cards_before=cards_before,
            judge=judge,
            again=again,
        )
        self.now = 1000.0
        self.invariants = Invariants(judged=judge is not None)
        self.log: list[Command] = []
        self.starting: dict[str, StartWorker] = {}
        self.up: dict[str, StartWorker] = {}
        self.stopping: dict[str, StopWorker] = {}
        self.running: dict[str, RunAttempt] = {}  # by attempt id
        self.rows: list[RecordRow] = []
        self.wakes: list[float] = []
        self.finished: RunFinished | None = None

    def see(self, event: Event) -> list[Command]:
        """Hand an event to the schedule; returns and files its commands."""
        self.invariants.observe(event)
        commands = self.schedule.handle(event)
        self.invariants.check(commands)
        self.log += commands
        for command in commands:
            if isinstance(command, StartWorker):
                self.starting[command.worker_id] = command
            elif isinstance(command, StopWorker):
                self.starting.pop(command.worker_id, None)
                self.stopping[command.worker_id] = command
            elif isinstance(command, RunAttempt):
                self.running[command.attempt.attempt_id] = command
            elif isinstance(command, RecordRow):
                self.rows.append(command)
            elif isinstance(command, Wake):
                self.wakes.append(command.at)
            elif isinstance(command, RunFinished):
                self.finished = command
        return commands

    def join(self, *nodes: Node) -> list[Command]:
        commands = [c for each in nodes for c in self.see(NodeJoined(at=self.now, node=each))]
        return commands + self.tick()

    def leave(self, node_id: str) -> list[Command]:
        for worker_id, start in {**self.starting, **self.up}.items():
            if start.card.node_id == node_id:
                self.starting.pop(worker_id, None)
                self.up.pop(worker_id, None)
                self.stopping.pop(worker_id, None)
        for attempt_id, run in list(self.running.items()):
            if any(card.node_id == node_id for card in run.attempt.cards):
                del self.running[attempt_id]
        return self.see(NodeLeft(at=self.now, node_id=node_id, reason="power"))

    def tick(self, after: float = 0.0) -> list[Command]:
        self.now += after
        return self.see(Tick(at=self.now))

    def ready(self, *worker_ids: str) -> list[Command]:
        commands = []
        for worker_id in worker_ids or tuple(self.starting):
            self.up[worker_id] = self.starting.pop(worker_id)
            info = a_worker(worker_id=worker_id)
            commands += self.see(WorkerReady(at=self.now, worker_id=worker_id, info=info))
        return commands

    def stopped(self, *worker_ids: str, failure: Failure | None = None) -> list[Command]:
        commands = []
        for worker_id in worker_ids or tuple(self.stopping):
            for group in (self.starting, self.up, self.stopping):
                group.pop(worker_id, None)
            event = WorkerStopped(at=self.now, worker_id=worker_id, failure=failure)
            commands += self.see(event)
        return commands

    def ends(
        self,
        attempt: Attempt,
        state: State = State.SUCCEEDED,
        failure_class: FailureClass | None = None,
        *,
        took: float = 100.0,
        ranks: Iterable[int] = (0,),
        result: Result | None = None,
    ) -> list[Command]:
        """An attempt ends, current or not."""
        self.running.pop(attempt.attempt_id, None)
        self.now += took
        failure = failure_class and Failure(failure_class, "as told")
        outcome = Outcome(
            attempt_id=attempt.attempt_id,
            state=state,
            failure=failure,
            ranks=tuple(
                RankOutcome(
                    rank=rank,
                    state=state,
                    started_at=self.now - took,
                    ended_at=self.now,
                    failure=failure,
                    result=result,
                )
                for rank in ranks
            ),
        )
        return self.see(AttemptEnded(at=self.now, outcome=outcome))

    def stop_request(self, reason: str = "enough") -> list[Command]:
        return self.see(StopRequested(at=self.now, reason=reason))

    def queued(self, *worker_ids: str) -> list[Command]:
        """Report that these workers wait for a CPU slot."""
        events = [WorkerQueued(at=self.now, worker_id=worker_id) for worker_id in worker_ids]
        return [command for event in events for command in self.see(event)]

    def only(self) -> Attempt:
        [command] = self.running.values()
        return command.attempt

    def run_of(self, name: str) -> Attempt:
        """The running attempt of the job of this name."""
        [attempt] = [
            run.attempt for run in self.running.values() if run.attempt.job.dataset == name
        ]
        return attempt

    def finals(self) -> dict[str, RecordRow]:
        return {row.job.dataset: row for row in self.rows if row.final}

    def states(self) -> set[State]:
        return {row.state for row in self.rows if row.final}

    def to_next_wake(self) -> list[Command]:
        return self.tick(min(at for at in self.wakes if at > self.now) - self.now)

    def play_out(self, end: End = State.SUCCEEDED, *, took: float = 100.0) -> list[Attempt]:
        """Let every attempt end as ``end`` says, until the run is finished; returns them."""
        ended = []
        for _ in range(10_000):
            if self.finished is not None:
                due = [p for p in self.jobs if p.action in (Action.RUN, Action.UNSUPPORTED)]
                self.invariants.check_end(planned.job.job_id for planned in due)
                return ended
            if self.stopping:
                self.stopped(next(iter(self.stopping)))
            elif self.starting:
                self.ready(next(iter(self.starting)))
            elif self.running:
                attempt = next(iter(self.running.values())).attempt
                ended.append(attempt)
                kind = end(attempt) if callable(end) else end
                if isinstance(kind, FailureClass):
                    self.ends(attempt, State.FAILED, kind, took=took)
                else:
                    self.ends(attempt, kind, took=took)
            elif any(at > self.now for at in self.wakes):
                self.to_next_wake()
            else:
                raise AssertionError(f"nothing left to happen: {self.schedule.counts()}")
        raise AssertionError("the run does not end")


def kinds(commands: Iterable[Command]) -> list[str]:
    """Names of commands, timers left out."""
    return [type(c).__name__ for c in commands if not isinstance(c, Wake)]


def cards_of(commands: Iterable[Command]) -> list[Card]:
    return [c.card for c in commands if isinstance(c, StartWorker)]


def cluster_of(
    *jobs: Job | PlannedJob, cards: int = 8, on: Iterable[Node] = (), **how: object
) -> Cluster:
    """A cluster with these jobs to run, which has a server of so many cards, or these nodes."""
    plan = [each if isinstance(each, PlannedJob) else planned(each)[0] for each in jobs]
    cluster = Cluster(plan, **how)  # type: ignore[arg-type]
    cluster.join(*(tuple(on) or nodes(1, cards)))
    return cluster


def busy_cluster(*jobs: Job | PlannedJob, **how: object) -> Cluster:
    """The same with every worker up, and so with attempts that run."""
    cluster = cluster_of(*jobs, **how)  # type: ignore[arg-type]
    cluster.ready()
    return cluster
