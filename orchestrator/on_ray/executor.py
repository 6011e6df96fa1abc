"""Processes on cards through Ray: performs commands, reports events, decides nothing.

The schedule owns the cards; Ray owns the processes. Ray hands out the first free card indices,
which on Gaudi makes card sets that are not legal, and it lets a waiting 8-card request starve. So
for each node one agent takes all free cards at once, as one bundle of a placement group: Ray's
accounts are right, nobody else gets a card there, and which card a worker gets is ours to say.

Requests to a node wait until ``events`` is entered and go there in one call; one other call for
each node brings its responses (``agent_channel.py``). A Ray call costs more than all else that a
short job costs, and so a hundred jobs do not need a hundred.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.domain.events import (
    CardsHeld,
    ClusterSilent,
    Event,
    NodeJoined,
    NodeLeft,
    RunAttempt,
    StartWorker,
    StopWorker,
)
from orchestrator.domain.executor import Progress
from orchestrator.domain.failure import Failure
from orchestrator.domain.job import Accelerator, Job
from orchestrator.domain.topology import Card
from orchestrator.on_ray.calls import Calls
from orchestrator.on_ray.claim import Claim
from orchestrator.on_ray.claims import Claims
from orchestrator.on_ray.control_store import ControlStore
from orchestrator.on_ray.predecessors import end_predecessors
from orchestrator.on_ray.run_queue import RunQueue
from orchestrator.on_ray.worker_pool import WorkerPool
from orchestrator.worker.host_server import PRELOAD, SharedServer
from orchestrator.worker.messages import GATHER_S, ResponseBatch
from workloads.devices.monitoring.telemetry import CardTelemetry

_IDLE_S = 60.0  # that a run with cards has nothing to do on them before it counts as waiting


class RayExecutor:
    """An ``Executor`` on the Ray cluster that this process has joined (``ray_cluster.py``).

    Args:
        run: the run's name, shown in the dashboard.
        accelerators: claim only nodes with these kinds of cards; all when None.
        log_dir: where workers log, if every node can write there; else each node's Ray session.
        factory: "module:callable" that makes the worker inside its process.
        preload: modules that nodes which compute on the CPU import once, before they fork their
            workers; none: each worker is a fresh interpreter.
        clock: the clock of the events and of every timeout; it never jumps.
        queue: the run's place among the runs of the cluster; None: it is ours alone.
        shared: the process server of this host, for nodes that compute on it.
        label: of a job in Ray's list of tasks.
    """

    def __init__(
        self,
        *,
        run: str,
        accelerators: Collection[Accelerator] | None = None,
        log_dir: Path | None = None,
        factory: str = "orchestrator.worker.card_worker:CardWorker",
        preload: Sequence[str] = PRELOAD,
        clock: Callable[[], float] = time.monotonic,
        queue: RunQueue | None = None,
        shared: SharedServer | None = None,
        label: Callable[[Job], str] = lambda job: job.label,
    ) -> None:
        """Join the nodes.

        Raises:
            ControlStoreLost: Ray's control store went meanwhile.
        """
        self._clock = clock
        self._busy_at = clock()  # when something ran, the last time
        self._telemetry: dict[str, Mapping[Card, CardTelemetry]] = {}  # by node id
        self._calls = Calls()
        self._events: deque[Event] = deque()
        self._urgent = False  # whether a worker may wait for what is made of them
        self._pool = WorkerPool(
            claim_of=lambda node_id: self.claims.of(node_id),
            factory=factory,
            clock=clock,
            tell=self._events.append,
            label=label,
        )
        self._store = ControlStore()
        for name in end_predecessors():
            logging.getLogger(__name__).warning("ended, of an earlier driver of the run: %s", name)
        self.claims = Claims(
            run=run,
            accelerators=accelerators,
            log_dir=log_dir,
            preload=preload,
            clock=clock,
            calls=self._calls,
            store=self._store,
            joined=self._node_joined,
            arrived=self._responded,
            left=self._node_left,
            held=lambda nodes: self._events.append(CardsHeld(at=self._clock(), nodes=nodes)),
            silent=lambda silent: self._events.append(
                ClusterSilent(at=self._clock(), silent=silent)
            ),
            queue=queue,
            shared=shared,
        )
        self.claims.poll()

    # ------------------------------------------------------------ the protocol

    def perform(self, command: StartWorker | StopWorker | RunAttempt) -> None:
        """Carry out one command without waiting for its end."""
        self._pool.perform(command)

    def events(self, timeout_s: float) -> list[Event]:
        """Events since the last call; waits up to ``timeout_s`` for one.

        Raises:
            ControlStoreLost: Ray's control store is gone, and with it all nodes.
            ClusterError: no node could be claimed for a minute.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.claims.poll()
            for claim in self.claims.joined():
                claim.channel.send()
            left = max(0.0, deadline - time.monotonic())
            self._wait(0.0 if self._events else min(left, self.claims.poll_interval_s))
            if self._events:
                self._gather(min(left, GATHER_S))
            self._urgent = False
            self._pool.give_up_stops(self.claims.lose_if_silent)
            self._pool.show_jobs()
            if self._events or left == 0.0:
                break
        happened = list(self._events)
        self._events.clear()
        return happened

    def progress(self) -> Mapping[str, Progress]:
        """The busy workers, by worker id, as last heard."""
        return dict(self._pool.progress)

    def telemetry(self) -> Mapping[Card, CardTelemetry]:
        """Latest telemetry of the cards of real nodes."""
        return {card: read for cards in self._telemetry.values() for card, read in cards.items()}

    @property
    def trouble(self) -> str:
        """Describe a fault of the cluster while work goes on; empty if there is none."""
        return self._store.trouble

    @property
    def waiting(self) -> str:
        """The holders of the cards that the run waits for; empty while it has something to do."""
        if self._pool.busy:
            self._busy_at = self._clock()
        if self.claims.joined() and self._clock() - self._busy_at < _IDLE_S:
            return ""
        return self.claims.held.waits_for

    def close(self) -> None:
        """Stop every worker and release every card."""
        self.claims.close()
        self._calls.clear()

    def _wait(self, timeout_s: float) -> None:
        """Wait for an answer of an agent; before there is any agent, for the control store's."""
        if self._calls:
            self._calls.wait(timeout_s)
        else:
            self._store.wait(timeout_s)
        self._store.collect()

    def _gather(self, limit_s: float) -> None:
        """Wait for news of other nodes as well, until a worker may wait for what is made of it."""
        until = time.monotonic() + limit_s
        while not self._urgent and (rest_s := until - time.monotonic()) > 0.0:
            self._wait(rest_s)

    # ------------------------------------------------------------ nodes

    def _node_joined(self, claim: Claim) -> None:
        self._urgent = True
        self._events.append(NodeJoined(at=self._clock(), node=claim.node))

    def _node_left(self, claim: Claim, failure: Failure) -> None:
        """Everything on the node ends, then the node."""
        self._urgent = True
        reason, node_id = failure.message, claim.node.node_id
        message = f"node {claim.node.name} was lost: {reason}"
        self._pool.lose(node_id, replace(failure, message=message))
        self._telemetry.pop(node_id, None)
        self._events.append(NodeLeft(at=self._clock(), node_id=node_id, reason=reason))

    def _responded(self, claim: Claim, batch: ResponseBatch) -> None:
        self._urgent |= batch.urgent
        self._pool.handle(batch)
        if batch.telemetry is not None:
            self._telemetry[claim.node.node_id] = {
                card: batch.telemetry[card.index]
                for card in claim.node.cards
                if card.index in batch.telemetry
            }
