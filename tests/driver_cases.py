"""Helpers for tests of the driver and of the live views: a small cluster, jobs, and an executor
without processes that obeys the protocol, refuses what no schedule may ask, and can be told to
fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop
from typing import Any

from core_cases import Clock, a_job, a_sample

from orchestrator.core.events import (
    AttemptEnded,
    Command,
    Event,
    NodeJoined,
    Progress,
    RunAttempt,
    StartWorker,
    StopWorker,
)
from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.outcome import Attempt
from orchestrator.core.plan import Action, Plan, PlannedJob
from orchestrator.core.status import CardStatus, RunStatus
from orchestrator.core.topology import Card, Node
from orchestrator.scheduler.estimator import Estimate
from orchestrator.scheduler.simulated_faults import Chance, Faults, SimulationSettings
from orchestrator.scheduler.simulator import VirtualCluster
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
    """An ``Executor`` in virtual time: workers take 5 s to start, attempts ``attempt_s``.

    It refuses what no schedule may ask. ``faults`` is called before each ``perform`` and each
    ``events`` with the method's name, and may raise. ``log`` keeps what was performed.
    """

    def __init__(
        self, clock: FakeClock, *nodes: Node, faults: Callable[[str], None] = lambda _: None
    ) -> None:
        faulty = Faults(late_results=True)  # an attempt ends before its worker is stopped
        settings = SimulationSettings(noise=0.0, start_s=5.0, stop_s=0.1, faults=faulty)
        schedule: Any = None  # the driver has it
        self._cluster = VirtualCluster(schedule, settings, self._estimate, Chance(settings))
        self._clock, self._faults = clock, faults
        self.log: list[Command] = []
        self.closed = False
        self.attempt_s = 2.0
        self.phase: Any = "measure"
        for each in nodes:
            self._cluster.later(clock(), NodeJoined(at=clock(), node=each))

    def _estimate(self, _: Job) -> Estimate:
        return Estimate(load_s=0.0, run_s=self.attempt_s)

    def perform(self, command: Command) -> None:
        self._faults("perform")
        assert not self.closed
        self.log.append(command)
        if isinstance(command, StartWorker):
            assert command.card not in {each.card for each in self._cluster.processes.values()}
        elif isinstance(command, RunAttempt):
            for worker_id, card in zip(command.worker_ids, command.attempt.cards, strict=True):
                process = self._cluster.processes[worker_id]
                assert (process.state, process.attempt_id, process.card) == ("up", None, card)
        elif isinstance(command, StopWorker):
            assert command.worker_id in self._cluster.processes
        self._cluster.now = self._clock.now
        self._cluster.perform(command)

    def events(self, timeout_s: float) -> list[Event]:
        self._faults("events")
        happened: list[Event] = []
        until, queue = self._clock.now + timeout_s, self._cluster.queue
        while queue and queue[0][0] <= until:
            at, _, event = heappop(queue)
            self._cluster.now = until = self._clock.now = max(self._clock.now, at)
            happened += map(_with_result, self._cluster.happens(event))
        self._clock.now = until
        return happened

    def telemetry(self) -> Mapping[Card, CardTelemetry]:
        cards = [card for each in self._cluster.nodes.values() for card in each.cards]
        return {card: CardTelemetry(power_w=412.5) for card in cards if card.index == 0}

    def durable(self, attempt_ids: Sequence[str]) -> None:
        """Keep no outcome."""

    def progress(self) -> Mapping[str, Progress]:
        return {
            worker_id: Progress(worker_id=worker_id, attempt_id=attempt_id, phase=self.phase)
            for attempt_id, (command, _) in self._cluster.running.items()
            for worker_id in command.worker_ids
        }

    def close(self) -> None:
        self.closed = True


def _with_result(event: Event) -> Event:
    if not isinstance(event, AttemptEnded) or event.outcome.state is not State.SUCCEEDED:
        return event
    ranks = tuple(replace(rank, result=result()) for rank in event.outcome.ranks)
    return replace(event, outcome=replace(event.outcome, ranks=ranks))
