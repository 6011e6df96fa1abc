"""Nodes, cards, and the sets of cards that a job may have.

Each device declares its groups: where cards are joined in pairs and quads, a job of two or four
cards needs an aligned group ({0,1}, {2,3}, …, {0-3}, {4-7}). A job of more cards than a node has
takes several whole nodes.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.errors import OptionError
from orchestrator.core.job import Accelerator, default_accelerator
from workloads.devices import host_device, own_devices


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Card:
    """One accelerator: the module or device index on its node."""

    node_id: str
    index: int
    accelerator: Accelerator

    def __str__(self) -> str:
        return f"{self.node_id}/{self.accelerator}{self.index}"


CardSet = tuple[Card, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A server with the cards that this run may use; ``node_id`` is Ray's, ``name`` is shown."""

    node_id: str
    name: str
    accelerator: Accelerator
    card_indices: tuple[int, ...]  # those we may use; fewer than the server has if shared
    server_cards: int = 8  # how many the server has
    device_name: str = ""  # e.g. "Gaudi2", "NVIDIA H200", "emulated HPU on CPU"
    memory_bytes_per_card: int | None = None
    emulated: bool = False
    emulated_device: str = host_device().name  # the software that drives a card which is not there
    #: Versions of packages that decide the choice of an engine; None: unknown.
    packages: tuple[tuple[str, str], ...] | None = None
    faults: tuple[str, ...] = ()  # of its host: lost cards, no home, hardly any memory
    part_of: str = ""  # id of the server, where its cards were claimed at different times

    @property
    def server_id(self) -> str:
        """Id of the server: the node's, or ``part_of``."""
        return self.part_of or self.node_id

    @property
    def device(self) -> str:
        """The torch device type that jobs on this node use."""
        return self.emulated_device if self.emulated else self.accelerator.device

    @property
    def computes_on_host(self) -> bool:
        """Return whether its jobs run on the host's own processor."""
        return self.device == host_device().name

    @property
    def cards(self) -> CardSet:
        """The node's cards in index order."""
        return tuple(
            Card(node_id=self.node_id, index=index, accelerator=self.accelerator)
            for index in self.card_indices
        )


def legal_groups(
    accelerator: Accelerator, count: int, server_cards: int
) -> tuple[tuple[int, ...], ...]:
    """Index groups of ``count`` cards that a job may have on one server, best first; the whole
    server is always legal. Empty if the server is too small."""
    if count < 1 or count > server_cards:
        return ()
    if count == server_cards:
        return (tuple(range(server_cards)),)
    return accelerator.spec.groups(count, server_cards)


def legal_card_sets(nodes: Sequence[Node], accelerator: Accelerator, count: int) -> list[CardSet]:
    """Every legal set of ``count`` cards of the cluster, were all cards free."""
    servers: dict[str, list[Node]] = {}
    for node in nodes:
        if node.accelerator is accelerator:
            servers.setdefault(node.server_id, []).append(node)
    sets: list[CardSet] = []
    whole: dict[int, list[CardSet]] = {}  # by the number of cards of a server
    for parts in servers.values():
        by_index = {card.index: card for node in parts for card in node.cards}
        size = max(node.server_cards for node in parts)
        for group in legal_groups(accelerator, count, size):
            if all(index in by_index for index in group):
                sets.append(tuple(by_index[index] for index in group))
        if len(by_index) == size:
            whole.setdefault(size, []).append(tuple(by_index[index] for index in range(size)))
    return sets or [
        tuple(itertools.chain.from_iterable(servers[start : start + count // size]))
        for size, servers in sorted(whole.items(), reverse=True)
        if count > size and count % size == 0
        for start in range(len(servers) - count // size + 1)
    ]


_EMULATION = re.compile(r"([0-9]{1,9})x([0-9]{1,9})(?::([A-Za-z]\w*)(?::([a-z]\w*))?)?", re.ASCII)
MAX_EMULATED_CARDS = 4096
#: Cards of a server of which nothing is known.
ASSUMED_CARDS = 8


def _emulation_hint() -> str:
    first, second = (device.accelerator for device in own_devices()[:2])
    return f"write 2x8 for two nodes of eight cards, 2x8:{second}, or 1x8:{first},1x8:{second}"


def parse_emulation(spec: str, accelerators: Sequence[Accelerator]) -> list[Node]:
    """The nodes that ``--emulate SPEC`` stands for; raises OptionError for a bad or too large one.

    SPEC is ``NODESxCARDS[:KIND]``, several joined by commas. Nodes without a kind are dealt in turn
    among ``accelerators``, those the grid names (the default one if it names none). Several CPU
    cards are emulated too, since they share this machine's cores, but a single one is real.
    ``1x8:KIND:DEVICE`` drives emulated cards through the card's own software.
    """

    def refused(trouble: object) -> OptionError:
        return OptionError(f"--emulate {spec}: {trouble}")

    wanted: list[tuple[int, Accelerator | None, str]] = []
    host = host_device().name
    for part in map(str.strip, spec.split(",")):
        match = _EMULATION.fullmatch(part)
        if match is None:
            raise refused(f"{part!r} is not understood; {_emulation_hint()}")
        nodes, cards, kind = int(match[1]), int(match[2]), None
        if match[3]:
            try:
                kind = Accelerator(match[3].upper())
            except ValueError as error:
                raise refused(error) from None
        if nodes < 1 or cards < 1:
            raise refused(f"{part!r} has no cards; {_emulation_hint()}")
        device = match[4] or host
        if kind and device not in (host, kind.device):
            raise refused(f"{kind} cards are driven as {host} or {kind.device}, not {device}")
        ordered = nodes * cards + sum(count for count, _, _ in wanted)
        if ordered > MAX_EMULATED_CARDS:
            most = f"more than {MAX_EMULATED_CARDS} cards are not emulated"
            raise refused(f"{ordered:,} cards; {most}")
        wanted += [(cards, kind, device)] * nodes
    dealt = itertools.cycle(accelerators or (default_accelerator(),))
    alone = [count for count, _, _ in wanted] == [1]
    counts: Counter[Accelerator] = Counter()
    emulated: list[Node] = []
    on_host = host_device().accelerator
    for cards, named_kind, device in wanted:
        kind_of_node = named_kind or next(dealt)
        counts[kind_of_node] += 1
        real = alone and kind_of_node.spec.host
        name = f"{kind_of_node.lower()}-{counts[kind_of_node]}"
        emulated.append(
            Node(
                node_id=name,
                name=name,
                accelerator=kind_of_node,
                card_indices=tuple(range(cards)),
                server_cards=cards,
                device_name=on_host if real else f"emulated {kind_of_node} on {on_host}",
                emulated=not real,
                emulated_device=device,
            )
        )
    return emulated


def assumed_servers(accelerators: Sequence[Accelerator]) -> list[Node]:
    """Nodes that a plan assumes when there is no cluster: one server of each kind."""
    sizes = {
        kind: 1 if kind.spec.host else kind.spec.server_cards or ASSUMED_CARDS
        for kind in accelerators
    }
    return [
        Node(
            node_id=f"{kind.lower()}-1",
            name=f"{kind.lower()}-1",
            accelerator=kind,
            card_indices=tuple(range(cards)),
            server_cards=cards,
            device_name=f"assumed {kind}",
        )
        for kind, cards in sizes.items()
    ]
