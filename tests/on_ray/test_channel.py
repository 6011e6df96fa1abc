"""Requests and responses: each arrives once and in order, whatever calls are lost or overtaken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.on_ray import outcomes
from orchestrator.on_ray.channel import AgentChannel, Calls, Then
from orchestrator.on_ray.outcomes import KeptOutcome, OutcomeKeeper, kept_here, kept_outcomes
from orchestrator.worker.orphans import Owner
from orchestrator.worker.protocol import (
    Ended,
    PendingResponses,
    Request,
    Resequencer,
    ResponseBatch,
    Run,
    Stop,
    Stopped,
    pickled,
    unpickled,
)


def stopped(*names: str) -> tuple[Stopped, ...]:
    return tuple(Stopped(name) for name in names)


def test_responses_come_again_until_they_are_acknowledged() -> None:
    """And keep their numbers."""
    responses = PendingResponses()
    for response in stopped("a", "b"):
        responses.put(response)
    assert responses.wait(0) == (1, stopped("a", "b"))
    assert responses.wait(0) == (1, stopped("a", "b"))
    responses.acknowledge(1)
    responses.put(Stopped("c"))
    assert responses.wait(0) == (2, stopped("b", "c"))
    responses.acknowledge(1)  # told late
    assert responses.wait(0) == (2, stopped("b", "c"))
    responses.acknowledge(3)
    assert responses.wait(0) == (4, ())


def test_batches_that_overtake_others_wait_for_them_and_none_is_read_twice() -> None:
    """In whichever order they come."""
    batches = Resequencer()
    assert batches.add(2, b"two") == []
    assert batches.add(3, b"three") == [] and batches.received == 0
    assert batches.add(1, b"one") == [b"one", b"two", b"three"]
    assert batches.add(2, b"two") == [] and batches.received == 3


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ray(Calls):
    """Calls that the test carries out, or loses."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Callable[[], Any], Then | None]] = []

    def add(self, call: Any, then: Then) -> None:
        self.made.append((call, then))


class Agent:
    """Responds as a ``NodeAgent`` does, and says when it was told to stop a worker."""

    def __init__(self, ray: Ray) -> None:
        self._ray = ray
        self._responses, self._batches = PendingResponses(), Resequencer()
        self.read: list[Request] = []
        self.submit, self.exchange = (Method(self, name) for name in ("_submit", "_exchange"))

    def remote(self, name: str, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        call = lambda: getattr(self, name)(*arguments)  # noqa: E731
        if name == "_submit":  # nobody waits for its response
            self._ray.made.append((call, None))
        return call

    def _submit(self, number: int, requests: bytes) -> None:
        for batch in self._batches.add(number, requests):
            for request in unpickled(batch):
                self.read.append(request)
                self._responses.put(Stopped(request.worker_id))

    def _exchange(self, acknowledged: int, batch: tuple[int, bytes] | None) -> bytes:
        if batch is not None:
            self._submit(*batch)
        self._responses.acknowledge(acknowledged)
        return pickled(
            ResponseBatch(*self._responses.wait(0), self._batches.received, None, None, False)
        )


class Method:
    def __init__(self, agent: Agent, name: str) -> None:
        self._agent, self._name = agent, name

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *arguments: Any) -> Callable[[], Any]:
        return self._agent.remote(self._name, arguments)


class Line:
    """A channel over calls that can be lost."""

    def __init__(self) -> None:
        self.ray, self.clock = Ray(), Clock()
        self.agent = Agent(self.ray)
        self.heard: list[str] = []
        self.lost: list[Exception] = []
        self.channel = AgentChannel(
            self.agent,
            calls=self.ray,
            clock=self.clock,
            arrived=lambda batch: self.heard.extend(
                response.worker_id for response in batch.responses
            ),
            lost=self.lost.append,
        )

    def write(self, *names: str) -> None:
        for name in names:
            self.channel.put(Stop(name, "test"))
        self.channel.send()

    def carry_out(self, error: Exception | None = None, *, arrives: bool = True) -> None:
        """Carry out the oldest call; with an error, its response is lost, and where it never
        ``arrives``, so is the call."""
        call, then = self.ray.made.pop(0)
        value = call() if arrives else None
        if then is not None:
            then(error or value)


def unavailable() -> Exception:
    from ray.exceptions import ActorUnavailableError

    return ActorUnavailableError("the connection broke", None)


def test_requests_go_with_the_call_that_asks_for_responses() -> None:
    """One call for both, while there is one to be made; else a call of their own."""
    line = Line()
    line.write("a", "b")
    assert len(line.ray.made) == 1
    line.write("c")
    assert len(line.ray.made) == 2
    line.carry_out()
    line.carry_out()
    assert [request.worker_id for request in line.agent.read] == ["a", "b", "c"]
    assert line.heard == ["a", "b"]
    line.channel.send()
    line.carry_out()
    assert line.heard == ["a", "b", "c"] and not line.lost


