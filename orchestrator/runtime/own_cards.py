"""The cards of this very machine, for whoever has a card and no cluster.

They are asked from outside, by their drivers' tools, as the doctor and the sensors ask: no card is
opened, neither torch nor Ray is imported. A grid that names only the processor has one card here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from orchestrator.domain.job import Accelerator
from orchestrator.domain.topology import Node
from workloads.devices import all_devices, device_class, host_device


def own_nodes(accelerators: Sequence[Accelerator]) -> list[Node]:
    """This machine as a node of each kind of card that a grid names and that it has; of the
    processor only for a grid that names nothing else, since cards share it."""
    if all(kind.spec.host for kind in accelerators):
        return [_node(kind, (0,)) for kind in accelerators]
    found = [(kind, own_cards(kind)) for kind in accelerators if not kind.spec.host]
    return [_node(kind, cards) for kind, cards in found if cards]


def own_machine() -> list[Node]:
    """This machine as a node, with whatever cards it has; with its processor where it has none."""
    kinds = [Accelerator(spec.accelerator) for spec in all_devices() if not spec.host]
    return own_nodes(kinds) or own_nodes([Accelerator(host_device().accelerator)])


def own_cards(kind: Accelerator) -> tuple[int, ...]:
    """The indices of this machine's cards of a kind, less those that the environment hides."""
    found = sorted(device_class(kind.device).telemetry())
    shown = os.environ.get(kind.spec.visible_variable) if kind.spec.visible_variable else None
    if shown is None:
        return tuple(found)
    return tuple(card for card in found if str(card) in shown.split(","))


def no_cards_text(accelerators: Sequence[Accelerator]) -> str:
    """Describe where cards of these kinds were looked for on this machine, and not found."""
    asked = [kind.spec for kind in accelerators if not kind.spec.host]
    tools = [f"{spec.tool} lists none" for spec in asked if spec.tool]
    why = f" ({', '.join(tools)})" if tools else ""
    return f"this machine has no {' or '.join(spec.accelerator for spec in asked)} card{why}"


def _node(kind: Accelerator, cards: tuple[int, ...]) -> Node:
    name = socket.gethostname()
    known = kind.spec.server_cards or 0
    return Node(
        node_id=f"{kind.lower()}-1",
        name=name,
        accelerator=kind,
        card_indices=cards,
        server_cards=max(known, max(cards) + 1) if not kind.spec.host else 1,
        device_name=kind.value if kind.spec.host else "",
    )
