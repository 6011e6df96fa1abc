"""The driver's side of attempts that were given ahead, with agents that answer as they are told."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from domain_cases import a_worker
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import job, node
from scripted_worker import unreadable_result

from orchestrator.domain.attempt import Attempt, Outcome, RankOutcome, WorkerInfo
from orchestrator.domain.events import AttemptEnded, Event, RunAttempt, StartWorker, WorkerStopped
from orchestrator.domain.failure import Failure, FailureClass
from orchestrator.domain.job import State
from orchestrator.on_ray.worker_pool import WorkerPool
from orchestrator.worker.messages import Ended, ResponseBatch, Run, Started
from orchestrator.worker.outcome_bytes import packed

NODE = node("n1", cards=1)


class Agents:
    """A pool with one worker, and what it sends and tells."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.told: list[Event] = []
        channel = SimpleNamespace(put=self.sent.append, show_job=lambda *_: None)
        facts = SimpleNamespace(address="", threads=1, cores=1, server="", log_dir="", compiled="")
        facts.idle_memory_bytes = {}
        claim: Any = SimpleNamespace(node=NODE, facts=facts, channel=channel)
        self.pool = WorkerPool(
            claim_of=lambda _: claim,
            factory="a:b",
            clock=lambda: 0.0,
            tell=self.told.append,
            label=str,
        )
        self.pool.perform(StartWorker(worker_id="w", card=NODE.cards[0]))
        self.hear(Started("w", a_worker(worker_id="w")))
        self.sent.clear()

    def hear(self, *responses: Any) -> list[Event]:
        """Responses of the agent; what the schedule is told of them."""
        self.told.clear()
        self.pool.handle(ResponseBatch(1, responses, 1, None, None, False))
        return list(self.told)

    def run(self, name: str, after: str = "") -> bool:
        """Give an attempt; return whether it went to the agent."""
        attempt = Attempt(attempt_id=name, job_id=name, number=1, job=job(name), cards=NODE.cards)
        before = len(self.sent)
        self.pool.perform(RunAttempt(attempt=attempt, worker_ids=("w",), after=after))
        return len(self.sent) > before


def ended(name: str, state: State = State.SUCCEEDED, *, gone: bool = False) -> Ended:
    failure = Failure(failure_class=FailureClass.CRASH, message="died")
    outcome = RankOutcome(rank=0, state=state, started_at=1.0, ended_at=2.0)
    if state is not State.SUCCEEDED:
        outcome = dataclasses.replace(outcome, failure=failure)
    return Ended("w", name, outcome, gone)


def ends(events: list[Event]) -> dict[str, State]:
    """The attempts that ended, and how."""
    return {e.outcome.attempt_id: e.outcome.state for e in events if isinstance(e, AttemptEnded)}


def test_attempts_given_ahead_go_to_the_agent_at_once_and_end_in_order() -> None:
    """Each with the one that it follows."""
    agents = Agents()
    assert agents.run("a") and agents.run("b", "a") and agents.run("c", "b")
    assert [each.after for each in agents.sent if isinstance(each, Run)] == ["", "a", "b"]
    for name in "abc":
        assert ends(agents.hear(ended(name))) == {name: State.SUCCEEDED}
    assert not agents.pool.busy
    assert agents.run("d", "c"), "its predecessor succeeded, so it may begin"


@pytest.mark.parametrize("gone", [False, True])
def test_of_what_is_behind_a_failure_nothing_is_told(*, gone: bool) -> None:
    """Nor of what the schedule gives behind it before it has heard."""
    agents = Agents()
    agents.run("a")
    agents.run("b", "a")
    told = agents.hear(ended("a", State.FAILED, gone=gone))
    assert ends(told) == {"a": State.FAILED}
    assert any(isinstance(each, WorkerStopped) for each in told) is gone
    assert not agents.run("c", "b") and not agents.run("d", "a")
    assert agents.hear(Ended("w", "b", None, gone), Ended("w", "c", None, gone)) == []
    assert not agents.pool.busy


