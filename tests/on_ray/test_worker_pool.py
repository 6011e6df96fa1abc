"""Workers and attempts on the driver's side, with agents that answer as the test says."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from core_cases import a_worker
from schedule_cases import job, node

from orchestrator.core.events import (
    AttemptEnded,
    Event,
    Progress,
    RunAttempt,
    StartWorker,
    StopWorker,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.core.job import State
from orchestrator.core.outcome import Attempt, Failure, FailureClass, RankOutcome
from orchestrator.on_ray.executor import STOP_PATIENCE_S, WorkerPool
from orchestrator.worker.protocol import (
    Ended,
    Listen,
    Listened,
    ResponseBatch,
    Run,
    Started,
    Stop,
    Stopped,
)

NODE = node("n1", cards=2)


class Agent:
    def __init__(self) -> None:
        self.now = 0.0
        self.sent: list[Any] = []
        channel = SimpleNamespace(put=self.sent.append)
        facts = SimpleNamespace(threads=1, server="", log_dir="", compiled="")
        facts.idle_memory_bytes, facts.uuids, facts.lost_cards = {}, {}, ()
        claim: Any = SimpleNamespace(node=NODE, facts=facts, channel=channel, address="")
        self.pool = WorkerPool(
            claim_of=lambda _: claim,
            factory="a:b",
            clock=lambda: self.now,
            label=str,
        )
        for card in NODE.cards:
            name = f"w{card.index}"
            self.pool.perform(StartWorker(worker_id=name, card=card))
            assert [
                type(event) for event in self.hear(Started(name, a_worker(worker_id=name)))
            ] == [WorkerReady]
        self.sent.clear()

    def hear(self, *responses: Any) -> list[Event]:
        self.pool.take_events()
        self.pool.handle(ResponseBatch(1, responses, 1, None, None, False))
        return self.pool.take_events()

    def run(self, name: str, *workers: str) -> None:
        ids = workers or ("w0",)
        cards = NODE.cards[: len(ids)]
        attempt = Attempt(attempt_id=name, job_id=name, number=1, job=job(name), cards=cards)
        self.pool.perform(RunAttempt(attempt=attempt, worker_ids=ids))


def ended(
    name: str,
    state: State = State.SUCCEEDED,
    *,
    worker: str = "w0",
    gone: bool = False,
    failure_class: FailureClass = FailureClass.CRASH,
) -> Ended:
    outcome = RankOutcome(rank=int(worker[1:]), state=state, started_at=1.0, ended_at=2.0)
    if state is not State.SUCCEEDED:
        failure = Failure(failure_class, "died")
        outcome = dataclasses.replace(outcome, failure=failure)
    return Ended(worker, name, outcome, gone)


def ends(events: list[Event]) -> dict[str, State]:
    return {e.outcome.attempt_id: e.outcome.state for e in events if isinstance(e, AttemptEnded)}


@pytest.fixture
def agent() -> Agent:
    return Agent()


def test_an_attempt_runs_and_ends(agent: Agent) -> None:
    for name in "ab":
        agent.run(name)
        assert [type(request) for request in agent.sent] == [Run] and agent.pool.busy
        assert ends(agent.hear(ended(name))) == {name: State.SUCCEEDED}
        assert not agent.pool.busy
        agent.sent.clear()


def due(agent: Agent) -> list[str]:
    return [running.attempt.attempt_id for running in agent.pool.due_for_tasks()]


def test_an_attempt_is_due_for_a_task_once_it_has_been_computing_for_a_second(agent: Agent) -> None:
    """Not while it waits for cores of its host, and never twice."""

    def report(phase: Any) -> None:
        progress = {"w0": Progress(worker_id="w0", attempt_id="a", phase=phase)}
        agent.pool.handle(ResponseBatch(1, (), 1, progress, None, False))

    agent.run("a")
    for now, phase, expected in [
        (0.9, "load", []),
        (1.1, "queued", []),
        (2.3, "load", ["a"]),
        (9.9, "measure", []),
    ]:
        agent.now = now
        report(phase)
        assert due(agent) == expected, now
    agent.run("b", "w1")
    agent.hear(ended("b", worker="w1"))
    agent.now = 12.0
    assert due(agent) == []


def test_a_cancelled_attempt_is_lost_as_cancelled(agent: Agent) -> None:
    agent.run("a")
    agent.pool.cancel("a")
    agent.pool.cancel("unknown")
    assert [type(request) for request in agent.sent] == [Run, Stop]
    stopped = ended("a", State.LOST, gone=True, failure_class=FailureClass.HANG)
    attempt, worker = agent.hear(stopped, Stopped("w0"))
    assert isinstance(attempt, AttemptEnded) and attempt.outcome.failure is not None
    assert attempt.outcome.failure.failure_class is FailureClass.CANCELLED
    assert isinstance(worker, WorkerStopped)


def test_a_worker_that_dies_ends_its_attempt_first(agent: Agent) -> None:
    agent.run("a")
    attempt, worker = agent.hear(ended("a", State.FAILED, gone=True))
    assert isinstance(attempt, AttemptEnded) and attempt.outcome.state is State.FAILED
    assert isinstance(worker, WorkerStopped) and worker.failure == attempt.outcome.failure


def test_an_attempt_whose_worker_is_gone_is_lost(agent: Agent) -> None:
    agent.run("a")
    attempt, _ = agent.hear(Ended("w0", "a", None, True))
    assert isinstance(attempt, AttemptEnded) and attempt.outcome.state is State.LOST


def test_everything_on_a_lost_node_ends(agent: Agent) -> None:
    agent.run("a")
    agent.pool.lose(NODE.node_id, Failure(FailureClass.NODE_LOST, "power"))
    events = agent.pool.take_events()
    assert ends(events) == {"a": State.LOST}
    assert [type(event) for event in events[1:]] == [WorkerStopped, WorkerStopped]
    assert not agent.pool.busy


def test_a_stop_that_was_asked_for_is_no_failure(agent: Agent) -> None:
    agent.run("a")
    agent.pool.perform(StopWorker(worker_id="w0", reason="enough"))
    assert isinstance(agent.sent[-1], Stop)
    attempt, worker = agent.hear(Stopped("w0"))
    assert ends([attempt]) == {"a": State.LOST}
    assert isinstance(worker, WorkerStopped) and worker.failure is None


@pytest.mark.parametrize("silent", [True, False])
def test_a_stop_that_is_not_confirmed_ends_the_attempt(agent: Agent, silent: bool) -> None:
    agent.run("a")
    agent.pool.perform(StopWorker(worker_id="w0", reason="enough"))
    agent.now = STOP_PATIENCE_S + 1
    lost: list[Any] = []
    agent.pool.give_up_stops(lambda claim, _: not lost.append(claim) and silent)
    assert len(lost) == 1
    events = agent.pool.take_events()
    assert ends(events) == ({} if silent else {"a": State.LOST})
    assert not any(isinstance(event, WorkerStopped) for event in events)


def test_a_gang_starts_together_and_ends_with_its_first_failure(agent: Agent) -> None:
    agent.run("a", "w0", "w1")
    assert [type(request) for request in agent.sent] == [Listen]
    agent.hear(Listened("w0", "a", "here"))
    assert [request.rendezvous for request in agent.sent[1:]] == ["here", "here"]
    agent.sent.clear()
    assert ends(agent.hear(ended("a", State.FAILED, worker="w1"))) == {}
    assert {request.worker_id for request in agent.sent if isinstance(request, Stop)} == {
        "w0",
        "w1",
    }
    events = agent.hear(ended("a", State.LOST, gone=True), Stopped("w0"), Stopped("w1"))
    assert ends(events) == {"a": State.FAILED}
    stopped = [event for event in events if isinstance(event, WorkerStopped)]
    assert {event.worker_id for event in stopped} == {"w0", "w1"}


def test_the_cause_of_a_broken_exchange_is_the_rank_that_died(agent: Agent) -> None:
    agent.run("a", "w0", "w1")
    agent.hear(Listened("w0", "a", "here"))
    broken = ended("a", State.FAILED, failure_class=FailureClass.COLLECTIVE)
    [event] = [
        event
        for event in agent.hear(broken, ended("a", State.FAILED, worker="w1"))
        if isinstance(event, AttemptEnded)
    ]
    assert event.outcome.failure is not None
    assert event.outcome.failure.failure_class is FailureClass.CRASH


def test_a_gang_whose_rendezvous_cannot_be_opened_ends(agent: Agent) -> None:
    agent.run("a", "w0", "w1")
    failure = Failure(FailureClass.COLLECTIVE, "no port")
    agent.hear(Listened("w0", "a", failure))
    assert [request.rendezvous for request in agent.sent[1:]] == [failure, failure]


def test_a_gang_whose_first_worker_dies_before_the_rendezvous_is_lost(agent: Agent) -> None:
    agent.run("a", "w0", "w1")
    assert ends(agent.hear(Stopped("w0"))) == {"a": State.LOST}
    assert not agent.pool.busy


def test_an_outcome_has_the_energy_and_readings_of_its_card(agent: Agent) -> None:
    changed = a_worker(worker_id="w0", threads=3)
    agent.run("a")
    response = ended("a")
    assert isinstance(response.outcome, RankOutcome)
    outcome = dataclasses.replace(response.outcome, worker=changed)
    [event] = agent.hear(dataclasses.replace(response, outcome=outcome))
    assert isinstance(event, AttemptEnded) and event.outcome.ranks[0].worker == changed
