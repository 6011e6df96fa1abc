"""Workers and attempts on the driver's side, with agents that answer as the test says."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_cases import Clock, a_worker
from lossy_exchange import LossyNode, LossyRay
from ray.exceptions import ActorUnavailableError
from schedule_cases import job, node, result_of

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.events import (
    AttemptEnded,
    Event,
    Progress,
    RecordRow,
    RunAttempt,
    StartWorker,
    StopWorker,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.core.job import State
from orchestrator.core.outcome import Attempt, Failure, FailureClass, Outcome, RankOutcome
from orchestrator.core.readings import Energy
from orchestrator.on_ray import outcomes
from orchestrator.on_ray.channel import AgentChannel
from orchestrator.on_ray.executor import STOP_PATIENCE_S, WorkerPool
from orchestrator.on_ray.outcomes import (
    KeptOutcome,
    OutcomeKeeper,
    kept_here,
    kept_outcomes,
    layout_of,
)
from orchestrator.worker.orphans import Owner
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
ATTEMPT = Attempt(attempt_id="job-1", job_id="job", number=1, job=job("job"), cards=NODE.cards)


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
    kind: FailureClass = FailureClass.CRASH,
    at: float = 2.0,
) -> Ended:
    failure = None if state is State.SUCCEEDED else Failure(kind, f"{kind} of {worker}")
    outcome = RankOutcome(
        rank=int(worker[1:]), state=state, started_at=0.0, ended_at=at, failure=failure
    )
    return Ended(worker, name, outcome, gone)


def ends(events: list[Event]) -> dict[str, State]:
    return {e.outcome.attempt_id: e.outcome.state for e in events if isinstance(e, AttemptEnded)}


@pytest.fixture
def agent() -> Agent:
    return Agent()


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
    stopped = ended("a", State.LOST, gone=True, kind=FailureClass.HANG)
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


BROKEN = ended("a", State.FAILED, kind=FailureClass.COLLECTIVE)


def of_rank_one(state: State, kind: FailureClass = FailureClass.CRASH, at: float = 2.1) -> Ended:
    return ended("a", state, worker="w1", kind=kind, at=at)


def end_of_gang(agent: Agent, *reports: Ended) -> Outcome:
    """The outcome of a gang whose ranks were reported in this order."""
    agent.run("a", "w0", "w1")
    agent.hear(Listened("w0", "a", "here"))
    [outcome] = [e.outcome for e in agent.hear(*reports) if isinstance(e, AttemptEnded)]
    return outcome


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        (BROKEN, of_rank_one(State.FAILED), 1),  # it died, rank 0 noticed first
        (BROKEN, of_rank_one(State.OUT_OF_MEMORY, FailureClass.OUT_OF_MEMORY), 1),
        (BROKEN, of_rank_one(State.LOST, FailureClass.HANG), 0),  # stopped because of rank 0
        (BROKEN, of_rank_one(State.FAILED, FailureClass.COLLECTIVE, at=1.9), 0),
        (BROKEN, of_rank_one(State.SUCCEEDED), 0),
        (of_rank_one(State.FAILED, FailureClass.ERROR), ended("a", State.FAILED), 0),
    ],
)
def test_a_broken_exchange_is_explained_by_the_rank_that_broke_it(
    agent: Agent, first: Ended, second: Ended, cause: int
) -> None:
    """Whoever was reported first; ranks that were stopped explain nothing."""
    outcome = end_of_gang(agent, first, second)
    of_cause = (first, second)[cause].outcome
    assert isinstance(of_cause, RankOutcome)
    assert (outcome.state, outcome.failure) == (of_cause.state, of_cause.failure)
    assert [each.rank for each in outcome.ranks] == [0, 1]


def test_the_row_of_a_failed_gang_tells_how_each_rank_ended(agent: Agent) -> None:
    outcome = end_of_gang(agent, BROKEN, of_rank_one(State.FAILED))
    record = RecordRow(
        job=ATTEMPT.job,
        state=State.FAILED,
        reason="",
        final=True,
        attempt=ATTEMPT,
        outcome=outcome,
    )
    row = measurement_of(record, run="r", invocation_id="i", recorded_at=1.0)
    assert row.failure_class == "crash"
    assert row.details["ranks"] == (
        "rank 0 FAILED (collective: collective of w0); rank 1 FAILED (crash: crash of w1)"
    )


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
    agent.run("a")
    response, energy = ended("a"), Energy(energy_j=1.0, duration_s=2.0, source="power")
    assert isinstance(response.outcome, RankOutcome)
    outcome = dataclasses.replace(response.outcome, result=result_of(4, 10.0))
    read: dict[str, Any] = {"energy": energy, "readings": {"clock_mhz": "1500"}}
    [event] = agent.hear(dataclasses.replace(response, outcome=outcome, **read))
    assert isinstance(event, AttemptEnded)
    [rank] = event.outcome.ranks
    assert rank.energy == energy and rank.result is not None
    assert rank.result.details == {"clock_mhz": "1500"}


# ---------------------------------------------------------------- agents that are away


@pytest.mark.parametrize(
    ("error", "lost_after_s"),
    [(ActorUnavailableError("the connection broke", None), 20.0), (RuntimeError("it died"), 0.0)],
    ids=["away", "dead"],
)
def test_an_agent_that_is_away_is_asked_every_second_and_one_that_died_is_lost(
    error: Exception, lost_after_s: float
) -> None:
    """That no message is lost or doubled is a law, of ``lossy_exchange.py``."""
    clock, ray, lost = Clock(), LossyRay(), list[Exception]()
    node = LossyNode(ray)
    channel = AgentChannel(node, calls=ray, clock=clock, arrived=lambda _: None, lost=lost.append)
    while not lost:
        channel.send()
        calls = [then for _, then in ray.under_way if then is not None]
        assert len(calls) == (clock.now == int(clock.now))
        for then in calls:
            then(error)
        ray.under_way.clear()
        clock.now += 0.5
    assert (lost, clock.now - 0.5) == ([error], lost_after_s)


# ---------------------------------------------------------------- outcomes that a node keeps


FIRST, NEXT = (Owner(run_id="run", invocation_id=name) for name in ("first", "next"))


@pytest.fixture(autouse=True)
def own_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes.tempfile, "gettempdir", lambda: str(tmp_path))


def run(keeper: OutcomeKeeper, attempt_id: str, rank: int = 0) -> None:
    attempt = dataclasses.replace(ATTEMPT, attempt_id=attempt_id)
    keeper.keep(Run("w", attempt, rank), Ended("w", attempt_id, b"outcome", False))


def kept() -> list[KeptOutcome]:
    return list(kept_outcomes((), "run"))


def test_an_outcome_is_kept_until_its_row_is_durable() -> None:
    keeper = OutcomeKeeper(FIRST)
    run(keeper, "job-1")
    run(keeper, "job-10", rank=1)
    assert [(run.attempt.attempt_id, run.rank) for run, _ in kept()] == [
        ("job-1", 0),
        ("job-10", 1),
    ]
    assert kept()[0][1] == Ended("w", "job-1", b"outcome", False)
    keeper.durable(["job-1"])
    assert [run.rank for run, _ in kept()] == [1]
    keeper.durable(["job-10"])
    assert kept() == []


def test_another_agent_of_the_same_driver_keeps_what_is_there() -> None:
    run(OutcomeKeeper(FIRST), "job-1")
    OutcomeKeeper(FIRST)
    assert len(kept()) == 1
    OutcomeKeeper(NEXT)
    assert kept() == []


def test_an_outcome_of_another_version_is_left_out_and_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unpickled by position, its values would be those of other fields."""
    keeper = OutcomeKeeper(FIRST)
    run(keeper, "job-1")
    run(keeper, "job-2")
    [path] = tmp_path.glob("nightgrid-outcomes-*/run/first.job-1.0")
    data = path.read_bytes()
    path.write_bytes(b"0" * 16 + data[16:])
    assert [run.attempt.attempt_id for run, _ in kept()] == ["job-2"]
    said = "1 outcome kept by another version of Nightgrid: left out, those jobs are measured again"
    assert said in capfd.readouterr().err


