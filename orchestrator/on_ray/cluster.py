"""Which Ray cluster a run uses, and which cards are in it.

``connect`` joins a cluster that is there; ``emulate`` starts one on this machine: one real Ray node
process for each server, with the resources such a server would have, every one marked with the
resource ``emulated``, by which any driver that joins sees that its cards are not real.

A node's kind of card follows from its Ray resources: ``HPU``, else ``GPU``, else the host itself is
one ``CPU`` card. A node with cards of two kinds is refused: their jobs would share its memory and
cores, and disturb each other's measurements.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.domain.job import Accelerator
from orchestrator.domain.topology import Node
from orchestrator.errors import ClusterError
from orchestrator.on_ray.actors import threads_asked
from orchestrator.on_ray.control_store import answers, first_answer, outlived, within
from orchestrator.on_ray.private_ray import LOOPBACK, PrivateRay, joining_on_loopback, private_ray
from orchestrator.on_ray.token import (
    asks_for_token,
    missing_token,
    take_own_token,
    token_advice,
)

#: Custom Ray resources by which a node says what Ray has no word for.
EMULATED = "emulated"
EMULATED_DEVICE = "emulated_device_"  # and the device's name, of the software that drives them
SERVER_CARDS = "server_cards"  # when Ray was given only some of the server's cards
CARD_MEMORY_MIB = "card_memory_mib"  # whole numbers: Ray takes no fractions above one

_GAUDI_SERVER_CARDS = 8
_PROBE_TIMEOUT_S = 5.0
#: For a control store that takes connections: on a busy head the first answer takes seconds.
_FIRST_ANSWER_S = 30.0
_VISIBLE = {Accelerator.HPU: "HABANA_VISIBLE_MODULES", Accelerator.GPU: "CUDA_VISIBLE_DEVICES"}


@dataclass(slots=True)
class RayCluster:
    """A cluster that this process has joined."""

    address: str
    temp_dir: str | None = None  # of an emulated cluster, which ends with this process

    @property
    def emulated(self) -> bool:
        """Whether this process started it for itself."""
        return self.temp_dir is not None

    def nodes(self) -> list[Node]:
        """The nodes alive now, in the order of their names.

        Raises:
            ClusterError: a node has two kinds of cards.
        """
        import ray

        return nodes_of(ray.nodes())


@dataclass(slots=True, kw_only=True)
class EmulatedCluster(RayCluster):
    """A cluster of this machine's own, to which nodes can be added and from which they can go."""

    private: PrivateRay

    def add(self, node: Node) -> None:
        """Start a node; it is up on return."""
        self.private.add_node(node.name, **_ray_node(node))

    def remove(self, name: str) -> None:
        """Kill a node and everything on it."""
        self.private.remove_node(name)


# ---------------------------------------------------------------- joining and starting


@contextlib.contextmanager
def connect(address: str | None = None) -> Iterator[RayCluster]:
    """Join the cluster at ``address``, else at ``RAY_ADDRESS`` (a Ray job has it set).

    Raises:
        ClusterError: no address is known, nothing answers there, or Ray refuses.
    """
    known = address or os.environ.get("RAY_ADDRESS")
    if not known:
        raise ClusterError(
            "no cluster to run on: give --emulate 2x8 for emulated cards on this machine, "
            "--address HOST:6379 or RAY_ADDRESS on a machine of the cluster, "
            "or send the grid there with `nightgrid submit`"
        )
    resolved = resolve_address(known)
    _join(resolved)
    try:
        yield RayCluster(address=resolved)
    finally:
        _leave()


@contextlib.contextmanager
def emulate(nodes: Sequence[Node]) -> Iterator[EmulatedCluster]:
    """Start a cluster on this machine with these nodes, join it, and end it afterwards.

    Nobody else can use it (``private_ray.py``). To be called from the main thread.

    Raises:
        ClusterError: Ray cannot start here, this process is on a cluster already, or the
            environment asks for workers of no possible number of threads.
    """
    threads_asked()  # a bad one is told before anything starts
    with contextlib.ExitStack() as stack:
        private = stack.enter_context(private_ray())
        cluster = EmulatedCluster(address="", temp_dir=str(private.directory), private=private)
        try:
            # The head holds no cards and runs no jobs. Nobody looks at what Ray's dashboard, its
            # autoscaler and its reader of logs would tell: they would take longer to start than
            # all else.
            private.add_node(
                "head",
                num_cpus=0,
                num_gpus=0,  # said, since Ray would count this machine's own
                resources={Accelerator.HPU.value: 0},
                include_dashboard=False,
                include_log_monitor=False,
                no_monitor=True,
            )
            for node in nodes:
                cluster.add(node)
        except Exception as error:
            raise ClusterError(f"cannot start an emulated Ray cluster: {error}") from error
        cluster.address = private.address
        stack.callback(_leave)
        with joining_on_loopback():
            _join(cluster.address, _node_ip_address=LOOPBACK)
        yield cluster


