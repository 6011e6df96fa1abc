"""Examination of a cluster: all nodes at once, within a time limit.

Clock offsets are bounded by the shortest of a few round trips. A silent node is reported as such.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.core.job import Accelerator
from orchestrator.on_ray.channel import answer_of, task_on
from orchestrator.on_ray.cluster import EMULATED, RayCluster, describe_cards, name_of
from orchestrator.util.host import MemoryUse
from orchestrator.util.redaction import error_line
from workloads.devices import ServerFacts

ROUND_TRIPS = 5
_PATIENCE_S = 2.0  # of one round trip
#: Nodes are alike: one is silent if it tells its time neither within ``START_S`` nor within this
#: many times what the slowest of the others took.
_SLOWER = 4.0
START_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions that must agree between the places a run spans."""

    ray: str
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Free room in one directory of a node."""

    purpose: str  # "Ray's files", "results", "models"
    path: str
    free_bytes: int
    unlocked: str = ""  # why files cannot be locked or linked there


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFacts:
    """The shared directory as seen from one node."""

    readable: bool  # the driver's file is there, with what the driver wrote
    written: str = ""  # name of the file that the node left there; "" when it could not
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(ServerFacts):
    """Facts about a node's host, collected without acquiring a card."""

    hostname: str
    python: str
    import_errors: Mapping[str, str]  # by package; those that import are not in it
    home_problem: str = ""  # of its user's home directory
    memory_bytes: int = 0
    memory: MemoryUse = field(default_factory=MemoryUse)
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
    """One node of the cluster: Ray's record of it, and its probe."""

    name: str
    node_id: str
    alive: bool = True
    head: bool = False
    emulated: bool = False
    cards: Mapping[Accelerator, int] = field(default_factory=dict)  # as declared to Ray
    cards_free: int = 0  # in Ray's accounts, of all kinds
    device_name: str = ""
    probe: Probe | None = None
    clock: ClockOffset | None = None
    trouble: str = ""  # why there is no probe


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """Result of an examination."""

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


# ---------------------------------------------------------------- the examination


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """An examination of a cluster: its targets and its limits."""

    examine: Callable[..., Probe]  # of the host on which it runs (``doctor.probe.examine``)
    packages: Sequence[str]  # to import on every node, besides those of its kind of card
    engines: Sequence[str] = ()  # names of those that nodes with real cards must have
    shared_dir: str | None = None  # that all nodes should see; None: not checked
    results_dir: str = "results"
    expected_nodes: int | None = None
    timeout_s: float = 120.0  # after which a node counts as silent

    def of(self, cluster: RayCluster) -> ClusterFacts:
        """Examine the joined cluster, and leave nothing behind."""
        import ray

        started = time.monotonic()
        deadline = started + self.timeout_s
        ray_nodes = sorted(ray.nodes(), key=lambda node: (name_of(node), node["NodeID"]))
        facts = {node["NodeID"]: _facts_of(node) for node in ray_nodes}
        clocks: dict[str, ClockOffset] = {}
        with _shared_file(self.shared_dir) as (shared, trouble):
            alive = [node_id for node_id, node in facts.items() if node.alive]
            calls = {node_id: task_on(node_id, _now) for node_id in alive}
            # A node that starts later than this would not finish its imports anyway.
            starts_by = started + self.timeout_s * 2 / 3
            for node_id, answer in _answers(calls, starts_by, alike=True):
                if isinstance(answer, Exception):
                    facts[node_id] = _failed(facts[node_id], answer)
                    continue
                with contextlib.suppress(Exception):
                    clocks[node_id] = clock_offset(partial(task_on, node_id, _now))
            calls = {
                node_id: task_on(
                    node_id, self.examine, **self._keywords(facts[node_id], shared, deadline)
                )
                for node_id in clocks
            }
            for node_id, answer in _answers(calls, deadline):
                if isinstance(answer, Probe):
                    facts[node_id] = replace(facts[node_id], probe=answer, clock=clocks[node_id])
                else:
                    facts[node_id] = _failed(facts[node_id], answer)
        silent = f"it did not answer within {time.monotonic() - started:.0f} s"
        for node_id, node in facts.items():
            if node.alive and node.probe is None:
                facts[node_id] = replace(node, trouble=node.trouble or silent)
        return ClusterFacts(
            address=cluster.address,
            driver=Versions(ray=ray.__version__, python=platform.python_version()),
            nodes=tuple(facts.values()),
            token=_asks_for_token(cluster.address),
            dashboard=str(_own_node().webui_url or "").removeprefix("http://") or None,
            shared_dir=self.shared_dir,
            shared_trouble=trouble,
            expected_nodes=self.expected_nodes,
        )

    def _keywords(
        self, node: NodeFacts, shared: tuple[str, str, str] | None, deadline: float
    ) -> dict[str, Any]:
        """Arguments of ``examine`` for a node, with the driver's directories: nodes are alike."""
        real = not node.emulated and len(node.cards) == 1
        kind = next(iter(node.cards)) if real else None
        return {
            "kind": kind if kind is not None and not kind.spec.host else None,
            "packages": (*self.packages, *(kind.spec.imports if kind else ())),
            "engines": self.engines,
            "places": (
                ("Ray's files", str(_own_node().get_session_dir_path())),
                ("results", str(Path(self.results_dir).absolute())),
                ("models", os.environ.get("HF_HOME", "~/.cache/huggingface")),
            ),
            "shared": shared,
            "timeout_s": max(1.0, deadline - time.monotonic() - 5.0),
        }