def test_a_response_that_is_lost_is_sent_again_and_handled_once() -> None:
    """The call did its work; what it said never came."""
    line = Line()
    line.write("a")
    line.carry_out(unavailable())
    assert line.heard == [] and len(line.agent.read) == 1
    line.channel.send()
    assert not line.ray.made, "not at once"
    line.clock.now += 1.0
    line.channel.send()
    line.carry_out()
    assert line.heard == ["a"] and len(line.agent.read) == 1
    line.channel.send()
    line.carry_out()
    assert line.heard == ["a"]


def test_a_batch_that_is_lost_is_sent_again_and_keeps_its_place() -> None:
    """The next one waits for it at the agent."""
    line = Line()
    line.channel.send()
    line.write("a")
    line.write("b")
    ask, lost, overtaking = line.ray.made
    line.ray.made = [overtaking, ask]
    del lost
    line.clock.now += 10.0
    line.carry_out()
    assert line.agent.read == []
    line.carry_out()  # the response says that nothing was received, so all is sent again
    while line.ray.made:
        line.carry_out()
    assert [request.worker_id for request in line.agent.read] == ["a", "b"]
    line.channel.send()
    line.carry_out()
    assert line.heard == ["a", "b"]


def test_an_agent_that_stays_away_is_lost() -> None:
    """Unavailable for a while is not; dead is at once."""
    line = Line()
    for _ in range(25):
        line.channel.send()
        if line.ray.made:
            line.carry_out(unavailable(), arrives=False)
        line.clock.now += 1.0
    assert [type(error).__name__ for error in line.lost] == ["ActorUnavailableError"]
    line = Line()
    line.channel.send()
    line.carry_out(RuntimeError("it died"), arrives=False)
    assert [str(error) for error in line.lost] == ["it died"]


# ---------------------------------------------------------------- outcomes that a node keeps


FIRST, NEXT = (Owner(run_id="run", invocation_id=name) for name in ("first", "next"))


@pytest.fixture(autouse=True)
def own_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes.tempfile, "gettempdir", lambda: str(tmp_path))


def run(keeper: OutcomeKeeper, attempt_id: str, rank: int = 0) -> None:
    """Run one rank to its end."""
    order: Any = SimpleNamespace(attempt_id=attempt_id, rank=rank, attempt=f'"{attempt_id}"')
    keeper.sent(Run("w", order, None))
    keeper.keep(Ended("w", attempt_id, b"outcome", False))


def kept() -> list[KeptOutcome]:
    return list(kept_outcomes((), "run"))


def test_an_outcome_is_kept_until_its_row_is_durable() -> None:
    """Whatever becomes of the agent meanwhile."""
    keeper = OutcomeKeeper(FIRST)
    run(keeper, "job-1")
    run(keeper, "job-10", rank=1)
    keeper.keep(Stopped("w"))
    assert [(found.attempt, found.rank) for found in kept()] == [('"job-1"', 0), ('"job-10"', 1)]
    assert kept()[0].ended == Ended("w", "job-1", b"outcome", False)
    keeper.durable(["job-1"])
    assert [found.rank for found in kept()] == [1]
    keeper.durable(["job-10"])
    assert kept() == []


def test_another_agent_of_the_same_driver_keeps_what_is_there() -> None:
    """The rows wait in the driver; the agents of the next driver forget them."""
    run(OutcomeKeeper(FIRST), "job-1")
    OutcomeKeeper(FIRST)
    assert len(kept()) == 1
    OutcomeKeeper(NEXT)
    assert kept() == []


def test_what_did_not_run_or_has_no_outcome_is_not_kept() -> None:
    """Nor anything without a run."""
    keeper = OutcomeKeeper(FIRST)
    keeper.keep(Ended("w", "job-1", b"outcome", False))
    keeper.sent(Run("w", SimpleNamespace(attempt_id="job-2", rank=0, attempt=""), None))  # type: ignore[arg-type]
    keeper.keep(Ended("w", "job-2", None, True))
    run(OutcomeKeeper(None), "job-3")
    assert kept() == []


def test_a_directory_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    """It may have been laid for us."""
    keeper = OutcomeKeeper(FIRST)
    run(keeper, "job-1")
    [base] = tmp_path.glob("nightgrid-outcomes-*")
    base.chmod(0o755)
    assert kept_here("run") == []
    run(OutcomeKeeper(FIRST), "job-2")
    base.chmod(0o700)
    assert len(kept_here("run")) == 1
