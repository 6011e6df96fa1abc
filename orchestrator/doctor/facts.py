"""Facts from an examination of a cluster: plain values, not yet judged."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.core.job import Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """One card as the vendor's tool sees it from outside."""

    index: int  # the module id on Gaudi
    product: str = ""  # as the tool calls it
    links: int | None = None  # to the other cards of its server; None: nobody can tell
    links_up: int | None = None
    occupied: str | None = None  # who has it; None: free, or nobody can tell
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Free room in one directory of a node."""

    purpose: str  # "Ray's files", "results", "models"
    path: str
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFacts:
    """Facts about the shared directory, as one node found it."""

    readable: bool  # the driver's file is there, with what the driver wrote
    written: str = ""  # name of the file that the node left there; "" when it could not
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Facts that a process on a node found out about its host. Nothing is acquired for it."""

    hostname: str
    python: str
    versions: Mapping[str, str]  # of packages, and of nightgrid, by name
    import_errors: Mapping[str, str]  # by package; those that import are not in it
    cards: tuple[CardFacts, ...] = ()
    driver_version: str | None = None  # of the cards
    kernel: str = ""
    kernel_arguments: str = ""
    governors: Mapping[str, int] = field(default_factory=dict)  # of the cores: how many have which
    max_cstate: int | None = None  # that idle cores may enter; None: nobody can tell
    hugepages_asked: Mapping[str, int] = field(default_factory=dict)  # by files of sysctl: pages
    hugepages_total: int = 0
    hugepage_bytes: int = 0
    memory_bytes: int = 0
    shared_memory_bytes: int = 0  # /dev/shm
    open_files: int = 0  # soft limit; -1: none
    locked_bytes: int = 0  # soft limit; -1: none
    spaces: tuple[Space, ...] = ()
    shared: SharedFacts | None = None  # None: no directory was named


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """The node's clock less the driver's, at most ``bound_s`` away from the truth."""

    offset_s: float
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node of the cluster: what Ray says of it, and its probe."""

    name: str
    node_id: str
    alive: bool = True
    head: bool = False
    emulated: bool = False
    cards: Mapping[Accelerator, int] = field(default_factory=dict)  # as told to Ray
    cards_free: int = 0  # in Ray's accounts, of all kinds
    device_name: str = ""
    probe: Probe | None = None
    clock: ClockOffset | None = None
    trouble: str = ""  # why there is no probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions that must agree between the places a run spans."""

    ray: str
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """Everything an examination found."""

    address: str
    driver: Versions
    nodes: tuple[NodeFacts, ...]
    token: bool  # whether the cluster asks for one
    dashboard: str | None = None  # HOST:PORT that it listens on; None: there is none
    shared_dir: str | None = None
    shared_trouble: str = ""  # why the driver cannot write there
    expected_nodes: int | None = None

    @property
    def emulated(self) -> bool:
        """Return whether all cards are emulated ones of this machine."""
        with_cards = [node for node in self.nodes if node.cards]
        return bool(with_cards) and all(node.emulated for node in with_cards)


class Level(enum.IntEnum):
    """Severity of a finding."""

    NOTE = 0  # worth knowing
    WARNING = 1  # a run works, and its figures or its speed may suffer
    ERROR = 2  # a run would fail, wholly or on a node

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be, and what to do about it."""

    check: str  # a word for scripts, e.g. "cards"
    level: Level
    where: str  # the node's name, or "cluster"
    message: str
    remedy: str
