"""One claim on a node, and the cards of a node that are still to be claimed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.domain.topology import Node
from orchestrator.on_ray.agent_channel import AgentChannel
from orchestrator.on_ray.control_store import RayNode
from orchestrator.on_ray.placement import Opened
from orchestrator.worker.host_facts import HostFacts


@dataclass(slots=True)
class Claim:
    """A node whose cards are ours, or are being claimed."""

    node: Node
    ray_node: RayNode
    since: float
    plain: bool  # its agent is started without variables of its own
    opened: Opened | None = None  # once the control store knows of it
    found: HostFacts | None = None
    opened_channel: AgentChannel | None = None  # once it has joined

    @property
    def joined(self) -> bool:
        """Return whether its cards can be used."""
        return self.opened_channel is not None

    @property
    def ray_id(self) -> str:
        """Id of the node in Ray; cards of it that were claimed later have an id of their own
        here."""
        return str(self.ray_node["NodeID"])

    @property
    def agent(self) -> Any:
        """The actor on the node."""
        assert self.opened is not None
        return self.opened.agent

    @property
    def facts(self) -> HostFacts:
        """Facts that the agent found."""
        assert self.found is not None
        return self.found

    @property
    def channel(self) -> AgentChannel:
        """The channel to its agent."""
        assert self.opened_channel is not None
        return self.opened_channel


def unclaimed(node: Node, claims: Mapping[str, Claim]) -> Node | None:
    """The node to claim next on a node of Ray: the node itself, or, where only some of its cards
    are ours, a further part of that server; None where nothing is left, or cannot be told apart.

    Args:
        claims: by id of the claimed node.
    """
    if node.node_id not in claims:
        return node
    ours = [claim.node for claim in claims.values() if claim.ray_id == node.node_id]
    taken = {index for part in ours for index in part.card_indices}
    missing = len(node.card_indices) - len(taken)  # one being claimed counts with all it may get
    if not node.accelerator.spec.ray_indices or missing <= 0:
        return None
    ids = (f"{node.node_id}+{number}" for number in range(1, len(node.card_indices)))
    return replace(
        node,
        node_id=next(name for name in ids if name not in claims),
        part_of=node.node_id,
        card_indices=tuple(index for index in node.card_indices if index not in taken)[:missing],
    )


def cards_on_host(
    ray_node: Mapping[str, Any], nodes: Collection[Node], ray_nodes: Mapping[str, Any]
) -> int:
    """Count the cards that share the cores of this node's host: emulated nodes share one host."""
    address = ray_node["NodeManagerAddress"]
    here = [n for n in nodes if ray_nodes[n.node_id]["NodeManagerAddress"] == address]
    return sum(node.server_cards for node in here)
