"""Requests between a driver and a node, over calls that get lost, come twice, or overtake others.

The real ``AgentChannel`` is on one side, the real ``Outbox`` and ``Inbox`` are on the other.
Between them is a Ray that keeps no promise but one: a call that is made may arrive at any time, or
never. The test checks what both sides count on: every request is read once and in order, and every
response is heard once and in order.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from orchestrator.on_ray.channel import AgentChannel, Calls, Then
from orchestrator.scheduler.invariants import InvariantViolated
from orchestrator.worker.protocol import Inbox, Outbox, ResponseBatch, Stop, Stopped

REQUESTS = 60
#: With three calls in ten lost, all has come through long before.
PATIENCE = 4000


class LossyRay(Calls):
    """Calls under way, of which any may come next."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[tuple[Callable[[], Any], Then | None]] = []

    def add(self, call: Any, then: Then) -> None:
        self.under_way.append((call, then))


class LossyNode:
    """An agent that reads requests and responds to each."""

    def __init__(self, ray: LossyRay) -> None:
        self.ray = ray
        self.responses, self.requests = Outbox[Stopped](), Inbox[Stop]()
        self.read: list[str] = []
        self.submit, self.exchange = Remote(self, self._submit), Remote(self, self._exchange)

    def _submit(self, first: int, requests: tuple[Stop, ...]) -> None:
        for request in self.requests.new(first, requests):
            self.read.append(request.worker_id)
            self.responses.put(Stopped(request.worker_id))

    def _exchange(self, received: int) -> ResponseBatch:
        self.responses.confirm(received)
        first, responses = self.responses.pending()
        return ResponseBatch(first, responses, self.requests.received, None, None, False)


class Remote:
    """A method of an actor."""

    def __init__(self, node: LossyNode, act: Callable[..., Any]) -> None:
        self.node, self.act = node, act

    def options(self, **_: Any) -> Remote:
        return self

    def remote(self, *arguments: Any) -> Callable[[], Any]:
        call = lambda: self.act(*arguments)  # noqa: E731
        if self.act.__name__ == "_submit":  # nobody waits for its response
            self.node.ray.under_way.append((call, None))
        return call


def run_exchange(seed: int) -> None:
    """One exchange of requests.

    Raises:
        InvariantViolated: something was lost, doubled or overtaken; it names the seed.
    """
    from ray.exceptions import ActorUnavailableError

    def must(holds: bool, message: str) -> None:
        if not holds:
            raise InvariantViolated(f"{message}\nreplay: run_exchange({seed})")

    draw = Random(f"exchange {seed}")
    now, heard = 0.0, list[str]()
    ray = LossyRay()
    node = LossyNode(ray)
    gone: list[Exception] = []
    channel = AgentChannel(
        node,
        calls=ray,
        clock=lambda: now,
        arrived=lambda batch: heard.extend(response.worker_id for response in batch.responses),
        lost=gone.append,
    )
    lost_share = draw.choice([0.0, 0.1, 0.3])
    names = [f"w{number}" for number in range(REQUESTS)]
    written = 0
    for _ in range(PATIENCE):
        if heard == names == node.read:
            break
        while written < REQUESTS and draw.random() < 0.3:
            channel.put(Stop(names[written], "test"))
            written += 1
        channel.send()
        now += draw.uniform(0.0, 1.0)
        while ray.under_way and draw.random() < 0.7:
            call, then = ray.under_way.pop(draw.randrange(len(ray.under_way)))
            arrives, answered = draw.random() >= lost_share, draw.random() >= lost_share
            value = call() if arrives else None
            if arrives and draw.random() < 0.05:  # Ray may run a call again after a broken link
                call()
            if then is not None:
                then(value if arrives and answered else ActorUnavailableError("away", None))
            channel.heard_at = now  # a node that stays away for long is lost: another test
        known = node.read == names[: len(node.read)]
        must(known, f"requests were read out of order or twice: {node.read[-3:]}")
        must(
            heard == names[: len(heard)],
            f"responses were heard out of order or twice: {heard[-3:]}",
        )
    must(node.read == names, f"{REQUESTS - len(node.read)} requests never arrive")
    must(heard == names, f"{REQUESTS - len(heard)} responses are never heard")
    must(not gone, f"the node counts as lost: {gone}")
