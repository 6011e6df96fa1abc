"""Nodes of Ray on this host, before Ray is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.domain.job import Accelerator
from orchestrator.on_ray.cluster import nodes_of
from orchestrator.on_ray.raylets import raylet_of, raylets_here
from orchestrator.worker.host_server import THREADS, threads_of_nodes

#: A raylet's command line, as Ray 2.60 writes it, without what is not read.
COMMAND = (
    "/site-packages/ray/core/src/ray/raylet/raylet",
    "--node_id=be34",
    "--node_ip_address=10.0.0.1",
    "--maximum_startup_concurrency=2",
    "--static_resource_list=HPU,8,node:10.0.0.1,1.0,CPU,2,emulated,1,server_cards,8",
    "--python_worker_command=/bin/python setup_worker.py --node-ip-address=10.0.0.9",
    "--session_dir=/tmp/ray/session_1",
    "--gcs-address=10.0.0.1:6399",
    '--labels={"zone": "a=b"}',
    "--head",
)


def test_a_node_is_read_from_its_command_line() -> None:
    """In the words in which Ray itself would tell of it."""
    found = raylet_of(COMMAND)
    assert (found.address, found.session) == ("10.0.0.1:6399", Path("/tmp/ray/session_1"))
    (node,) = nodes_of([found.node])
    assert (node.accelerator, node.server_cards, node.emulated) == (Accelerator.HPU, 8, True)
    assert found.node["Labels"] == {"zone": "a=b"}
    assert found.node["NodeManagerAddress"] == "10.0.0.1"


@pytest.mark.parametrize(
    "missing", ["--node_id", "--session_dir", "--static_resource_list", "--gcs-address"]
)
def test_a_command_line_of_another_version_of_ray_is_no_node(missing: str) -> None:
    """It is nobody's interface, and may change."""
    with pytest.raises(ValueError, match=missing):
        raylet_of([word for word in COMMAND if not word.startswith(missing)])


def test_resources_without_an_amount_are_no_node() -> None:
    """A list that is cut off says nothing that can be relied on."""
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        raylet_of(["--static_resource_list=HPU,8,CPU", "--node_id=b", "--node_ip_address=::"])


def test_a_port_that_no_cluster_has_finds_no_node() -> None:
    """Whatever else runs on this host."""
    assert raylets_here("127.0.0.1:1") == []


def test_threads_are_those_of_the_nodes_that_compute_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """None, where each card has a processor of its own."""
    emulated = nodes_of([raylet_of(COMMAND).node])
    real = [word.replace(",emulated,1", "") for word in COMMAND]
    assert threads_of_nodes(nodes_of([raylet_of(real).node])) is None
    assert threads_of_nodes([]) is None
    monkeypatch.setenv(THREADS, "3")
    assert threads_of_nodes(emulated) == 3
