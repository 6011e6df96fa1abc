"""The Ray cluster that a run uses, and the cards in it.

``connect`` joins a cluster that is there; ``emulate`` starts one on this machine: one real Ray node
process for each server, with the resources such a server would have, every one marked with the
resource ``emulated``, by which any driver that joins sees that its cards are not real.

A node's kind of card follows from its Ray resources, as devices declare them; a node without any
is one card itself, its processor. A node with cards of two kinds is refused: their jobs would share
its memory and cores, and disturb each other's measurements.
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
from orchestrator.on_ray.control_store import answers, first_answer, outlived, within
from orchestrator.on_ray.private_ray import LOOPBACK, PrivateRay, joining_on_loopback, private_ray
from orchestrator.on_ray.token import (
    asks_for_token,
    missing_token,
    take_own_token,
    token_advice,
)
from orchestrator.worker.host_server import threads_asked
from workloads.devices import all_devices, host_device

#: Custom Ray resources by which a node says what Ray has no word for.
EMULATED = "emulated"
EMULATED_DEVICE = "emulated_device_"  # and the device's name, of the software that drives them
SERVER_CARDS = "server_cards"  # when Ray was given only some of the server's cards
CARD_MEMORY_MIB = "card_memory_mib"  # whole numbers: Ray takes no fractions above one

#: The ways to have cards, for whoever named none.
WAYS = (
    "give --emulate 2x8 for emulated cards on this machine, --address HOST:6379 or RAY_ADDRESS on "
    "a machine of the cluster, or send the grid there with `nightgrid submit`"
)

_PROBE_TIMEOUT_S = 5.0
_LEAVE_S = 30.0
#: For a control store that takes connections: on a busy head the first answer takes seconds.
_FIRST_ANSWER_S = 30.0
_RAY_TYPE = "accelerator_type:"  # and the product, as Ray or whoever starts a node names it


@dataclass(slots=True)
class RayCluster:
    """A cluster that this process has joined."""

    address: str
    temp_dir: str | None = None  # of an emulated cluster, which ends with this process

    @property
    def emulated(self) -> bool:
        """Return whether this process started it for itself."""
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

    def add(self, node: Node, *, wait: bool = True) -> None:
        """Start a node, with an interpreter for its agent; wait until it is up if told to."""
        self.private.add_node(node.name, workers=1, wait=wait, **_ray_node(node))

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
        raise ClusterError(f"no cluster to run on: {WAYS}")
    resolved = resolve_address(known)
    join_cluster(resolved)
    try:
        yield RayCluster(address=resolved)
    finally:
        _leave()


@contextlib.contextmanager
def emulate(nodes: Sequence[Node], *, metrics: bool = False) -> Iterator[EmulatedCluster]:
    """Start a cluster on this machine with these nodes, join it, and end it afterwards.

    Nobody else can use it (``private_ray.py``). To be called from the main thread. ``metrics``: its
    nodes export them, which nobody but a test would look for.

    Raises:
        ClusterError: Ray cannot start here, this process is on a cluster already, or the
            environment asks for workers of no possible number of threads.
    """
    threads_asked()  # a bad one is told before anything starts
    with contextlib.ExitStack() as stack:
        private = stack.enter_context(private_ray(metrics=metrics))
        cluster = EmulatedCluster(address="", temp_dir=str(private.directory), private=private)
        try:
            # The head holds no cards and runs no jobs. Nobody looks at what Ray's dashboard, its
            # autoscaler and its reader of logs would tell: they would take longer to start than
            # all else.
            private.add_node(
                "head",
                **_none_of_this_machine(),
                include_dashboard=False,
                include_log_monitor=False,
                no_monitor=True,
            )
            for node in nodes:  # side by side, while this process joins
                cluster.add(node, wait=False)
        except Exception as error:
            raise _not_started(error) from error
        cluster.address = private.address
        stack.callback(_leave)
        with joining_on_loopback():
            join_cluster(cluster.address, _node_ip_address=LOOPBACK)
        try:
            private.wait_for_nodes()
        except Exception as error:  # Ray has many, none of them a TimeoutError
            raise _not_started(error) from error
        yield cluster


def local_address() -> str:
    """The address of a Ray cluster that runs on this machine; empty where none answers."""
    from ray._private.utils import read_ray_address

    with contextlib.suppress(ClusterError, OSError):
        if address := read_ray_address():
            return resolve_address(address)
    return ""


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
        raise ClusterError(f"'{address}' is not a cluster address; it has the form HOST:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address}: {error}. `ray status` on the head node says "
            "whether it runs, `ray start --head` starts one"
        ) from error
    return address


def join_cluster(address: str, **options: Any) -> None:
    """Join the cluster at an address, once it has answered."""
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


def _not_started(error: Exception) -> ClusterError:
    return ClusterError(f"cannot start a Ray cluster here: {error}")


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
    """Leave the cluster. One whose control store is gone is hardly waited for; one that goes in
    this moment, for half a minute."""
    import ray

    if not ray.is_initialized():
        return
    within(_LEAVE_S if answers() else _PROBE_TIMEOUT_S, ray.shutdown)


def _none_of_this_machine() -> dict[str, Any]:
    """The arguments for Ray of a node without cards: what is not said, Ray counts itself."""
    arguments: dict[str, Any] = {"resources": {}}
    for spec in all_devices():
        asked = spec.ray_request(0)
        arguments["resources"] |= asked.pop("resources", {})
        arguments |= asked
    return arguments


def _ray_node(node: Node) -> dict[str, Any]:
    """The arguments for Ray of one emulated node."""
    spec = node.accelerator.spec
    arguments = _none_of_this_machine()
    asked = spec.ray_request(len(node.card_indices))
    resources: dict[str, float] = arguments["resources"] | asked.pop("resources", {})
    resources[SERVER_CARDS] = node.server_cards
    if spec.ray_type:
        resources[_RAY_TYPE + spec.ray_type] = 1
    if node.emulated:
        resources[EMULATED] = 1
        resources[EMULATED_DEVICE + node.emulated_device] = 1
    if node.memory_bytes_per_card is not None:
        resources[CARD_MEMORY_MIB] = node.memory_bytes_per_card // 2**20
    if shown := spec.visible(*node.card_indices):
        arguments["env_vars"] = shown
    return {**arguments, **asked, "resources": resources}


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
    """A node whose cards ``indices`` are ours."""
    resources = ray_node["Resources"]
    emulated = EMULATED in resources
    known = (len(indices), max(indices) + 1, accelerator.spec.server_cards or 0)
    server_cards = int(resources.get(SERVER_CARDS, 0)) or max(known)
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
    return named[0].removeprefix(EMULATED_DEVICE) if named else host_device().name


def name_of(ray_node: Mapping[str, Any]) -> str:
    """The name given with ``ray start --node-name``, else the host's."""
    name = ray_node.get("NodeName") or ""
    if name and name != ray_node.get("NodeManagerAddress"):
        return str(name)
    return str(ray_node.get("NodeManagerHostname") or name or ray_node["NodeID"][:8])


