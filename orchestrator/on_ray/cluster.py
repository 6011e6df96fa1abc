"""The Ray cluster that a run uses, and its cards.

A node's kind of card follows from its Ray resources; a node without any is itself a card, its
processor. Nodes with two kinds of cards are refused: their jobs would distort each other's figures.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from orchestrator.core.errors import ClusterError
from orchestrator.core.job import Accelerator
from orchestrator.core.topology import Node
from orchestrator.on_ray.channel import ask_nodes
from orchestrator.on_ray.gcs import first_answer, outlived, within
from orchestrator.worker.environment import node_here, packages_here
from workloads.devices import all_devices, host_device
from workloads.util import files
from workloads.util.processes import variables

# Ray (since 2.52) sends the cluster's token. Without one it retries for 20 s and then reports a
# crashed cluster; if the named file is missing, it aborts the process. So the token is looked up
# here first, in Ray's order.

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


_TOKEN_BYTES = 32
#: Makes Ray check tokens with Kubernetes.
_KUBERNETES = "RAY_ENABLE_K8S_TOKEN_AUTH"


def new_token(directory: Path) -> dict[str, str | None]:
    """Write a token (mode 0600); return variables to require and send it (None: unset)."""
    path = directory / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(_TOKEN_BYTES))
    return {MODE: "token", TOKEN: None, TOKEN_PATH: str(path), _KUBERNETES: None}


@contextlib.contextmanager
def ray_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None: unset) for the block, and reset Ray's cached token before and after."""
    try:
        with variables(values):
            _read_environment_again()
            yield
    finally:
        _read_environment_again()


def _read_environment_again() -> None:
    """Reset Ray's cached token, unless the new one is missing: Ray would abort the process."""
    from ray import _raylet

    loader: Any = _raylet.AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled
    config: Any = _raylet.Config  # type: ignore[attr-defined]
    _, missing = own_token()
    if not missing:
        config.initialize("")  # first: threads that still end would look for a token that is gone
        loader.instance().reset_cache()


def asks_for_token(error: object) -> bool:
    """Return whether Ray refused the token; the error's class is not in every version."""
    return type(error).__name__ == "AuthenticationError"


def take_own_token() -> None:
    """Use a token that is there if no mode is set, as ``ray.init`` does, for requests before it:
    importing Ray takes longer than most of them."""
    if MODE not in os.environ and (os.environ.get(TOKEN) or _token_file().is_file()):
        os.environ[MODE] = "token"
        if "ray" in sys.modules:
            _read_environment_again()


def own_token() -> tuple[str, str]:
    """The token that this process is set to send, else the reason why it lacks it; both are empty
    where none is wanted."""
    if os.environ.get(MODE, "").lower() != "token":
        return "", ""
    if token := os.environ.get(TOKEN):
        return token, ""
    path = _token_file()
    try:
        token = files.read_text(path, limit_bytes=files.MIB).strip()
    except (OSError, ValueError) as error:
        return "", f"{MODE} is token, but {path} cannot be read: {error}. {_ADVICE}"
    return token, "" if token else f"{MODE} is token, but {path} is empty. {_ADVICE}"


def _token_file() -> Path:
    named = os.environ.get(TOKEN_PATH)
    return Path(named).expanduser() if named else Path.home() / ".ray" / "auth_token"


def token_advice(where: str) -> str:
    """Advice on the variable to set after the cluster at ``where`` refused access."""
    mode = os.environ.get(MODE, "")
    if mode.lower() == "token":
        why = "the one that was sent is not the cluster's"
    else:
        why = f"none was sent, because {MODE} is {mode or 'not set'}"
    return f"{where} asks for a token, and {why}. {_ADVICE}"


_ADVICE = (
    f"Set {MODE}=token and {TOKEN_PATH} to a file that holds the cluster's token and that only you "
    "can read (docs/security.md)"
)


#: Custom Ray resources that describe a node.
EMULATED = "emulated"
EMULATED_DEVICE = "emulated_device_"  # and the device's name, of the software that drives them
SERVER_CARDS = "server_cards"  # when Ray was given only some of the server's cards
CARD_MEMORY_MIB = "card_memory_mib"  # whole numbers: Ray takes no fractions above one

#: Advice for users who named no cluster.
WAYS = (
    "give --emulate 2x8 for emulated cards on this machine, --address HOST:6379 or RAY_ADDRESS on "
    "a machine of the cluster, or send the grid there with `nightgrid submit`"
)

_PROBE_TIMEOUT_S = 5.0
_LEAVE_S = 30.0
_ANSWER_S = 60.0  # of all nodes: starting a process takes seconds, on a cold disk more
#: For a GCS that takes connections: on a busy head the first answer takes seconds.
_FIRST_ANSWER_S = 30.0
RAY_TYPE = "accelerator_type:"  # prefix of the product's name


@dataclass(slots=True)
class RayCluster:
    """A cluster that this process has joined."""

    address: str

    def nodes(self) -> list[Node]:
        """Living nodes by name; ClusterError if one has two kinds of cards."""
        import ray

        return nodes_of(ray.nodes())


# ---------------------------------------------------------------- joining


@contextlib.contextmanager
def connect(address: str | None = None) -> Iterator[RayCluster]:
    """Join the cluster at ``address``, else ``RAY_ADDRESS``; ClusterError if none can be joined."""
    known = address or os.environ.get("RAY_ADDRESS")
    if not known:
        raise ClusterError(f"no cluster to run on: {WAYS}")
    resolved = resolve_address(known)
    join_cluster(resolved)
    try:
        yield RayCluster(address=resolved)
    finally:
        leave_cluster()


