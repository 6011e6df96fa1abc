"""Nodes of a Ray of our own, as far as no Ray has to run."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from patience import patience, until
from source_tree import ROOT

from orchestrator.errors import ClusterError
from orchestrator.on_ray import cluster as cluster_module
from orchestrator.on_ray.bare_nodes import bare_nodes, wait_for_nodes
from orchestrator.on_ray.control_store import ALIVE
from orchestrator.on_ray.private_ray import PrivateRay, private_ray
from orchestrator.worker.process_table import processes

_AGENTS = ["--dashboard_agent_command=python a.py", "--runtime_env_agent_command=python b.py"]


@pytest.mark.parametrize("absent", ["", "persist_port", "METRICS_AGENT_PORT_NAME"])
def test_a_node_is_started_as_this_version_of_ray_can(
    absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle processes take its agents' place where Ray lets the ports be written beforehand; 2.53
    does not."""
    from ray._private import services

    compiled = importlib.import_module("ray._raylet")

    started: list[list[str]] = []
    monkeypatch.setattr(services, "start_ray_process", started.append)
    written: list[Any] = []
    monkeypatch.setattr(compiled, "persist_port", lambda *port: written.append(port))
    if absent:
        monkeypatch.delattr(compiled, absent)
    command = ["raylet", f"--session_dir={tmp_path}", "--node_id=ab", *_AGENTS]
    with bare_nodes():
        services.start_ray_process(command)  # type: ignore[call-arg]
    (mine,) = started
    assert mine[:3] == command[:3] and len(mine) == len(command)
    replaced = [part for part in mine if "idle_agent" in part]
    assert (len(replaced), len(written)) == ((0, 0) if absent else (2, 4))
    assert absent == "" or mine == command


def test_a_node_starts_as_many_workers_with_itself_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray would start one for each CPU, of which nodes of emulated cards have none."""
    from ray._private import services

    started: list[list[str]] = []
    monkeypatch.setattr(services, "start_ray_process", started.append)
    with bare_nodes(workers=2):
        services.start_ray_process(  # type: ignore[call-arg]
            ["raylet", "--num_prestart_python_workers=0", "--head"]
        )
    assert started == [["raylet", "--num_prestart_python_workers=2", "--head"]]


class ControlStore:
    """Knows one more node each time that it is asked."""

    nodes: ClassVar[list[Any]] = []
    state: ClassVar[int] = ALIVE
    asked: ClassVar[int] = 0

    def __init__(self, address: str) -> None:
        assert address == "127.0.0.1:1"

    def get_all_node_info(self, timeout: float) -> dict[Any, object]:
        """The nodes that are known by now."""
        type(self).asked += 1
        return dict.fromkeys(self.nodes[: self.asked], SimpleNamespace(state=self.state))


def test_nodes_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the last of them is known, in whatever order they come, and not for ever."""
    from ray import NodeID

    ids = [NodeID.from_random() for _ in range(4)]
    monkeypatch.setattr(importlib.import_module("ray._raylet"), "GcsClient", ControlStore)
    monkeypatch.setattr(ControlStore, "nodes", ids)
    monkeypatch.setattr(ControlStore, "asked", 0)
    wait_for_nodes("127.0.0.1:1", {"c": ids[2].hex(), "b": ids[1].hex()})
    assert ControlStore.asked == 3
    absent = {"b": ids[1].hex(), "e": NodeID.from_random().hex()}
    with pytest.raises(TimeoutError, match=r"not up after 0 s: e$"):
        wait_for_nodes("127.0.0.1:1", absent, patience_s=0.0)


def test_a_node_that_has_died_is_not_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control store keeps it among those that it knows."""
    from ray import NodeID
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    node_id = NodeID.from_random()
    monkeypatch.setattr(importlib.import_module("ray._raylet"), "GcsClient", ControlStore)
    monkeypatch.setattr(ControlStore, "nodes", [node_id])
    monkeypatch.setattr(ControlStore, "state", GcsNodeInfo.DEAD)
    with pytest.raises(TimeoutError, match=r"not up after 0 s: a$"):
        wait_for_nodes("127.0.0.1:1", {"a": node_id.hex()}, patience_s=0.0)


def test_nobody_waits_for_a_node_whose_process_has_exited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, and those that may still come up are not."""
    monkeypatch.setattr(importlib.import_module("ray._raylet"), "GcsClient", ControlStore)
    monkeypatch.setattr(ControlStore, "nodes", [])
    cluster = Cluster()
    private = PrivateRay(directory=tmp_path, cluster=cluster)
    for name in ("head", "a", "b"):
        private.add_node(name, wait=False)
    cluster.exits(private.all_processes("b"))
    with pytest.raises(ClusterError, match=r"exited before all were up: b$"):
        private.wait_for_nodes()


