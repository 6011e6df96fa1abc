"""News of several nodes that are handled together: none waits for others once one is urgent."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.domain.events import CardsHeld, Event
from orchestrator.on_ray import executor
from orchestrator.on_ray.executor import RayExecutor
from orchestrator.worker.messages import GATHER_S, Ended, Response, ResponseBatch, Stopped


class Nodes:
    """In the place of claims, and of calls to their agents. The first wait brings an event, each
    other one a response; when all were heard, a wait lasts as long as it may."""

    poll_interval_s = 60.0

    def __init__(self, *responses: Response) -> None:
        self.limits_s: list[float] = []  # of the waits
        self._responses = iter(responses)
        self._known: dict[str, Any] = {}

    def claims(self, **known: Any) -> Nodes:
        """In the place of ``Claims``."""
        self._known = known
        return self

    def poll(self) -> None:
        """Nothing is asked."""

    def joined(self) -> list[Any]:
        """No claims."""
        return []

    def lose_if_silent(self, _: str) -> None:
        """Nothing is lost."""

    def wait(self, timeout_s: float) -> None:
        """Bring what is next."""
        self.limits_s.append(timeout_s)
        if len(self.limits_s) == 1:
            self._known["held"](())
        elif (response := next(self._responses, None)) is not None:
            claim = SimpleNamespace(node=SimpleNamespace(node_id="n", cards=()))
            self._known["arrived"](claim, ResponseBatch(1, (response,), 0, None, None, False))
        else:
            time.sleep(timeout_s)


def events_of(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The first events of an executor on these nodes."""
    monkeypatch.setattr(executor, "Claims", nodes.claims)
    monkeypatch.setattr(executor, "Calls", lambda: nodes)
    monkeypatch.setattr(executor, "ControlStore", lambda: SimpleNamespace(collect=lambda: None))
    monkeypatch.setattr(executor, "end_predecessors", lambda: ())
    return RayExecutor(run="night").events(60.0)


def test_an_urgent_response_ends_the_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can come at any moment of it."""
    nodes = Nodes(Stopped("w-1"), Stopped("w-2"))
    [event] = events_of(nodes, monkeypatch)
    assert isinstance(event, CardsHeld)
    _, gathering_s = nodes.limits_s
    assert 0.0 < gathering_s <= GATHER_S


def test_others_are_waited_for_while_none_is_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes meanwhile does not end the wait."""
    nodes = Nodes(Ended("w", "a-1", None, False, more=True))
    began = time.monotonic()
    assert len(events_of(nodes, monkeypatch)) == 1
    assert time.monotonic() - began >= GATHER_S
    assert len(nodes.limits_s) >= 3 and 0.0 < nodes.limits_s[2] <= GATHER_S