def test_a_layout_tells_the_fields_of_all_records_in_order() -> None:
    def layout(*names: str) -> bytes:
        inner = dataclasses.make_dataclass("Inner", [(name, int) for name in names])
        return layout_of(dataclasses.make_dataclass("Outer", [("inner", tuple[inner, ...] | None)]))

    assert layout("a", "b") == layout("a", "b")
    assert len({layout("a", "b"), layout("b", "a"), layout("a")}) == 3


def test_what_did_not_run_is_not_kept() -> None:
    OutcomeKeeper(FIRST).keep(Run("w", ATTEMPT), Ended("w", "job-2", None, True))
    run(OutcomeKeeper(None), "job-3")
    assert kept() == []


def test_a_directory_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    keeper = OutcomeKeeper(FIRST)
    run(keeper, "job-1")
    [base] = tmp_path.glob("nightgrid-outcomes-*")
    base.chmod(0o755)
    assert kept_here("run") == []
    run(OutcomeKeeper(FIRST), "job-2")
    base.chmod(0o700)
    assert len(kept_here("run")) == 1


def test_what_lies_for_a_week_goes_with_its_directory(tmp_path: Path) -> None:
    run(OutcomeKeeper(FIRST), "job-1")
    [base] = tmp_path.glob("nightgrid-outcomes-*")
    for name in ("empty", "forgotten", "young"):
        (base / name).mkdir(mode=0o700)
    (base / "forgotten" / "a.job-1.0").touch()
    (base / "young" / "a.job-1.0").touch()
    long_ago = time.time() - outcomes.FORGOTTEN_S - 60
    for path in (base / "forgotten" / "a.job-1.0", *base.iterdir()):
        os.utime(path, (long_ago, long_ago))
    assert len(kept_here("run")) == 1
    assert {path.name for path in base.iterdir()} == {"run", "young"}
