"""Claims on nodes: an agent takes all free cards of a node at once.

A node joins when Ray has placed our agent on its cards and the agent's spawner listens. It leaves
when Ray, its agent or its spawner reports the end; a living node is claimed again. Cards in use by
others are claimed once free, as a further node of the same server; until then they are reported, so
that jobs which need the whole server wait. While the GCS is silent (``gcs.py``), no node is found
or declared dead, and claimed nodes work on. Nodes are claimed only in the run's turn
(``run_queue.py``).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from orchestrator import __version__
from orchestrator.core.errors import ClusterError, ControlStoreLost
from orchestrator.core.events import Event, MoreCards, NodeJoined
from orchestrator.core.job import Accelerator
from orchestrator.core.outcome import Failure, FailureClass
from orchestrator.core.topology import Node
from orchestrator.on_ray.agent import AgentSettings, PlacedAgent, end_agent, start_agent
from orchestrator.on_ray.channel import AgentChannel, Calls
from orchestrator.on_ray.cluster import node_of, nodes_of
from orchestrator.on_ray.gcs import Gcs, RayNode, is_absence
from orchestrator.on_ray.run_queue import RunQueue, Standing
from orchestrator.util.format import listed
from orchestrator.util.redaction import error_line, redact
from orchestrator.worker.protocol import HostFacts, ResponseBatch
from orchestrator.worker.spawn import SharedSpawner

CLAIM_PATIENCE_S = 60.0
RETRY_S = 5.0
_LOOK_S = 0.1  # that the loop waits for an answer which mostly takes a few milliseconds
_CLOSE_S = 15.0
#: Limit for a silent GCS while no node is claimed. Without it Ray ends nodes after 60 s, which
#: count as lost 20 s later.
SILENCE_PATIENCE_S = 90.0
#: The same since the last node was lost: below the minute after which jobs without cards are given
#: up, since another driver may have cards for them.
BEREFT_PATIENCE_S = 45.0
#: Silence after which an agent, which answers every 5 s, is lost with its node.
AGENT_PATIENCE_S = 60.0
#: The same after a restart of the head, which ends all earlier agents.
ORPHANED_AGENT_PATIENCE_S = 20.0
#: A loop that pauses for longer was frozen; the time does not count as agents' silence.
_ABSENCE_S = 5.0
_QUEUE_S = 2.0  # between two looks at the queue of runs


@dataclass(slots=True)
class Claim:
    """A node whose cards are claimed, or being claimed."""

    node: Node
    ray_node: RayNode
    since: float
    placed: PlacedAgent | None = None  # once the GCS knows of it
    joined: bool = False  # its cards can be used; it has facts and a channel from then on
    left_out: int = 0  # cards that Ray gave it and that cannot be used
    facts: HostFacts = field(init=False)
    channel: AgentChannel = field(init=False)

    @property
    def address(self) -> str:
        """Address by which other nodes reach it."""
        return str(self.ray_node["NodeManagerAddress"])

    @property
    def ray_id(self) -> str:
        """Id of the node in Ray; later claims on it have other ``node_id``s."""
        return str(self.ray_node["NodeID"])


@dataclass(slots=True, kw_only=True)
class Claims:
    """The nodes claimed by one executor."""

    poll_interval_s: ClassVar[float] = 1.0
    run: str
    accelerators: Collection[Accelerator] | None
    log_dir: Path | None
    preload: Sequence[str]
    clock: Callable[[], float]
    calls: Calls
    gcs: Gcs
    report: Callable[[Event], None]  # of joined nodes, and of cards that may come
    arrived: Callable[[Claim, ResponseBatch], None]  # of a joined node
    left: Callable[[Claim, Failure], None]  # a node that has left, and the failure
    queue: RunQueue | None = None  # None: the cluster is exclusive
    shared: SharedSpawner | None = None
    #: Nodes with cards in use by others, in part or as a whole, by id of the server.
    foreign: dict[str, Node] = field(default_factory=dict)
    by_node: dict[str, Claim] = field(default_factory=dict)  # by node id
    retry_at: dict[str, float] = field(default_factory=dict)
    _next_poll: float = 0.0
    _polled_at: float = 0.0
    _empty_since: float = 0.0
    _reported: frozenset[Accelerator] = frozenset()  # kinds of ``MoreCards``
    _last_ours: float | None = None  # last time with a joined node
    _trouble: str = ""  # why the last claim came to nothing
    _looking: bool = False  # a query of the GCS is open
    _error: Exception | None = None  # what its answer leads to, for ``poll``
    _standing: Standing | None = None  # the place in the queue
    _next_queue: float = 0.0
    _taken: set[str] = field(default_factory=set)  # servers with cards not given to us in our turn

    def __post_init__(self) -> None:
        self._polled_at = self._empty_since = self.clock()

    def of(self, node_id: str) -> Claim | None:
        """The claim on a node that has joined and not left."""
        claim = self.by_node.get(node_id)
        return claim if claim is not None and claim.joined else None

    def joined(self) -> list[Claim]:
        """The claims on all nodes that have joined and not left."""
        return [claim for claim in self.by_node.values() if claim.joined]

    def poll(self) -> None:
        """Compare Ray's nodes with the claims, at most once a second.

        Raises ControlStoreLost if the GCS is silent and no node is left, ClusterError if no node
        could be claimed for a minute.
        """
        self.gcs.collect()
        now = self.clock()
        if now < self._next_poll:
            return
        self._next_poll = now + self.poll_interval_s
        if self.queue is not None and now >= self._next_queue:
            self._next_queue = float("inf")  # until there is an answer
            self.gcs.ask(self.queue.look, self._standing_came)
        absent_s = now - self._polled_at
        patience_s = ORPHANED_AGENT_PATIENCE_S if self.gcs.replaced else AGENT_PATIENCE_S
        for claim in self.joined():
            if absent_s > _ABSENCE_S:
                claim.channel.heard_at = min(claim.channel.heard_at + absent_s, now)
            self.lose_if_silent(claim, patience_s)
        self._polled_at = now
        if not self._looking:
            self._looking = True
            self.gcs.ask(self.gcs.nodes, self._nodes_came, wait_s=_LOOK_S)
        self._check_silence(now)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """End every worker on every node and give the cards back."""
        import ray

        agents = [c.placed.agent for c in self.joined() if c.placed is not None]
        if agents and ray.is_initialized():  # Ray could join another cluster otherwise
            with contextlib.suppress(Exception):
                closing = [agent.close.remote() for agent in agents]
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for claim in self.by_node.values():
            if claim.joined:
                claim.channel.close()
            self._release(claim)
        self.by_node.clear()
        if self.queue is not None:
            self.gcs.ask(self.queue.leave)
        self.gcs.close(0.0 if self.gcs.silent_s else _CLOSE_S)

    # ------------------------------------------------------------ cards of others

    def _standing_came(self, value: Any) -> None:
        """Store the place in the queue; keep the last if the GCS is silent; on errors, drop it."""
        self._next_queue = self.clock() + _QUEUE_S
        if isinstance(value, Standing):
            self._standing = value
        elif not is_absence(value):
            logging.getLogger(__name__).warning("there is no queue of runs here: %s", value)
            self.queue = self._standing = None

    def _add_foreign(self, node: Node, *, taken: bool) -> None:
        """Add a node with cards of others; ``taken``: Ray has no free card on it."""
        self.foreign[node.server_id] = node
        if taken:
            self._taken.add(node.server_id)

    def _remove_foreign(self, server_id: str) -> None:
        self.foreign.pop(server_id, None)
        self._taken.discard(server_id)

    @property
    def waits_for(self) -> str:
        """Holders of the cards that the run waits for, for messages; empty if none."""
        if self.queue is not None and self._standing is None:
            return ""
        if self._standing is not None and self._standing.why:
            return self._standing.why
        taken = [self.foreign[server_id] for server_id in self._taken]
        if not taken:
            return ""
        kinds = "/".join(sorted({node.accelerator.value for node in taken}))
        where = listed(sorted(node.name for node in taken))
        others = self.queue.strangers if self.queue is not None else ()
        who = f"; other programs on the cluster: {listed(list(others))}" if others else ""
        return f"no run in the queue has the {kinds} cards of {where}, and they are not free{who}"

    # ------------------------------------------------------------ what the GCS says

    def _nodes_came(self, value: Any) -> None:
        self._looking = False
        if isinstance(value, BaseException):
            if not is_absence(value):  # of a node's resources, say
                self._error = value if isinstance(value, Exception) else ClusterError(str(value))
            return
        now = self.clock()
        ray_nodes: Mapping[str, RayNode] = value
        for server_id in self.foreign.keys() - ray_nodes.keys():
            self._remove_foreign(server_id)
        for claim in list(self.by_node.values()):
            if claim.ray_id not in ray_nodes:
                self.lose(claim, node_lost("Ray declared it dead"))
            elif not claim.joined and now - claim.since > CLAIM_PATIENCE_S:
                self._trouble = f"the cards of {claim.node.name} are in use by others"
                self._add_foreign(claim.node, taken=True)
                self.lose(claim, node_lost(self._trouble))
        try:
            self._claim_what_is_new(ray_nodes, now)
        except ClusterError as error:
            self._error = error

    def _claim_what_is_new(self, ray_nodes: Mapping[str, RayNode], now: float) -> None:
        wanted = [
            node
            for node in nodes_of(ray_nodes.values())
            if self.accelerators is None or node.accelerator in self.accelerators
        ]
        for node in wanted:
            new = unclaimed(node, self.by_node)
            if new is None:
                continue
            standing = self._standing
            in_turn = self.queue is None or (standing is not None and standing.may_claim)
            if not in_turn:
                self._add_foreign(new, taken=new is not node)
            elif self.retry_at.get(new.node_id, 0) <= now:
                if new is not node:
                    self._add_foreign(new, taken=True)
                ray_node = ray_nodes[node.node_id]
                address = ray_node["NodeManagerAddress"]
                # They share the cores of the host: emulated nodes are on one.
                cards_here = sum(
                    other.server_cards
                    for other in wanted
                    if ray_nodes[other.node_id]["NodeManagerAddress"] == address
                )
                self._claim(new, ray_node, cards_here)
        self._report_more_cards(now)
        if self.joined() or self.foreign:
            self._empty_since = now
        # With servers that were lost, the schedule has its own patience.
        elif self._last_ours is None and now - self._empty_since > CLAIM_PATIENCE_S + RETRY_S:
            kinds = "/".join(sorted(self.accelerators or Accelerator))
            why = self._trouble or f"the cluster has no node with {kinds}"
            raise ClusterError(f"no card could be had for {CLAIM_PATIENCE_S:.0f} s: {why}")

    def _report_more_cards(self, now: float) -> None:
        """Report the kinds of card of which more may come, if they have changed."""
        kinds = frozenset(node.accelerator for node in self.foreign.values())
        kinds = frozenset(Accelerator) if self.gcs.silent_s else kinds
        if kinds != self._reported:
            self._reported = kinds
            self.report(MoreCards(at=now, kinds=kinds))

    def _check_silence(self, now: float) -> None:
        """Suspend other timeouts while the GCS is silent; raise ControlStoreLost at its own."""
        ours = bool(self.joined())
        if ours:
            self._last_ours = now
        silent_s = self.gcs.silent_s
        self._report_more_cards(now)
        if not silent_s:
            return
        patience_s = RETRY_S if self.gcs.replaced else SILENCE_PATIENCE_S
        bereft_s = 0.0 if self._last_ours is None else min(now - self._last_ours, silent_s)
        if not ours and (silent_s > patience_s or bereft_s > BEREFT_PATIENCE_S):
            raise ControlStoreLost(f"{self.gcs.trouble}, and no node of the cluster is left")
        self._empty_since = now
        for claim in self.by_node.values():
            if not claim.joined:
                claim.since = now

    def lose_if_silent(self, claim: Claim, patience_s: float) -> bool:
        """Lose a node if its agent has been silent for ``patience_s``; return whether it was."""
        silent = self.clock() - claim.channel.heard_at > patience_s
        if silent:
            self.lose(claim, node_lost(f"its agent has not answered for {patience_s:.0f} s"))
        return silent

    # ------------------------------------------------------------ one node

    def _claim(self, node: Node, ray_node: RayNode, cards_on_host: int) -> None:
        """Start claiming a node's free cards and its agent; callbacks continue."""
        claim = Claim(node=node, ray_node=ray_node, since=self.clock())
        self.by_node[node.node_id] = claim
        settings = AgentSettings(
            accelerator=node.accelerator,
            preload=self.preload if node.computes_on_host else (),
            cards_on_host=cards_on_host,
            log_dir=str(self.log_dir.resolve()) if self.log_dir else None,
            shared=self.shared if node.computes_on_host else None,
            watched=not node.emulated,
        )
        self.gcs.ask(
            lambda: start_agent(self.run, node, claim.ray_id, settings),
            lambda value: self._agent_placed(claim, value),
        )

    def _agent_placed(self, claim: Claim, value: PlacedAgent | BaseException | None) -> None:
        """Ray knows of the claim: wait for its agent."""
        node = claim.node
        current = self.by_node.get(node.node_id) is claim
        if isinstance(value, PlacedAgent):
            claim.placed = value
            if current:
                self.calls.add(value.facts, lambda facts: self._facts_came(claim, facts))
            else:  # it was given up meanwhile
                self._release(claim)
        elif current and value is not None:
            self._failed(claim, "its cards cannot be claimed", value)
        elif current:
            del self.by_node[node.node_id]
            self.retry_at[node.node_id] = self.clock() + RETRY_S
            self._trouble = f"{node.name} has no free {node.accelerator} card"
            self._add_foreign(node, taken=True)

    def _facts_came(self, claim: Claim, value: HostFacts | Exception) -> None:
        """Mark the node as joined: its agent has the cards and is ready."""
        node = claim.node
        if self.by_node.get(node.node_id) is not claim or claim.placed is None:
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
            if value.cards_left_out:
                logging.getLogger(__name__).warning(
                    "%s: Ray gave %d cards, and %d of them can be used: %s",
                    *(node.name, len(node.card_indices), len(indices)),
                    "; ".join(value.cards_left_out),
                )
            if not indices:
                why = ClusterError("; ".join(value.cards_left_out) or "Ray gave none")
                self._failed(claim, "no card can be used", why)
                return
            claim.left_out = len(value.cards_left_out)
            described = node_of(claim.ray_node, node.name, node.accelerator, indices)
            size = max(described.server_cards, node.server_cards)
            claim.node = replace(node, card_indices=indices, server_cards=size)
        self._remove_foreign(node.server_id)
        claim.facts = value
        claim.channel = AgentChannel(
            claim.placed.agent,
            calls=self.calls,
            clock=self.clock,
            arrived=lambda batch: self.arrived(claim, batch),
            lost=lambda error: self.lose(claim, agent_failure(error)),
        )
        claim.joined = True
        self.report(NodeJoined(at=self.clock(), node=claim.node))

    def _failed(self, claim: Claim, what: str, error: BaseException) -> None:
        trouble = f"{claim.node.name}: {what}: {error_line(error)}"
        if trouble != self._trouble:
            logging.getLogger(__name__).warning("node left out: %s", trouble)
        self._trouble = trouble
        self._remove_foreign(claim.node.server_id)
        self.lose(claim, node_lost(trouble))

    def lose(self, claim: Claim, failure: Failure) -> None:
        """Drop a claim and end its agent and workers; a living node is claimed again later."""
        if self.by_node.get(claim.node.node_id) is not claim:
            return
        del self.by_node[claim.node.node_id]
        self.retry_at[claim.node.node_id] = self.clock() + RETRY_S
        if claim.joined:
            claim.channel.close()
            if trouble := self.gcs.trouble:  # the likely cause
                failure = replace(failure, message=f"{trouble}; {failure.message}")
            self.left(claim, failure)
        self._release(claim)

    def _release(self, claim: Claim) -> None:
        """Have Ray end the agent and free its cards, if it was placed."""
        if claim.placed is not None:
            placed, claim.placed = claim.placed, None
            self.gcs.ask(lambda: end_agent(placed))