def _failed(node: NodeFacts, error: object) -> NodeFacts:
    return replace(node, trouble=f"its examiner failed: {error_line(error, 300)}")


def _now() -> float:
    return time.time()


def clock_offset(
    now: Callable[[], Any],
    clock: Callable[[], float] = time.time,
    steady: Callable[[], float] = time.monotonic,
) -> ClockOffset:
    """Offset of the clock that ``now`` calls, within half of the shortest round trip."""
    import ray

    best: ClockOffset | None = None
    for _ in range(ROUND_TRIPS):
        sent, began = clock(), steady()
        there = ray.get(now(), timeout=_PATIENCE_S)
        took = steady() - began
        if best is None or took / 2 < best.bound_s:
            best = ClockOffset(offset_s=there - (sent + took / 2), bound_s=took / 2)
    assert best is not None
    return best


def _answers(
    calls: Mapping[str, Any], deadline: float, *, alike: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield answers as they come until the deadline; ``alike``: stop earlier for stragglers."""
    import ray

    began = time.monotonic()
    until = deadline
    waiting = {call: key for key, call in calls.items()}
    while waiting:
        left = until - time.monotonic()
        if left <= 0:
            return
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
        for call in ready:
            yield waiting.pop(call), answer_of(call)
            if alike:
                now = time.monotonic()
                until = min(deadline, began + max(START_S, _SLOWER * (now - began)))


# ---------------------------------------------------------------- what the driver knows


def _facts_of(ray_node: Mapping[str, Any]) -> NodeFacts:
    from ray._private.state import available_resources_per_node

    resources = ray_node["Resources"] if ray_node["Alive"] else {}
    cards, device_name = describe_cards(resources)
    free = available_resources_per_node().get(ray_node["NodeID"], {})
    return NodeFacts(
        name=name_of(ray_node),
        node_id=ray_node["NodeID"],
        alive=bool(ray_node["Alive"]),
        head="node:__internal_head__" in resources,
        emulated=EMULATED in resources,
        cards=cards,
        cards_free=sum(
            min(count, int(free.get(kind.spec.ray_resource, 0))) for kind, count in cards.items()
        ),
        device_name=device_name,
    )


@contextlib.contextmanager
def _shared_file(directory: str | None) -> Iterator[tuple[tuple[str, str, str] | None, str]]:
    """Write a file for the nodes to find within the block; or say why there is none."""
    if directory is None:
        yield None, ""
        return
    name, content = f".nightgrid-doctor-{uuid.uuid4().hex[:12]}", uuid.uuid4().hex
    base = Path(directory)
    try:
        base.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(content, encoding="ascii")
    except OSError as error:
        yield None, str(error)
        return
    try:
        yield (directory, name, content), ""
    finally:
        for left in base.glob(f"{name}*"):
            with contextlib.suppress(OSError):
                left.unlink()


def _asks_for_token(address: str) -> bool:
    """Return whether the cluster refuses a process without a token, by trying one."""
    code = (
        "import sys; from orchestrator.on_ray.gcs import first_answer; "
        "from orchestrator.on_ray.cluster import asks_for_token; "
        "answer = first_answer(sys.argv[1], patience_s=20); "
        "sys.exit(17 if answer is None or asks_for_token(answer) else 0)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH_")}
    environment |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, address]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=30, check=False
        )
    except subprocess.TimeoutExpired:
        return True  # not admitted
    return done.returncode == 17


def _own_node() -> Any:
    """Ray's object of this process's node, which knows the dashboard's address and the session."""
    from ray._private.worker import global_worker

    return global_worker.node
