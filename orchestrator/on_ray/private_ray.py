"""A private Ray of this process on this machine; no other user can use it.

Ray runs code for whoever reaches it, and by itself it listens on every interface and asks nobody
for anything. So every cluster that this program starts is started here, where two things cannot be
forgotten. All of it listens on the loopback address: what Ray listens on follows from its nodes'
address, and only 127.0.0.1 means loopback to it. And it has a random token of its own, in a file
of a directory that only this user can enter; its processes learn of it by their environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from orchestrator.errors import ClusterError
from orchestrator.on_ray.bare_nodes import (
    PLAIN_WORKERS,
    PRESTART,
    WORKERS,
    bare_nodes,
    replaced,
    wait_for_nodes,
)
from orchestrator.on_ray.token import new_token, ray_environment
from orchestrator.results.directory import RAY_JOB_VARIABLE
from orchestrator.worker.guard import guarded
from orchestrator.worker.leftovers import VARIABLE, end_users_of, remove_abandoned
from orchestrator.worker.private_directory import make_private_directory
from workloads.owned_directory import OwnedDirectory

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80_000_000  # rows are small; Ray's least is 75 MiB
#: For nodes that start side by side, however many share however few processors.
_PATIENCE_S = 60.0


@dataclass(slots=True)
class PrivateRay:
    """A cluster on the loopback interface, with a token. Its first node is its head."""

    directory: Path
    cluster: Any  # ray.cluster_utils.Cluster
    metrics: bool = False  # whether its nodes export them
    _nodes: dict[str, Any] = field(default_factory=dict)  # by name
    _awaited: list[str] = field(default_factory=list)  # names of nodes that may not be up yet
    _named: int = 0  # nodes whose sockets were given names

    @property
    def address(self) -> str:
        """``HOST:PORT`` of the control store, once a node was added."""
        return str(self.cluster.address)

    def add_node(self, name: str, *, workers: int = 0, wait: bool = True, **arguments: Any) -> None:
        """Start a node.

        Args:
            workers: interpreters that it starts with itself, for actors that are sure to come.
            wait: until it is up; else ``wait_for_nodes`` does. The first node is always waited for.
            arguments: of Ray.
        """
        wait = wait or not self._nodes
        with bare_nodes(metrics=self.metrics, workers=workers, wait=wait):
            self._nodes[name] = self.cluster.add_node(
                wait=wait,
                node_name=name,
                node_ip_address=LOOPBACK,
                object_store_memory=OBJECT_STORE_BYTES,
                dashboard_agent_listen_port=0,  # any; Ray's own choice is the same for all heads
                labels=PLAIN_WORKERS,
                **self._sockets(),
                **arguments,
            )
        if not wait:
            self._awaited.append(name)

    def _sockets(self) -> dict[str, str]:
        """Names of the next node's sockets. By itself Ray takes the first that is not there yet: of
        nodes that start side by side, all take the same."""
        if not self._nodes:
            return {}
        self._named += 1
        directory = Path(self.cluster.head_node.get_sockets_dir_path())
        return {
            "plasma_store_socket_name": str(directory / f"store-{self._named}"),
            "raylet_socket_name": str(directory / f"node-{self._named}"),
        }

    def wait_for_nodes(self) -> None:
        """Wait until all nodes are up.

        Raises:
            TimeoutError: one is not in time.
            ClusterError: one has exited.
            Exception: Ray's own, where the control store does not answer.
        """
        if node_ids := {n: self._nodes[n].node_id for n in self._awaited if n in self._nodes}:
            wait_for_nodes(self.address, node_ids, _PATIENCE_S, self._has_exited)
        self._awaited.clear()

    def _has_exited(self, name: str) -> bool:
        """Return whether a node's own process (its raylet) has ended."""
        started = self.all_processes(name).get("raylet", ())
        return any(each.process.poll() is not None for each in started)

    def remove_node(self, name: str) -> None:
        """Kill a node and everything on it."""
        self.cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def end(self) -> None:
        """Kill all nodes at once: nothing on them is worth the second that Ray would give each of
        them to end in order."""
        for node in self._nodes.values():
            for each in chain.from_iterable(node.all_processes.values()):
                each.process.kill()
        self.cluster.shutdown()

    def all_processes(self, name: str) -> Any:
        """Ray's own record of a node's processes."""
        return self._nodes[name].all_processes


@contextlib.contextmanager
def private_ray(*, metrics: bool = False) -> Iterator[PrivateRay]:
    """Prepare a cluster without nodes, to which they can be added; end all of it afterwards, also
    if this process is killed. Within the block this process sends the cluster's token.

    To be called from the main thread: Ray's processes are told to die with the thread that starts
    them, however that ends.

    Raises:
        ClusterError: this process is on a cluster already, this version of Ray knows no tokens, or
            the directory cannot be made.
    """
    import ray

    if ray.is_initialized():
        raise ClusterError("this process has joined a Ray cluster already; it cannot start another")
    from ray.cluster_utils import Cluster

    remove_abandoned()
    try:
        directory = make_private_directory(os.environ.get(VARIABLE, ""))
    except OSError as error:
        raise ClusterError(f"cannot make a directory for a Ray cluster: {error}") from error
    with contextlib.ExitStack() as stack:
        stack.callback(directory.remove)
        stack.enter_context(guarded(directory))
        stack.callback(_clear, directory)
        stack.enter_context(ray_environment(_settings(directory.path)))
        private = PrivateRay(directory=directory.path, cluster=Cluster(), metrics=metrics)
        stack.callback(private.end)
        yield private


@contextlib.contextmanager
def joining_on_loopback() -> Iterator[None]:
    """Let this process join a cluster whose address is 127.0.0.1, for which Ray would take the
    host's outer address."""
    from ray._private import services

    with replaced(services, "resolve_ip_for_localhost", lambda host: host):
        yield


def _settings(directory: Path) -> dict[str, str | None]:
    """Environment variables of the cluster's processes and of this one (None: not set)."""
    try:
        token = new_token(directory)
    except OSError as error:
        raise ClusterError(f"cannot write the token of a Ray cluster: {error}") from error
    return {
        **token,
        "RAY_USAGE_STATS_ENABLED": "0",
        **WORKERS,
        **PRESTART,
        # Ray notes the address of the newest cluster in its temporary directory, where a
        # stranger's `ray.init("auto")` would find this one.
        "RAY_ADDRESS": None,
        # Of a job in which this process may be: all its actors would have the job's environment,
        # which the nodes of this cluster have no agent to prepare.
        RAY_JOB_VARIABLE: None,
        "RAY_TMPDIR": str(directory),
        # Else Ray's agents write their title over the mark by which they are recognised.
        "SPT_NOENV": "1",
    }


def _clear(directory: OwnedDirectory) -> None:
    """End what writes there still, as Ray's agents do for a minute, and remove the directory."""
    with contextlib.suppress(TimeoutError):
        end_users_of(directory)
    directory.remove()