def resolve_address(address: str) -> str:
    """The ``host:port`` of a cluster's control store, with something listening on it.

    Raises:
        ClusterError: the address is of another kind, or nothing answers within five seconds.
            (Ray itself would wait for over a minute and then end the process.)
    """
    if address == "auto":
        from ray._private.utils import read_ray_address

        address = read_ray_address() or ""
        if not address:
            raise ClusterError("no Ray cluster runs on this machine (address 'auto')")
    if "://" in address:
        raise ClusterError(
            f"{address} is not the address of a cluster's control store, which is HOST:6379 and "
            "can be joined only from a machine of the cluster. From elsewhere: "
            "`nightgrid submit GRID --address http://HOST:8265`"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"'{address}' is no cluster address; it has the form HOST:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address}: {error}. `ray status` on the head node says "
            "whether it runs, `ray start --head` starts one"
        ) from error
    return address


def _join(address: str, **options: Any) -> None:
    import ray

    if ray.is_initialized():
        return
    take_own_token()
    if wrong := missing_token():
        raise ClusterError(wrong)
    _ask(address)
    try:
        with outlived():
            ray.init(
                address=address,
                namespace=f"nightgrid-{os.getpid()}-{os.urandom(4).hex()}",
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
    except (Exception, SystemExit) as error:  # Ray ends the process where it should raise
        raise _not_joined(address, error) from error


def _not_joined(address: str, error: BaseException) -> ClusterError:
    return ClusterError(
        f"cannot join the Ray cluster at {address}: {error}; is this machine part of the cluster, "
        "with the same Ray and Python version?"
    )


def _ask(address: str) -> None:
    """Ask the control store for anything at all, since ``ray.init`` waits without end and without a
    word for one that is frozen.

    Raises:
        ClusterError: it does not answer, or refuses this process.
    """
    answer = first_answer(address, patience_s=_FIRST_ANSWER_S)
    if answer is None:
        raise ClusterError(
            f"the control store of the Ray cluster at {address} takes connections, but has not "
            f"answered for {_FIRST_ANSWER_S:.0f} s: it is frozen, overloaded or still starting. "
            f"Try again once `ray health-check --address {address}` ends with 0 on the head node"
        )
    if asks_for_token(answer):
        raise ClusterError(token_advice(f"the Ray cluster at {address}"))
    if isinstance(answer, Exception):
        raise _not_joined(address, answer) from answer


def _leave() -> None:
    """Leave the cluster. One whose control store is gone is not waited for."""
    import ray

    if not ray.is_initialized():
        return
    if answers():
        ray.shutdown()
    else:
        within(_PROBE_TIMEOUT_S, ray.shutdown)


def _ray_node(node: Node) -> dict[str, Any]:
    """The arguments for Ray of one emulated node."""
    cards = len(node.card_indices)
    resources: dict[str, float] = {SERVER_CARDS: node.server_cards, Accelerator.HPU.value: 0}
    if node.emulated:
        resources[EMULATED] = 1
        resources[EMULATED_DEVICE + node.emulated_device] = 1
    if node.memory_bytes_per_card is not None:
        resources[CARD_MEMORY_MIB] = node.memory_bytes_per_card // 2**20
    arguments: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": 0,
        "resources": resources,
    }
    if node.accelerator is Accelerator.CPU:
        arguments["num_cpus"] = cards
    elif node.accelerator is Accelerator.GPU:
        arguments["num_gpus"] = cards
    else:
        resources["HPU"] = cards
    if node.accelerator in _VISIBLE:
        visible = ",".join(map(str, node.card_indices))
        arguments["env_vars"] = {_VISIBLE[node.accelerator]: visible}
    return arguments


# ---------------------------------------------------------------- what is in it (pure)