def test_a_worker_that_is_gone_after_a_success_blames_nobody() -> None:
    """What is behind it has not begun: it is lost as with a node, then the worker is gone."""
    agents = Agents()
    agents.run("a")
    agents.run("b", "a")
    told = agents.hear(ended("a", gone=True), Ended("w", "b", None, True))
    assert ends(told) == {"a": State.SUCCEEDED, "b": State.LOST}
    [lost] = [each.outcome for each in told if isinstance(each, AttemptEnded)][1:]
    assert lost.failure is not None and lost.failure.failure_class is FailureClass.NODE_LOST
    assert isinstance(told[-1], WorkerStopped)


def test_what_an_agent_gives_back_is_told_as_never_begun() -> None:
    """The first of what waits; what is behind it goes without saying. The one that runs goes on."""
    agents = Agents()
    agents.run("a")
    agents.run("b", "a")
    agents.run("c", "b")
    told = agents.hear(Ended("w", "b", None, False), Ended("w", "c", None, False))
    [outcome] = [each.outcome for each in told if isinstance(each, AttemptEnded)]
    assert outcome == Outcome.of_unbegun("b")
    assert ends(agents.hear(ended("a"))) == {"a": State.SUCCEEDED}
    assert not agents.pool.busy


def test_with_a_node_only_what_ran_is_lost() -> None:
    """The schedule takes back what is behind it."""
    agents = Agents()
    agents.run("a")
    agents.run("b", "a")
    agents.told.clear()
    failure = Failure(failure_class=FailureClass.NODE_LOST, message="power")
    agents.pool.lose(NODE.node_id, failure)
    assert ends(agents.told) == {"a": State.LOST}
    assert isinstance(agents.told[-1], WorkerStopped)
    assert not agents.pool.busy


@given(st.lists(st.sampled_from(["give", "succeed", "fail"]), max_size=30))
def test_what_may_begin_is_always_heard_of(steps: list[str]) -> None:
    """By any history: a schedule that takes back what is behind a failure waits for nothing else,
    and the pool for nothing that it was not given."""
    agents, known, number = Agents(), list[str](), 0
    for step in steps:
        if step == "give":
            number += 1
            assert agents.run(f"a{number}", known[-1] if known else "")
            known.append(f"a{number}")
        elif known:
            state = State.SUCCEEDED if step == "succeed" else State.FAILED
            assert ends(agents.hear(ended(known[0], state))) == {known[0]: state}
            known = known[1:] if step == "succeed" else []
        assert agents.pool.busy is bool(known)


def test_an_outcome_has_the_worker_that_its_process_told_of_last() -> None:
    """A process says what it is with its first outcome and when that changes; before it has, as
    when it started."""
    agents = Agents()
    changed = a_worker(worker_id="w", threads=3)
    outcome = RankOutcome(rank=0, state=State.SUCCEEDED, started_at=1.0, ended_at=2.0)
    own = dataclasses.replace(outcome, worker=changed)

    def heard_of(name: str, data: bytes) -> WorkerInfo | None:
        assert agents.run(name)
        [end] = agents.hear(Ended("w", name, data, False))
        assert isinstance(end, AttemptEnded)
        return end.outcome.ranks[0].worker

    assert heard_of("a", packed(own, changed)) == a_worker(worker_id="w")
    assert heard_of("b", packed(own)) == changed
    assert heard_of("c", packed(own, changed)) == changed
    assert heard_of("d", packed(outcome)) is None


def test_a_new_process_is_known_by_an_outcome_that_cannot_be_read() -> None:
    """The process says only once what it is: that row has it, and the next, too."""
    agents, changed = Agents(), a_worker(worker_id="w", threads=3)
    succeeded = RankOutcome(rank=0, state=State.SUCCEEDED, started_at=1.0, ended_at=2.0)
    outcome = dataclasses.replace(succeeded, worker=changed)
    unreadable = dataclasses.replace(outcome, result=unreadable_result())
    for name, data, state in (
        ("a", packed(unreadable), State.LOST),
        ("b", packed(outcome, changed), State.SUCCEEDED),
    ):
        assert agents.run(name)
        [end] = agents.hear(Ended("w", name, data, False))
        assert isinstance(end, AttemptEnded) and end.outcome.state is state
        assert end.outcome.ranks[0].worker == changed
