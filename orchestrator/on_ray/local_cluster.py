"""A private Ray cluster on this machine: one Ray node per emulated or real server.

Ray runs code for anyone who reaches it, and by default listens everywhere without a token. So
clusters are started on loopback (Ray derives its listeners from the nodes' address, and only
127.0.0.1 means loopback), with a random token in a private directory, passed by environment.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from orchestrator.core.errors import ClusterError
from orchestrator.core.topology import Node
from orchestrator.on_ray.agent import WORKER_VARIABLES
from orchestrator.on_ray.cluster import (
    CARD_MEMORY_MIB,
    EMULATED,
    EMULATED_DEVICE,
    RAY_TYPE,
    SERVER_CARDS,
    RayCluster,
    join_cluster,
    leave_cluster,
    new_token,
    ray_environment,
)
from orchestrator.store.files import RAY_JOB_VARIABLE
from orchestrator.worker import orphans
from orchestrator.worker.environment import configured_threads
from workloads.devices import all_devices
from workloads.util.processes import OwnedDirectory, replaced

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80_000_000  # rows are small; Ray's least is 75 MiB
#: Nodes that start side by side: each has three processes, whose imports take a second of CPU.
_TOGETHER = 4


@dataclass(slots=True, kw_only=True)
class LocalCluster(RayCluster):
    """A cluster on the loopback interface, with a token. Its first node is its head, too: a head of
    its own would cost three more processes and run nothing."""

    directory: Path
    ray_cluster: Any  # ray.cluster_utils.Cluster
    ray_nodes: dict[str, Any] = field(default_factory=dict)  # by name

    def add(self, node: Node) -> None:
        """Start a node and wait until it is up."""
        spec = node.accelerator.spec
        arguments = _without_cards()
        request = spec.ray_request(len(node.card_indices))
        resources: dict[str, float] = arguments["resources"] | request.pop("resources", {})
        resources[SERVER_CARDS] = node.server_cards
        if spec.ray_type:
            resources[RAY_TYPE + spec.ray_type] = 1
        if node.emulated:
            resources[EMULATED] = 1
            resources[EMULATED_DEVICE + node.emulated_device] = 1
        if node.memory_bytes_per_card is not None:
            resources[CARD_MEMORY_MIB] = node.memory_bytes_per_card // 2**20
        if shown := spec.visible(*node.card_indices):
            arguments["env_vars"] = shown
        self.add_ray_node(node.name, **{**arguments, **request, "resources": resources})

    def add_ray_node(self, name: str, **arguments: Any) -> None:
        """Start a node with these Ray arguments."""
        if self.ray_nodes:  # Ray's own choice of names collides in parallel starts
            directory = Path(self.ray_cluster.head_node.get_sockets_dir_path())
            key = os.urandom(4).hex()
            arguments["plasma_store_socket_name"] = str(directory / f"store-{key}")
            arguments["raylet_socket_name"] = str(directory / f"node-{key}")
        else:  # no run needs what else a head has
            arguments |= {
                "include_dashboard": False,
                "include_log_monitor": False,
                "no_monitor": True,
            }
        started = self.ray_cluster.add_node(
            node_name=name,
            node_ip_address=LOOPBACK,
            object_store_memory=OBJECT_STORE_BYTES,
            dashboard_agent_listen_port=0,  # any; Ray's own choice is the same for all heads
            **arguments,
        )
        self.ray_nodes[name] = started
        self.address = str(self.ray_cluster.address)

    def end(self) -> None:
        """Kill all nodes at once, without Ray's second of grace for each."""
        for ray_node in self.ray_cluster.list_all_nodes():
            for started in chain.from_iterable(ray_node.all_processes.values()):
                started.process.kill()
        self.ray_cluster.shutdown()


