"""Claiming nodes: all free cards of a node at once, for an agent that holds them.

A node counts as joined when Ray has given its cards to our agent and the agent's process server
listens. It has left when Ray says so, or when its agent or server died: then every worker on it is
gone too, and if the node itself lives, it is claimed anew. Of a node that others had cards of, the
rest is claimed once it is free, as a node of its own that is part of the same server; until then
the rest is reported as held, so that jobs which need all of the server wait for it.

All that needs Ray's control store is asked beside the loop (``control_store.py``). While it is
silent no node is found and none is declared dead, the nodes that are ours work on, and no patience
with anything else runs out.

Runs of one cluster take turns (``run_queue.py``): nodes are claimed only in our turn, and until
then, and while somebody else has their cards, they are reported as held and waited for.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator import __version__
from orchestrator.domain.failure import Failure
from orchestrator.domain.job import Accelerator
from orchestrator.domain.topology import Node
from orchestrator.errors import ClusterError, ControlStoreLost
from orchestrator.on_ray.agent_channel import AgentChannel
from orchestrator.on_ray.calls import Calls
from orchestrator.on_ray.claim import Claim, cards_on_host, unclaimed
from orchestrator.on_ray.cluster import node_of, nodes_of
from orchestrator.on_ray.control_store import ControlStore, RayNode, is_absence
from orchestrator.on_ray.failures import agent_failure, node_lost
from orchestrator.on_ray.held_cards import HeldCards
from orchestrator.on_ray.placement import end_agent, start_agent
from orchestrator.on_ray.run_queue import RunQueue
from orchestrator.worker.host_server import SharedServer
from orchestrator.worker.messages import ResponseBatch
from orchestrator.worker.process_settings import may_raise_priority
from orchestrator.worker.redaction import redact

CLAIM_PATIENCE_S = 60.0
RETRY_S = 5.0
_LOOK_S = 0.1  # that the loop waits for an answer which mostly takes a few milliseconds
_CLOSE_S = 15.0
#: Time that the control store may be silent while no node is ours. Nodes that Ray ends for want of
#: it are gone after 60 s, and count as lost 20 s later; one that was only frozen is back before.
SILENCE_PATIENCE_S = 90.0
#: The same from the moment in which the last node was lost: less than the minute after which jobs
#: that no card is left for are given up, since another driver may yet have cards for them.
BEREFT_PATIENCE_S = 45.0
#: An agent answers every 5 s at least, also with nothing to say. One that is silent for so long is
#: lost with its node. Ray notices a frozen node as soon, and one of a restarted head in minutes.
AGENT_PATIENCE_S = 60.0
#: The same once the head was started anew: every agent of the cluster before it ends.
ORPHANED_AGENT_PATIENCE_S = 20.0
#: A loop that has not looked for so long was frozen itself: its agents may have spoken.
_ABSENCE_S = 5.0


class Claims:
    """The nodes claimed by one executor."""

    poll_interval_s = 1.0

    def __init__(
        self,
        *,
        run: str,
        accelerators: Collection[Accelerator] | None,
        log_dir: Path | None,
        preload: Sequence[str],
        clock: Callable[[], float],
        calls: Calls,
        store: ControlStore,
        joined: Callable[[Claim], None],
        arrived: Callable[[Claim, ResponseBatch], None],
        left: Callable[[Claim, Failure], None],
        held: Callable[[tuple[Node, ...]], None] = lambda _: None,
        silent: Callable[[bool], None] = lambda _: None,
        queue: RunQueue | None = None,
        shared: SharedServer | None = None,
    ) -> None:
        self._run = run
        self._calls = calls
        self._store = store
        self._joined = joined
        self._arrived = arrived
        self._left = left
        self._tell_silent = silent
        self._told_silent = False
        self.held = HeldCards(queue, store, clock, held)
        self._accelerators = accelerators
        self._log_dir = log_dir
        self._preload = preload
        self._plain_agents = may_raise_priority()  # nodes are made alike; one that differs says so
        self._shared = shared
        self._clock = clock
        self.by_node: dict[str, Claim] = {}  # by node id
        self.retry_at: dict[str, float] = {}
        self._next_poll = 0.0
        self._polled_at = clock()
        self._empty_since = clock()
        self._last_ours: float | None = None  # when a node was ours, the last time
        self._trouble = ""  # why the last claim came to nothing
        self._looking = False  # whether the control store was asked and has not answered yet
        self._error: Exception | None = None  # what its answer leads to, for ``poll``

    def of(self, node_id: str) -> Claim | None:
        """The claim on a node that has joined and not left."""
        claim = self.by_node.get(node_id)
        return claim if claim is not None and claim.joined else None

    def joined(self) -> list[Claim]:
        """The claims on all nodes that have joined and not left."""
        return [claim for claim in self.by_node.values() if claim.joined]

    def poll(self) -> None:
        """Compare Ray's list of nodes with ours, at most once a second.

        Raises:
            ControlStoreLost: it has been silent for long, and no node is ours.
            ClusterError: not one node could be claimed for a minute.
        """
        self._store.collect()
        now = self._clock()
        if now < self._next_poll:
            return
        self._next_poll = now + self.poll_interval_s
        self.held.look()
        self._mind_agents(now, absent_s=now - self._polled_at)
        self._polled_at = now
        if not self._looking:
            self._looking = True
            self._store.ask(self._store.nodes, self._looked, wait_s=_LOOK_S)
        self._mind_silence(now)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """End every worker on every node and give the cards back."""
        with contextlib.suppress(Exception):
            self._close_agents()
        for claim in self.by_node.values():
            if claim.opened_channel is not None:
                claim.opened_channel.close()
            self._release(claim)
        self.by_node.clear()
        self.held.leave()
        self._store.close(0.0 if self._store.silent_s else _CLOSE_S)

    def _close_agents(self) -> None:
        """Have the agents end their workers. Without a connection none can be reached, and Ray
        might join another cluster for the call: agents end with the connection by themselves."""
        import ray

        there = [claim for claim in self.by_node.values() if claim.found is not None]
        if not there or not ray.is_initialized():
            return
        closing = [claim.agent.close.remote() for claim in there]
        ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)

    # ------------------------------------------------------------ what the control store says

    def _looked(self, value: Any) -> None:
        """Take up what the control store said."""
        self._looking = False
        if isinstance(value, BaseException):
            if not is_absence(value):  # of a node's resources, say
                self._error = value if isinstance(value, Exception) else ClusterError(str(value))
            return
        now = self._clock()
        ray_nodes: Mapping[str, RayNode] = value
        self.held.keep(ray_nodes)
        for claim in list(self.by_node.values()):
            if claim.ray_id not in ray_nodes:
                self.lose(claim, node_lost("Ray declared it dead"))
            elif not claim.joined and now - claim.since > CLAIM_PATIENCE_S:
                self._trouble = f"the cards of {claim.node.name} are in use by others"
                self.held.add(claim.node, taken=True)
                self.lose(claim, node_lost(self._trouble))
        try:
            self._claim_what_is_new(ray_nodes, now)
        except ClusterError as error:
            self._error = error

    def _claim_what_is_new(self, ray_nodes: Mapping[str, RayNode], now: float) -> None:
        wanted = [
            node
            for node in nodes_of(ray_nodes.values())
            if self._accelerators is None or node.accelerator in self._accelerators
        ]
        for node in wanted:
            new = unclaimed(node, self.by_node)
            if new is None:
                continue
            if not self.held.in_turn:
                self.held.add(new, taken=new is not node)
            elif self.retry_at.get(new.node_id, 0) <= now:
                if new is not node:
                    self.held.add(new, taken=True)
                cards_here = cards_on_host(ray_nodes[node.node_id], wanted, ray_nodes)
                self._claim(new, ray_nodes[node.node_id], cards_here)
        self.held.say()
        if self.joined() or self.held:
            self._empty_since = now
        elif now - self._empty_since > CLAIM_PATIENCE_S + RETRY_S:
            kinds = "/".join(sorted(self._accelerators or Accelerator))
            why = self._trouble or f"the cluster has no node with {kinds}"
            raise ClusterError(f"no card could be had for {CLAIM_PATIENCE_S:.0f} s: {why}")

    def _mind_silence(self, now: float) -> None:
        """While the control store is silent, no other patience runs out; its own does once there
        is nothing left that works without it."""
        if self.joined():
            self._last_ours = now
        silent_s = self._store.silent_s
        if self._told_silent is not (silent_s > 0):
            self._told_silent = silent_s > 0
            self._tell_silent(self._told_silent)
        if not silent_s:
            return
        patience_s = RETRY_S if self._store.replaced else SILENCE_PATIENCE_S
        gone = silent_s > patience_s or self._bereft_s(now, silent_s) > BEREFT_PATIENCE_S
        if gone and not self.joined():
            raise ControlStoreLost(f"{self._store.trouble}, and no node of the cluster is left")
        self._empty_since = now
        for claim in self.by_node.values():
            if not claim.joined:
                claim.since = now

    def _mind_agents(self, now: float, absent_s: float) -> None:
        """Give up nodes whose agents are silent; time in which nobody listened does not count."""
        patience_s = ORPHANED_AGENT_PATIENCE_S if self._store.replaced else AGENT_PATIENCE_S
        for claim in self.joined():
            if absent_s > _ABSENCE_S:
                claim.channel.heard_at = min(claim.channel.heard_at + absent_s, now)
            self.lose_if_silent(claim, patience_s)

    def lose_if_silent(self, claim: Claim, patience_s: float) -> bool:
        """Give up a node whose agent has been silent for so long; True if it was."""
        silent = self._clock() - claim.channel.heard_at > patience_s
        if silent:
            self.lose(claim, node_lost(f"its agent has not answered for {patience_s:.0f} s"))
        return silent

    def _bereft_s(self, now: float, silent_s: float) -> float:
        """Time since the last of our nodes was lost while the control store is silent."""
        return 0.0 if self._last_ours is None else min(now - self._last_ours, silent_s)

    # ------------------------------------------------------------ one node

    def _claim(self, node: Node, ray_node: RayNode, cards_on_host: int) -> None:
        """Ask for the node's free cards and start its agent; the answers come as calls end."""
        since, plain = self._clock(), self._plain_agents
        claim = Claim(node=node, ray_node=ray_node, since=since, plain=plain)
        self.by_node[node.node_id] = claim
        serve = (
            str(ray_node["NodeManagerAddress"]),
            node.accelerator.value,
            self._preload if node.computes_on_host else (),
            cards_on_host,
            str(self._log_dir.resolve()) if self._log_dir else None,
            self._shared if node.computes_on_host else None,
        )
        self._store.ask(
            lambda: start_agent(self._run, node, ray_node, serve, plain=plain),
            lambda value: self._opened(claim, value),
        )

    def _opened(self, claim: Claim, value: Any) -> None:
        """Ray knows of the claim: wait for its agent."""
        node = claim.node
        current = self.by_node.get(node.node_id) is claim
        if isinstance(value, BaseException):
            if current:
                self._failed(claim, "its cards cannot be claimed", value)
        elif value is None:
            if current:
                del self.by_node[node.node_id]
                self.retry_at[node.node_id] = self._clock() + RETRY_S
                self._trouble = f"{node.name} has no free {node.accelerator} card"
                self.held.add(node, taken=True)
        else:
            claim.opened = value
            if current:
                self._calls.add(claim.opened.serve, lambda got: self._facts_came(claim, got))
            else:  # it was given up meanwhile
                self._release(claim)

    def _facts_came(self, claim: Claim, value: Any) -> None:
        """The agent has our cards and is at work: count the node as joined."""
        node = claim.node
        if self.by_node.get(node.node_id) is not claim:
            return
        if isinstance(value, PermissionError) and claim.plain:
            self._plain_agents = False
            self.lose(claim, node_lost(str(value)))
            self.retry_at[node.node_id] = self._clock()
            return
        if isinstance(value, Exception):
            self._failed(claim, "the agent cannot start", value)
            return
        if value.version != __version__:
            self._failed(claim, "Nightgrid is", ValueError(f"{value.version}, not {__version__}"))
            return
        if node.accelerator.spec.ray_indices:
            try:
                indices = tuple(sorted(map(int, value.cards)))
            except ValueError as error:
                self._failed(claim, "cannot read which cards are ours", error)
                return
            there = node_of(claim.ray_node, node.name, node.accelerator, indices)
            size = max(there.server_cards, node.server_cards)
            claim.node = replace(node, card_indices=indices, server_cards=size)
        claim.found = value
        self.held.remove(node.server_id)
        claim.opened_channel = AgentChannel(
            claim.agent,
            calls=self._calls,
            clock=self._clock,
            arrived=lambda batch: self._responded(claim, batch),
            lost=lambda error: self.lose(claim, agent_failure(error)),
        )
        if not node.emulated:  # an emulated card has no sensors
            claim.agent.watch_cards.remote(node.accelerator.device)
        self._joined(claim)

    def _responded(self, claim: Claim, batch: ResponseBatch) -> None:
        self._arrived(claim, batch)
        if batch.server_gone:
            self.lose(claim, node_lost("its process server died"))

    def _failed(self, claim: Claim, what: str, error: BaseException) -> None:
        trouble = (
            f"{claim.node.name}: {what}: {' '.join(redact(str(error), os.environ).split())[:500]}"
        )
        if trouble != self._trouble:
            logging.getLogger(__name__).warning("node left out: %s", trouble)
        self._trouble = trouble
        self.held.remove(claim.node.server_id)
        self.lose(claim, node_lost(trouble))

    def lose(self, claim: Claim, failure: Failure) -> None:
        """Forget a claim and end its agent, and with it every worker there; a node that is still
        there is claimed again after a while."""
        if self.by_node.get(claim.node.node_id) is not claim:
            return
        del self.by_node[claim.node.node_id]
        self.retry_at[claim.node.node_id] = self._clock() + RETRY_S
        if claim.opened_channel is not None:
            claim.opened_channel.close()
            self._left(claim, self._with_silence(failure))
        self._release(claim)

    def _with_silence(self, failure: Failure) -> Failure:
        """A node that is lost while the control store is silent was most likely lost by that."""
        if not (trouble := self._store.trouble):
            return failure
        return replace(failure, message=f"{trouble}; {failure.message}")

    def _release(self, claim: Claim) -> None:
        """Have Ray end the agent and free the cards, if they were ever had."""
        if claim.opened is not None:
            opened, claim.opened = claim.opened, None
            self._store.ask(lambda: end_agent(opened))
