"""Requests and responses: each arrives once and in order, whatever calls are lost or overtaken."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_cases import Clock
from schedule_cases import job, node

from orchestrator.core.outcome import Attempt
from orchestrator.on_ray import outcomes
from orchestrator.on_ray.channel import SEND_AGAIN_S, AgentChannel, Calls, Then
from orchestrator.on_ray.outcomes import KeptOutcome, OutcomeKeeper, kept_here, kept_outcomes
from orchestrator.worker.orphans import Owner
from orchestrator.worker.protocol import (
    Ended,
    Inbox,
    Outbox,
    Request,
    Response,
    ResponseBatch,
    Run,
    Stop,
    Stopped,
)

ATTEMPT = Attempt(
    attempt_id="job-1", job_id="job", number=1, job=job("job"), cards=node("n1", cards=2).cards
)


def test_messages_come_again_until_they_are_confirmed() -> None:
    outbox = Outbox[str]()
    outbox.put("a")
    outbox.put("b")
    assert outbox.pending() == outbox.pending() == (1, ("a", "b"))
    outbox.confirm(1)
    outbox.put("c")
    assert outbox.pending() == (2, ("b", "c"))
    outbox.confirm(1)  # late
    assert outbox.pending() == (2, ("b", "c"))
    outbox.confirm(3)
    assert outbox.pending() == (4, ())


def test_no_message_is_read_twice() -> None:
    inbox = Inbox[str]()
    assert inbox.new(1, "ab") == "ab" and inbox.received == 2
    assert inbox.new(1, "a") == "" and inbox.new(1, "abc") == "c"
    assert inbox.new(3, "cd") == "d" and inbox.received == 4


class Ray(Calls):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Callable[[], Any], Then | None]] = []

    def add(self, call: Any, then: Then) -> None:
        self.made.append((call, then))


class Agent:
    def __init__(self, ray: Ray) -> None:
        self._responses, self._requests = Outbox[Response](), Inbox[Request]()
        self.read: list[str] = []
        # Nobody waits for the answer to a submission.
        self.submit = Method(lambda *a: ray.made.append((lambda: self._submit(*a), None)))
        self.exchange = Method(lambda received: lambda: self._exchange(received))

    def _submit(self, first: int, requests: tuple[Stop, ...]) -> None:
        for request in self._requests.new(first, requests):
            self.read.append(request.worker_id)
            self._responses.put(Stopped(request.worker_id))

    def _exchange(self, received: int) -> ResponseBatch:
        self._responses.confirm(received)
        first, responses = self._responses.pending()
        return ResponseBatch(first, responses, self._requests.received, None, None, False)


class Method:
    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote

    def options(self, **_: Any) -> Method:
        return self


class Line:
    def __init__(self) -> None:
        self.ray, self.clock = Ray(), Clock()
        self.agent = Agent(self.ray)
        self.heard: list[str] = []
        self.lost: list[Exception] = []
        self.channel = AgentChannel(
            self.agent,
            calls=self.ray,
            clock=self.clock,
            arrived=lambda batch: self.heard.extend(r.worker_id for r in batch.responses),
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


def test_a_response_that_is_lost_is_sent_again_and_handled_once() -> None:
    line = Line()
    line.write("a", "b")
    line.carry_out()
    line.carry_out(unavailable())
    assert line.heard == [] and line.agent.read == ["a", "b"]
    line.channel.send()
    assert not line.ray.made, "not at once"
    line.clock.now += 1.0
    for _ in range(2):
        line.channel.send()
        line.carry_out()
    assert line.heard == line.agent.read == ["a", "b"]


def test_a_request_that_is_lost_is_sent_again_and_keeps_its_place() -> None:
    line = Line()
    line.write("a")
    lost, ask = line.ray.made
    line.ray.made = [ask]
    line.write("b")
    del lost, line.ray.made[-1]
    line.clock.now += SEND_AGAIN_S
    line.channel.send()
    line.carry_out()
    assert line.agent.read == []
    line.carry_out()
    assert line.agent.read == ["a", "b"]


def test_an_agent_that_stays_away_is_lost() -> None:
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