def local_address() -> str:
    """The address of a Ray cluster that runs on this machine; empty where none answers."""
    from ray._private.utils import read_ray_address

    with contextlib.suppress(ClusterError, OSError):
        if address := read_ray_address():
            return resolve_address(address)
    return ""


def resolve_address(address: str) -> str:
    """Return ``host:port`` of a listening GCS; ClusterError if invalid or silent for 5 s.

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
    _, missing = own_token()
    if missing:
        raise ClusterError(missing)
    # ``ray.init`` would wait for ever for a GCS that is silent, or refuses.
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


def leave_cluster() -> None:
    """Leave the cluster, waiting 30 s at most, or 5 s if the GCS is gone already."""
    import ray

    if not ray.is_initialized():
        return
    from ray._private.worker import global_worker

    patience_s, worker = _LEAVE_S, cast(Any, global_worker)  # untyped
    try:
        worker.gcs_client.get_all_node_info(timeout=_PROBE_TIMEOUT_S)
    except Exception:
        patience_s = _PROBE_TIMEOUT_S
    within(patience_s, ray.shutdown)


# ---------------------------------------------------------------- what is in it (pure)


def nodes_of(ray_nodes: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Convert ``ray.nodes()`` to the living nodes with cards, sorted by name.

    Card indices are placeholders until the cards are claimed (``RayExecutor``). Raises ClusterError
    if a node has two kinds of cards.
    """
    alive = [node for node in ray_nodes if node["Alive"]]
    names = Counter(name_of(node) for node in alive)
    nodes = []
    for ray_node in alive:
        name = name_of(ray_node)
        cards, _ = describe_cards(ray_node["Resources"])
        if len(cards) > 1:
            raise ClusterError(
                f"node {name} has both {' and '.join(cards)} in its Ray resources; start "
                "it with one kind of card (`ray start --resources …` or `--num-gpus 0`)"
            )
        if not any(cards.values()):
            continue
        [(kind, count)] = cards.items()
        if names[name] > 1:
            name = f"{name}-{ray_node['NodeID'][:4]}"
        nodes.append(node_of(ray_node, name, kind, tuple(range(count))))
    return sorted(nodes, key=lambda node: node.name)


def node_of(
    ray_node: Mapping[str, Any], name: str, accelerator: Accelerator, indices: tuple[int, ...]
) -> Node:
    """Build the Node for these cards of a Ray node."""
    resources = ray_node["Resources"]
    emulated = EMULATED in resources
    known = (len(indices), max(indices) + 1, accelerator.spec.server_cards or 0)
    server_cards = int(resources.get(SERVER_CARDS, 0)) or max(known)
    memory_mib = resources.get(CARD_MEMORY_MIB)
    drivers = [n.removeprefix(EMULATED_DEVICE) for n in resources if n.startswith(EMULATED_DEVICE)]
    return Node(
        node_id=ray_node["NodeID"],
        name=name,
        accelerator=accelerator,
        card_indices=indices,
        server_cards=server_cards,
        # By Ray's `accelerator_type:…` resource; the worker reports the device's own name.
        device_name=f"emulated {accelerator} on {host_device().accelerator}"
        if emulated
        else describe_cards(resources)[1],
        memory_bytes_per_card=None if memory_mib is None else int(memory_mib) * 2**20,
        emulated=emulated,
        emulated_device=next(iter(drivers), host_device().name),
    )


def name_of(ray_node: Mapping[str, Any]) -> str:
    """The name given with ``ray start --node-name``, else the host's."""
    name = ray_node.get("NodeName") or ""
    if name and name != ray_node.get("NodeManagerAddress"):
        return str(name)
    return str(ray_node.get("NodeManagerHostname") or name or ray_node["NodeID"][:8])


def describe_cards(resources: Mapping[str, float]) -> tuple[dict[Accelerator, int], str]:
    """Count a node's cards by kind, and name their type.

    A node with CPUs but no other card is one card, or as many as ``SERVER_CARDS`` says.
    """
    types = [name.removeprefix(RAY_TYPE) for name in resources if name.startswith(RAY_TYPE)]
    card_type = types[0] if types else ""
    cards: dict[Accelerator, int] = {}
    taken: set[str] = set()
    # Kinds that share a resource: prefer the one of this type, else the untyped one.
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


# ---------------------------------------------------------------- what its nodes say


def described(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Add the packages of nodes and faults of their hosts; emulated nodes are on this machine.

    A silent node is left unchanged, with a warning: its plan assumes its image's packages.
    """
    host = host_device().name
    devices = {
        node.node_id: (node.device, node.accelerator.value)
        for node in nodes
        if not (node.emulated and node.device == host)  # this machine
    }
    answers = ask_nodes(node_here, devices, _ANSWER_S)
    result = []
    for node in nodes:
        answer = answers.get(node.node_id)
        if isinstance(answer, Exception):
            logging.getLogger(__name__).warning(
                "node %s did not say which packages it has: %s", node.name, answer
            )
        elif answer is not None:
            node = replace(node, packages=answer[0], faults=answer[1])
        elif node.node_id not in devices:
            node = replace(node, packages=packages_here(node.device))
        result.append(node)
    return tuple(result)
