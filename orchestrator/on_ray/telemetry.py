"""What the cards of real nodes say of themselves, asked of their agents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from orchestrator.cluster import Card
from orchestrator.on_ray.calls import answer_of
from orchestrator.on_ray.claims import Claim
from workloads.devices.telemetry import CardTelemetry


class TelemetryPoll:
    """Asks the agent of every node every two seconds, with one call outstanding for each."""

    interval_s = 2.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, Mapping[Card, CardTelemetry]] = {}  # by node id
        self._asked: dict[Any, Claim] = {}  # outstanding call -> of whom
        self._next_at = 0.0

    def known(self) -> Mapping[Card, CardTelemetry]:
        """As last heard, of the nodes that are there."""
        return {card: read for cards in self._known.values() for card, read in cards.items()}

    def forget(self, node_id: str) -> None:
        """The node has left."""
        self._known.pop(node_id, None)

    def poll(self, claims: Iterable[Claim]) -> None:
        """Collect answers; when it is time, ask anew."""
        import ray

        if self._asked:
            ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
            for call in ready:
                claim, answer = self._asked.pop(call), answer_of(call)
                if claim.joined and isinstance(answer, Mapping):
                    cards = claim.node.cards
                    self._known[claim.node.node_id] = {
                        card: answer[card.index] for card in cards if card.index in answer
                    }
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + self.interval_s
        waiting = {claim.node.node_id for claim in self._asked.values()}
        for claim in claims:
            if not claim.node.emulated and claim.node.node_id not in waiting:
                self._asked[claim.agent.telemetry.remote()] = claim
