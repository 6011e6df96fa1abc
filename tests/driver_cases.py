"""Helpers for tests of the driver and of the live views: a small cluster, jobs, and an executor
without processes that obeys the protocol, refuses what no schedule may ask, and can be told to
fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from core_cases import Clock, a_job, a_sample, a_worker

from orchestrator.core.events import (
    AttemptEnded,
    Event,
    NodeJoined,
    Progress,
    RunAttempt,
    StartWorker,
    StopWorker,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.outcome import (
    Attempt,
    Failure,
    FailureClass,
    Outcome,
    RankOutcome,
    WorkerInfo,
)
from orchestrator.core.plan import Action, Plan, PlannedJob
from orchestrator.core.status import CardStatus, RunStatus
from orchestrator.core.topology import Card, Node
from workloads.base import Result
from workloads.devices.monitor.host import CardTelemetry

MOMENT = 1_700_000_000.0

#: A run of 48 jobs after 65 seconds, on a node of three cards.
STATUS = RunStatus(
    run="night",
    at=MOMENT + 65,
    started_at=MOMENT,
    total=48,
    done=17,
    counts={"SUCCEEDED": 15, "FAILED": 2},
    attempts=19,
    emulated=True,
    cards=(
        CardStatus(
            card="hpu-1/HPU0",
            worker_id="w1",
            phase="measure",
            phase_age_s=12.0,
            job="tiny-chatglm3 fp32 b=4",
            attempt_id="a-1",
        ),
        CardStatus(card="hpu-1/HPU1", worker_id="w2", phase="starting"),
        CardStatus(card="hpu-1/HPU2"),
    ),
    eta_s=130.0,
)


def node(name: str = "hpu-1", cards: int = 2, *, emulated: bool = True) -> Node:
    return Node(
        node_id=f"id-{name}",
        name=name,
        accelerator=Accelerator.HPU,
        card_indices=tuple(range(cards)),
        device_name="emulated HPU on CPU" if emulated else "Gaudi2",
        emulated=emulated,
    )


def job(batch_size: int = 1, **changes: object) -> Job:
    return a_job(batch_size=batch_size, **changes)


def plan(*jobs: Job, nodes: tuple[Node, ...] = (), estimate_s: float = 10.0) -> Plan:
    return Plan(
        grid_name="case",
        jobs=tuple(PlannedJob(job=each, action=Action.RUN, estimate_s=estimate_s) for each in jobs),
        nodes=nodes or (node(),),
    )


def attempt(of: Job, card: Card, number: int = 1) -> Attempt:
    return Attempt(
        attempt_id=f"{of.job_id}-{number}", job_id=of.job_id, number=number, job=of, cards=(card,)
    )


def result(wall_s: float = 2.0) -> Result:
    sample = a_sample(wall_s=wall_s, cpu_s=wall_s, items=1, output_tokens=20)
    return Result(
        samples=(sample, replace(sample, repeat=1)), stop_reason="max_repeats", load_s=1.0
    )


class FakeClock(Clock):
    """Seconds since the epoch that pass only when somebody waits."""

    now = MOMENT

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeExecutor:
    """An ``Executor`` in virtual time: workers take 5 s to start, attempts 2 s.

    ``verdict`` decides how an attempt ends; ``faults`` is called before each ``perform`` and each
    ``events`` with the method's name, and may raise. ``log`` keeps what was performed.
    """

    def __init__(
        self,
        clock: FakeClock,
        *nodes: Node,
        verdict: Callable[[Attempt], State] = lambda _: State.SUCCEEDED,
        faults: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._verdict = verdict
        self._faults = faults
        self._cards = {card for each in nodes for card in each.cards}
        self._names = {each.node_id: each.name for each in nodes}
        self._held: dict[str, Card] = {}
        self._busy: dict[str, Attempt] = {}
        self._ready: set[str] = set()
        self._due: deque[tuple[float, Callable[[], list[Event]]]] = deque()
        self._events: list[Event] = [NodeJoined(at=clock(), node=each) for each in nodes]
        self.log: list[StartWorker | StopWorker | RunAttempt] = []
        self.closed = False
        self.attempt_s = 2.0
        self.phase = "measure"

    def perform(self, command: StartWorker | StopWorker | RunAttempt) -> None:
        self._faults("perform")
        assert not self.closed
        self.log.append(command)
        if isinstance(command, StartWorker):
            assert command.card in self._cards and command.card not in self._held.values()
            assert command.worker_id not in self._held
            self._held[command.worker_id] = command.card
            self._later(5.0, lambda: self._come_up(command))
        elif isinstance(command, RunAttempt):
            for worker_id, card in zip(command.worker_ids, command.attempt.cards, strict=True):
                assert worker_id in self._ready and worker_id not in self._busy
                assert self._held[worker_id] == card
                self._busy[worker_id] = command.attempt
            self._later(self.attempt_s, lambda: self._end(command))
        else:
            assert command.worker_id in self._held
            self._later(0.1, lambda: self._go(command.worker_id))

    def events(self, timeout_s: float) -> list[Event]:
        self._faults("events")
        if not self._events:
            until = self._clock.now + timeout_s
            due = min((at for at, _ in self._due), default=until)
            self._clock.now = max(self._clock.now, min(until, due))
        while self._due and min(at for at, _ in self._due) <= self._clock.now:
            first = min(self._due, key=lambda entry: entry[0])
            self._due.remove(first)
            self._events += first[1]()
        happened, self._events = self._events, []
        return happened

    def telemetry(self) -> Mapping[Card, CardTelemetry]:
        return {card: CardTelemetry(power_w=412.5) for card in self._cards if card.index == 0}

    def durable(self, attempt_ids: Sequence[str]) -> None:
        """Keep no outcome."""

    def progress(self) -> Mapping[str, Progress]:
        return {
            worker_id: Progress(
                worker_id=worker_id,
                attempt_id=each.attempt_id,
                phase=self.phase,
            )
            for worker_id, each in self._busy.items()
        }

    def close(self) -> None:
        self.closed = True

    def _later(self, seconds: float, act: Callable[[], list[Event]]) -> None:
        self._due.append((self._clock.now + seconds, act))

    def _come_up(self, command: StartWorker) -> list[Event]:
        if command.worker_id not in self._held:
            return []
        self._ready.add(command.worker_id)
        return [
            WorkerReady(
                at=self._clock.now, worker_id=command.worker_id, info=self.info(command.worker_id)
            )
        ]

    def info(self, worker_id: str) -> WorkerInfo:
        return a_worker(
            worker_id=worker_id, node_name=self._names[self._held[worker_id].node_id], pid=1
        )

    def _end(self, command: RunAttempt) -> list[Event]:
        if any(self._busy.get(worker_id) != command.attempt for worker_id in command.worker_ids):
            return []
        state = self._verdict(command.attempt)
        good = state is State.SUCCEEDED
        failure = None if good else Failure(FailureClass.ERROR, f"asked to be {state}")
        ranks = []
        for rank, worker_id in enumerate(command.worker_ids):
            del self._busy[worker_id]
            ranks.append(
                RankOutcome(
                    rank=rank,
                    state=state,
                    started_at=self._clock.now - 2.0,
                    ended_at=self._clock.now,
                    result=result() if good else None,
                    failure=failure,
                    worker=self.info(worker_id),
                )
            )
        outcome = Outcome(
            attempt_id=command.attempt.attempt_id, state=state, ranks=tuple(ranks), failure=failure
        )
        return [AttemptEnded(at=self._clock.now, outcome=outcome)]

    def _go(self, worker_id: str) -> list[Event]:
        happened: list[Event] = []
        if worker_id in self._busy:
            gone = self._busy.pop(worker_id)
            outcome = Outcome(attempt_id=gone.attempt_id, state=State.LOST, ranks=())
            happened.append(AttemptEnded(at=self._clock.now, outcome=outcome))
        self._held.pop(worker_id, None)
        self._ready.discard(worker_id)
        return [*happened, WorkerStopped(at=self._clock.now, worker_id=worker_id)]