# ---------------------------------------------------------------- pure


def unclaimed(node: Node, claims: Mapping[str, Claim]) -> Node | None:
    """Return a Ray node's unclaimed part; None if nothing is left or cards have no indices."""
    if node.node_id not in claims:
        return node
    parts = [claim for claim in claims.values() if claim.ray_id == node.node_id]
    taken = {index for part in parts for index in part.node.card_indices}
    left_out = sum(part.left_out for part in parts)
    # One being claimed counts with all it may get.
    missing = len(node.card_indices) - len(taken) - left_out
    if not node.accelerator.spec.ray_indices or missing <= 0:
        return None
    ids = (f"{node.node_id}+{number}" for number in range(1, len(node.card_indices)))
    return replace(
        node,
        node_id=next(name for name in ids if name not in claims),
        part_of=node.node_id,
        card_indices=tuple(index for index in node.card_indices if index not in taken)[:missing],
    )


def agent_failure(error: Exception) -> Failure:
    """Convert Ray's exception for a lost agent to its node's failure."""
    from ray.exceptions import ActorUnavailableError, NodeDiedError, OutOfMemoryError

    text = redact(str(error).strip(), os.environ)
    kind, message = FailureClass.NODE_LOST, "its agent died"
    # Ray 2.60 puts its words about memory into whatever exception the call has.
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        kind = FailureClass.HOST_OUT_OF_MEMORY
        message = "Ray killed its agent for want of host memory"
    elif isinstance(error, NodeDiedError) or "node has died" in text.lower():
        message = "Ray declared it dead"
    elif isinstance(error, ActorUnavailableError):
        message = "its agent does not answer"
    return Failure(kind, f"{message}: {error_line(error)}", tail=text[-4000:])


def node_lost(reason: str) -> Failure:
    """The failure of a node that is given up for this reason."""
    return Failure(FailureClass.NODE_LOST, reason)