@contextlib.contextmanager
def emulate(nodes: Sequence[Node]) -> Iterator[LocalCluster]:
    """Start and join a cluster of these nodes, and end it afterwards, even if killed.

    Raises ClusterError if Ray cannot start, this process is on a cluster already, or
    ``NIGHTGRID_THREADS`` is invalid.
    """
    configured_threads()  # a bad one is reported before anything starts
    with _empty_cluster() as cluster:
        try:
            cluster.add(nodes[0])
            with ThreadPoolExecutor(_TOGETHER) as threads:
                list(threads.map(cluster.add, nodes[1:]))
        except Exception as error:  # Ray has many, none of them a TimeoutError
            raise ClusterError(f"cannot start a Ray cluster here: {error}") from error
        try:
            # Ray would replace 127.0.0.1 by the host's outer address.
            with _wrapped("resolve_ip_for_localhost", lambda _: lambda host: host):
                join_cluster(cluster.address, _node_ip_address=LOOPBACK)
            yield cluster
        finally:
            leave_cluster()


@contextlib.contextmanager
def _empty_cluster() -> Iterator[LocalCluster]:
    import ray

    if ray.is_initialized():
        raise ClusterError("this process has joined a Ray cluster already; it cannot start another")
    from ray.cluster_utils import Cluster

    orphans.remove_abandoned()
    try:
        directory = orphans.make_private_directory(os.environ.get(orphans.VARIABLE, ""))
    except OSError as error:
        raise ClusterError(f"cannot make a directory for a Ray cluster: {error}") from error
    with contextlib.ExitStack() as stack:
        stack.callback(directory.remove)
        stack.enter_context(orphans.guarded(directory))
        stack.callback(_clear, directory)
        stack.enter_context(ray_environment(_environment(directory.path)))
        # In own sessions, so that `timeout`'s SIGTERM to the group spares running jobs.
        stack.enter_context(
            _wrapped("ConsolePopen", lambda start: functools.partial(start, start_new_session=True))
        )
        # Ray would set a handler of SIGTERM of its own; the guard ends what a killed driver leaves.
        ray_cluster = Cluster(shutdown_at_exit=False)
        cluster = LocalCluster(address="", directory=directory.path, ray_cluster=ray_cluster)
        stack.callback(cluster.end)
        yield cluster


def _wrapped(name: str, wrap: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Wrap a function of Ray's services within the block."""
    from ray._private import services

    return replaced(services, **{name: wrap(getattr(services, name))})


def _environment(directory: Path) -> dict[str, str | None]:
    """Environment variables of the cluster's processes and of this one (None: not set)."""
    try:
        token = new_token(directory)
    except OSError as error:
        raise ClusterError(f"cannot write the token of a Ray cluster: {error}") from error
    return {
        **token,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray reports that usage reports are disabled: to nobody.
        "RAY_USAGE_STATS_REPORT_URL": f"http://{LOOPBACK}:9/",
        **WORKER_VARIABLES,
        # Otherwise nodes without CPUs end the processes of tasks after a second, and each job would
        # start one.
        "RAY_num_workers_soft_limit": "2",
        # Ray notes the newest cluster's address in its temporary directory, where another user's
        # `ray.init("auto")` would find this one.
        "RAY_ADDRESS": None,
        # Otherwise all actors would get the environment of a surrounding Ray job.
        RAY_JOB_VARIABLE: None,
        "RAY_TMPDIR": str(directory),
        # Otherwise Ray's agents overwrite their ownership mark with a title.
        "SPT_NOENV": "1",
    }


def _clear(directory: OwnedDirectory) -> None:
    """End processes that still write there (Ray's agents) and remove the directory."""
    with contextlib.suppress(TimeoutError):
        orphans.end_users_of(directory)
    directory.remove()


def _without_cards() -> dict[str, Any]:
    """Ray arguments of a node without cards; Ray would count omitted resources itself."""
    arguments: dict[str, Any] = {"resources": {}}
    for spec in all_devices():
        request = spec.ray_request(0)
        arguments["resources"] |= request.pop("resources", {})
        arguments |= request
    return arguments