def test_a_control_store_that_fails_while_nodes_start_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's own error is none of this program's, nor a ``TimeoutError``."""
    from ray.exceptions import RpcError

    def gone() -> None:
        raise RpcError("gone")

    @contextlib.contextmanager
    def private(**_: object) -> Iterator[Any]:
        yield SimpleNamespace(
            directory="/d",
            address="127.0.0.1:1",
            add_node=lambda *_, **__: None,
            wait_for_nodes=gone,
        )

    monkeypatch.setattr(cluster_module, "private_ray", private)
    monkeypatch.setattr(cluster_module, "join_cluster", lambda *_, **__: None)
    with pytest.raises(ClusterError, match="cannot start a Ray cluster here: gone"):
        cluster_module.emulate([]).__enter__()


_NODE = """
import os, subprocess, sys
known = {"RAY_RAYLET_PID": str(os.getpid())}
agent = subprocess.Popen(sys.argv[2:], env=known, stdout=subprocess.DEVNULL)
print(agent.pid, flush=True)
try:
    agent.wait(float(sys.argv[1]))
except subprocess.TimeoutExpired:
    os._exit(3)
"""


@pytest.mark.parametrize("lasts_s", [0.5, 0.0])
def test_an_idle_agent_ends_with_its_node(lasts_s: float) -> None:
    """And not before it; also if that died before the agent could ask for a signal."""
    idle = [sys.executable, "-I", "-S", str(ROOT / "orchestrator" / "on_ray" / "idle_agent.py")]
    node = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _NODE, str(lasts_s), *idle],
        stdout=subprocess.PIPE,
        timeout=patience(20),
        check=False,
    )
    agent = int(node.stdout)
    try:
        assert node.returncode == 3  # the agent was there
        assert until(lambda: agent not in processes(), 5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGKILL)


def test_a_ray_inside_a_ray_job_has_nothing_of_the_jobs_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray would give it to every actor, and a bare node has no agent that could prepare it."""
    job = '{"runtime_env": {"env_vars": {"A": "1"}}}'
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", job)
    with private_ray():
        assert "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ
    assert os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] == job


class Cluster:
    """Ray's own, as far as nodes are added to it."""

    address = "127.0.0.1:1"

    def __init__(self) -> None:
        self.head_node: Any = None
        self.added: list[dict[str, Any]] = []

    def add_node(self, **arguments: Any) -> Any:
        """Note what the node is to be."""
        self.added.append(arguments)
        raylet = SimpleNamespace(process=SimpleNamespace(poll=lambda: None))
        node = SimpleNamespace(
            node_id=f"{len(self.added):056x}",
            get_sockets_dir_path=lambda: "/s",
            all_processes={"raylet": [raylet]},
        )
        self.head_node = self.head_node or node
        return node

    def exits(self, processes: dict[str, list[Any]]) -> None:
        """Have a node's own process end."""
        processes["raylet"][0].process.poll = lambda: 1

    def remove_node(self, node: Any, *, allow_graceful: bool) -> None:
        """Nothing was started."""


def test_nodes_that_start_side_by_side_have_sockets_of_their_own(tmp_path: Path) -> None:
    """Also after one is gone. The head is always waited for, the others if told to be."""
    cluster = Cluster()
    private = PrivateRay(directory=tmp_path, cluster=cluster)
    for name in ("head", "a", "b"):
        private.add_node(name, wait=False)
    private.remove_node("a")
    private.add_node("c", wait=True)
    assert [each["wait"] for each in cluster.added] == [True, False, False, True]
    sockets = [
        each[name]
        for each in cluster.added[1:]
        for name in ("plasma_store_socket_name", "raylet_socket_name")
    ]
    assert len({*sockets}) == 6 and all(each.startswith("/s/") for each in sockets)


def test_a_silent_control_store_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine one answer may be late, while the nodes still come up."""
    from ray import NodeID
    from ray.exceptions import RpcError

    class SilentAtFirst(ControlStore):
        def get_all_node_info(self, timeout: float) -> dict[Any, object]:
            found = super().get_all_node_info(timeout)
            if type(self).asked == 1:
                raise RpcError("no answer in 5 s")
            return found

    node_id = NodeID.from_random()
    monkeypatch.setattr(importlib.import_module("ray._raylet"), "GcsClient", SilentAtFirst)
    monkeypatch.setattr(ControlStore, "nodes", [node_id])
    monkeypatch.setattr(SilentAtFirst, "asked", 0)
    wait_for_nodes("127.0.0.1:1", {"a": node_id.hex()})
    assert SilentAtFirst.asked == 2