def describe_cards(resources: Mapping[str, float]) -> tuple[dict[Accelerator, int], str]:
    """The cards among a node's Ray resources by kind, of several kinds if there are, and their
    type. A node with none that computes is one card itself, unless it says how many."""
    types = [name.removeprefix(_RAY_TYPE) for name in resources if name.startswith(_RAY_TYPE)]
    card_type = types[0] if types else ""
    cards: dict[Accelerator, int] = {}
    taken: set[str] = set()
    # Where kinds share a resource, the one of this type counts, else the one that names none.
    for spec in sorted(all_devices(), key=lambda spec: not spec.ray_type):
        count = int(resources.get(spec.ray_resource, 0))
        free = count and not spec.host and spec.ray_resource not in taken
        if free and card_type.startswith(spec.ray_type):
            cards[Accelerator(spec.accelerator)] = count
            taken.add(spec.ray_resource)
    host = host_device()
    if not cards and resources.get(host.ray_resource, 0) >= 1:
        cards[Accelerator(host.accelerator)] = int(resources.get(SERVER_CARDS, 1))
    return cards, card_type


def _cards(ray_node: Mapping[str, Any]) -> tuple[Accelerator, int]:
    """Kind and number of a node's cards."""
    cards, _ = describe_cards(ray_node["Resources"])
    if len(cards) > 1:
        raise ClusterError(
            f"node {name_of(ray_node)} has both {' and '.join(cards)} in its Ray resources; start "
            "it with one kind of card (`ray start --resources …` or `--num-gpus 0`)"
        )
    return next(iter(cards.items()), (Accelerator(host_device().accelerator), 0))


def _device_name(ray_node: Mapping[str, Any], accelerator: Accelerator, emulated: bool) -> str:
    """Name by Ray's ``accelerator_type:…`` resource; the worker reports the device's own name."""
    if emulated:
        return f"emulated {accelerator} on {host_device().accelerator}"
    return describe_cards(ray_node["Resources"])[1]
