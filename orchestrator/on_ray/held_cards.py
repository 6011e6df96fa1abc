"""Cards that are there and not ours: out of our turn in the queue of runs, or in others' hands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from orchestrator.domain.topology import Node
from orchestrator.on_ray.control_store import ControlStore, is_absence
from orchestrator.on_ray.run_queue import RunQueue
from orchestrator.scheduling.run_queue import Standing, listed

_QUEUE_S = 2.0  # between two looks at the queue


class HeldCards:
    """The nodes whose cards a run waits for, and its turn to claim them.

    Args:
        queue: the run's place; None: the cluster is its alone.
        tell: told the nodes whenever they are others.
    """

    def __init__(
        self,
        queue: RunQueue | None,
        store: ControlStore,
        clock: Callable[[], float],
        tell: Callable[[tuple[Node, ...]], None],
    ) -> None:
        self._queue, self._store, self._clock, self._tell = queue, store, clock, tell
        self._standing: Standing | None = None
        self._next_look = 0.0
        self._nodes: dict[str, Node] = {}  # by id of the server, in part or as a whole
        self._taken: set[str] = set()  # ids of those which Ray did not give us in our turn
        self._told: tuple[Node, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def look(self) -> None:
        """Ask for the place in the queue, if it is time to."""
        if self._queue is not None and self._clock() >= self._next_look:
            self._next_look = float("inf")  # until there is an answer
            self._store.ask(self._queue.look, self._stood)

    def _stood(self, value: Any) -> None:
        """Take up the place in the queue. Without an answer the last one counts; where there can
        be no queue, Ray's accounts alone decide who gets which cards."""
        self._next_look = self._clock() + _QUEUE_S
        if isinstance(value, Standing):
            self._standing = value
        elif not is_absence(value):
            logging.getLogger(__name__).warning("there is no queue of runs here: %s", value)
            self._queue = self._standing = None

    @property
    def in_turn(self) -> bool:
        """Return whether the run may claim cards now."""
        if self._queue is None:
            return True
        return self._standing is not None and self._standing.may_claim

    def add(self, node: Node, *, taken: bool) -> None:
        """A node is there; ``taken``: Ray has no free card of it for us."""
        self._nodes[node.server_id] = node
        if taken:
            self._taken.add(node.server_id)

    def remove(self, server_id: str) -> None:
        """Nobody else has cards of a server."""
        self._nodes.pop(server_id, None)
        self._taken.discard(server_id)

    def keep(self, alive: Collection[str]) -> None:
        """Forget the servers that are not among these."""
        for server_id in set(self._nodes) - set(alive):
            self.remove(server_id)

    def say(self) -> None:
        """Tell the nodes, if they are others than before."""
        nodes = tuple(sorted(self._nodes.values(), key=lambda node: node.name))
        if nodes != self._told:
            self._told = nodes
            self._tell(nodes)

    @property
    def waits_for(self) -> str:
        """The holders of the cards that the run waits for; empty where it waits for none."""
        if self._queue is not None and self._standing is None:
            return ""
        if self._standing is not None and self._standing.why:
            return self._standing.why
        taken = [node for node in self._told if node.server_id in self._taken]
        if not taken:
            return ""
        kinds = "/".join(sorted({node.accelerator.value for node in taken}))
        where = listed([node.name for node in taken])
        others = self._queue.strangers if self._queue is not None else ()
        who = f"; other programs on the cluster: {listed(others)}" if others else ""
        return f"no run in the queue has the {kinds} cards of {where}, and they are not free{who}"

    def leave(self) -> None:
        """Give the place in the queue back."""
        if self._queue is not None:
            self._store.ask(self._queue.leave)