def nodes_of(ray_nodes: Iterable[Mapping[str, Any]]) -> list[Node]:
    """The nodes of ``ray.nodes()`` that are alive and have cards, in the order of their names.

    The card indices are the first ones, as many as Ray has: which ones they really are is known
    when they are claimed (``RayExecutor``).

    Raises:
        ClusterError: a node has two kinds of cards.
    """
    alive = [node for node in ray_nodes if node["Alive"]]
    names = Counter(name_of(node) for node in alive)
    found = []
    for ray_node in alive:
        kind, count = _cards(ray_node)
        if count < 1:
            continue
        name = name_of(ray_node)
        if names[name] > 1:
            name = f"{name}-{ray_node['NodeID'][:4]}"
        found.append(node_of(ray_node, name, kind, tuple(range(count))))
    return sorted(found, key=lambda node: node.name)


def node_of(
    ray_node: Mapping[str, Any], name: str, accelerator: Accelerator, indices: tuple[int, ...]
) -> Node:
    """One node, of which the cards ``indices`` are ours."""
    resources = ray_node["Resources"]
    emulated = EMULATED in resources
    server_cards = int(resources.get(SERVER_CARDS, 0)) or max(len(indices), max(indices) + 1)
    if accelerator is Accelerator.HPU and SERVER_CARDS not in resources:
        server_cards = max(server_cards, _GAUDI_SERVER_CARDS)
    memory_mib = resources.get(CARD_MEMORY_MIB)
    return Node(
        node_id=ray_node["NodeID"],
        name=name,
        accelerator=accelerator,
        card_indices=indices,
        server_cards=server_cards,
        device_name=_device_name(ray_node, accelerator, emulated),
        memory_bytes_per_card=None if memory_mib is None else int(memory_mib) * 2**20,
        emulated=emulated,
        emulated_device=_emulated_device(resources),
    )


def _emulated_device(resources: Mapping[str, Any]) -> str:
    named = [name for name in resources if name.startswith(EMULATED_DEVICE)]
    return named[0].removeprefix(EMULATED_DEVICE) if named else "cpu"


def name_of(ray_node: Mapping[str, Any]) -> str:
    """The name given with ``ray start --node-name``, else the host's."""
    name = ray_node.get("NodeName") or ""
    if name and name != ray_node.get("NodeManagerAddress"):
        return str(name)
    return str(ray_node.get("NodeManagerHostname") or name or ray_node["NodeID"][:8])


def describe_cards(resources: Mapping[str, float]) -> tuple[dict[Accelerator, int], str]:
    """The cards among a node's Ray resources by kind, of both kinds if there are, and their type.
    A node with neither that computes is one CPU card."""
    kinds = (Accelerator.HPU, Accelerator.GPU)
    cards = {kind: int(resources[kind.value]) for kind in kinds if resources.get(kind.value)}
    if not cards and resources.get("CPU", 0) >= 1:
        cards[Accelerator.CPU] = 1
    prefix = "accelerator_type:"
    types = [name.removeprefix(prefix) for name in resources if name.startswith(prefix)]
    return cards, types[0] if types else ""


def _cards(ray_node: Mapping[str, Any]) -> tuple[Accelerator, int]:
    """What kind of cards a node has, and how many."""
    resources = ray_node["Resources"]
    kinds = [kind for kind in (Accelerator.HPU, Accelerator.GPU) if resources.get(kind.value)]
    if len(kinds) == 2:
        raise ClusterError(
            f"node {name_of(ray_node)} has both HPU and GPU in its Ray resources; start it with "
            "one kind of card (`ray start --resources …` or `--num-gpus 0`)"
        )
    if kinds:
        return kinds[0], int(resources[kinds[0].value])
    if resources.get("CPU", 0) < 1:
        return Accelerator.CPU, 0
    return Accelerator.CPU, int(resources.get(SERVER_CARDS, 1))


def _device_name(ray_node: Mapping[str, Any], accelerator: Accelerator, emulated: bool) -> str:
    """From Ray's ``accelerator_type:…`` resource; the worker reports the device's own name."""
    if emulated:
        return f"emulated {accelerator} on CPU"
    prefix = "accelerator_type:"
    for resource in ray_node["Resources"]:
        if resource.startswith(prefix):
            return str(resource[len(prefix) :])
    return ""
