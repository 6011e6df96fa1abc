"""Nodes of a cluster and verdicts on addresses, without any Ray running."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from patience import patience

from orchestrator.core.errors import ClusterError
from orchestrator.core.job import Accelerator
from orchestrator.on_ray import cluster as ray_cluster
from orchestrator.on_ray.cluster import connect, nodes_of, resolve_address
from orchestrator.on_ray.local_cluster import emulate
from orchestrator.worker.host_server import THREADS, threads_asked
from workloads import devices
from workloads.devices import device_spec, own_devices

ROOT = Path(__file__).resolve().parents[2]


def ray_node(node_id: str, name: str = "10.0.0.1", **resources: float) -> dict[str, Any]:
    """One entry of ``ray.nodes()``."""
    return {
        "NodeID": node_id,
        "Alive": True,
        "NodeName": name,
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerHostname": "server",
        "Resources": {"node:10.0.0.1": 1.0, "memory": 1e9} | resources,
    }


def test_kinds_follow_from_resources() -> None:
    """HPU before CPU, GPU before CPU, CPU only when there is nothing else."""
    nodes = nodes_of(
        [
            ray_node("a", "gaudi", HPU=8.0, CPU=160.0),
            ray_node("b", "dgx", GPU=4.0, CPU=96.0),
            ray_node("c", "plain", CPU=32.0),
            ray_node("d", "head"),
        ]
    )
    found = {node.name: (node.accelerator, len(node.card_indices)) for node in nodes}
    assert found == {
        "gaudi": (Accelerator.HPU, 8),
        "dgx": (Accelerator.GPU, 4),
        "plain": (Accelerator.CPU, 1),
    }
    assert not any(node.emulated for node in nodes)


def test_an_unknown_resource_is_no_card() -> None:
    """A node of cards that no device declares is none of Gaudi cards: its host is one card."""
    (node,) = nodes_of([ray_node("a", "npus", NPU=8.0, CPU=96.0)])
    assert node.accelerator is Accelerator.CPU
    assert nodes_of([ray_node("a", "npus", NPU=8.0)]) == []


def test_kinds_that_share_a_resource_are_told_apart_by_their_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AMD's GPUs are torch's `cuda` and Ray's `GPU`, as NVIDIA's are: Ray's type decides."""
    amd = dataclasses.replace(
        device_spec("cuda"),
        name="rocm",
        accelerator="ROCM",
        torch_type="cuda",
        ray_type="AMD-Instinct",
    )
    monkeypatch.setattr(devices, "all_devices", lambda: (*own_devices(), amd))
    monkeypatch.setattr(ray_cluster, "all_devices", devices.all_devices)
    devices.of_accelerator.cache_clear()
    nodes = nodes_of(
        [
            ray_node("a", "amd", GPU=8.0, **{"accelerator_type:AMD-Instinct-MI300X-OAM": 1.0}),
            ray_node("b", "nvidia", GPU=4.0, **{"accelerator_type:H100": 1.0}),
            ray_node("c", "silent", GPU=2.0),
        ]
    )
    assert [node.accelerator for node in nodes] == ["ROCM", "GPU", "GPU"]
    assert (nodes[0].accelerator.device, nodes[0].accelerator.spec.torch_type) == ("rocm", "cuda")


def test_a_dead_node_is_no_node() -> None:
    """``ray.nodes()`` lists those that are gone as well."""
    assert nodes_of([ray_node("a", HPU=8.0) | {"Alive": False}]) == []


def test_an_emulated_node_says_so() -> None:
    """The mark, the size of the server and of a card come from custom resources."""
    resources = {"HPU": 4.0, "emulated": 1.0, "server_cards": 8.0, "card_memory_mib": 512.0}
    (node,) = nodes_of([ray_node("a", "hpu-1", **resources)])
    assert node.emulated and node.device_name == "emulated HPU on CPU"
    assert (node.server_cards, node.memory_bytes_per_card) == (8, 512 * 2**20)


def test_a_share_of_a_gaudi_server_is_still_of_eight() -> None:
    """Two cards of a Gaudi server are legal only as an aligned pair of its eight."""
    (node,) = nodes_of([ray_node("a", HPU=2.0)])
    assert node.server_cards == 8


def test_names_are_given_ones_else_hosts_and_never_twice() -> None:
    """Several Ray nodes on one host get a piece of their id."""
    nodes = nodes_of([ray_node("aaaa1", HPU=1.0), ray_node("bbbb2", HPU=1.0)])
    assert [node.name for node in nodes] == ["server-aaaa", "server-bbbb"]
    (node,) = nodes_of([ray_node("aaaa1", "rack-7", HPU=1.0)])
    assert node.name == "rack-7"


def test_the_device_name_comes_from_rays_accelerator_type() -> None:
    """Set by hand on Gaudi nodes, by Ray on NVIDIA ones."""
    (node,) = nodes_of([ray_node("a", HPU=8.0, **{"accelerator_type:Intel-GAUDI2": 1.0})])
    assert node.device_name == "Intel-GAUDI2"


def test_two_kinds_on_one_node_are_refused() -> None:
    """Their jobs would disturb each other; the message names the node and the way out."""
    with pytest.raises(ClusterError, match=r"node both has both HPU and GPU.*--num-gpus 0"):
        nodes_of([ray_node("a", "both", HPU=8.0, GPU=1.0)])


@pytest.mark.parametrize("address", ["http://head:8265", "ray://head:10001", "head", "head:port"])
def test_an_address_of_another_kind_is_refused(address: str) -> None:
    """Only HOST:PORT of the control store can be joined."""
    with pytest.raises(ClusterError):
        resolve_address(address)


def test_a_dead_address_is_told_quickly() -> None:
    """Ray itself blocks for over a minute there, and then ends the process."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(ClusterError, match=f"no Ray cluster answers at 127.0.0.1:{port}"):
            resolve_address(f"127.0.0.1:{port}")
        assert time.monotonic() - started < patience(6)


def test_without_any_address_the_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate, join, or submit."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(ClusterError, match=r"--emulate 2x8.*--address.*nightgrid submit"),
        connect(),
    ):
        pass


def test_what_ray_says_of_dead_workers_stays_out_of_our_output(tmp_path: Path) -> None:
    """It would stand, coloured, between the lines of a log and in the JSON of `run --json`."""
    code = (
        "import orchestrator.on_ray.cluster, ray._private.worker as worker\n"
        "worker.print_to_stdstream({'lines': ['A worker died'], 'pid': 'raylet', 'is_err': False},"
        " ignore_prefix=False)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""


@pytest.mark.parametrize(("told", "asked"), [("", None), ("1", 1), ("12", 12)])
def test_the_environment_may_ask_for_threads(
    told: str, asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unset or empty it asks for nothing, and workers share the cores."""
    monkeypatch.setenv(THREADS, told)
    assert threads_asked() == asked


@pytest.mark.parametrize("told", ["0", "-1", "two", "1.5"])
def test_no_number_of_threads_stops_emulation_before_it_starts(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable and its value are named."""
    monkeypatch.setenv(THREADS, told)
    with pytest.raises(ClusterError, match=f"NIGHTGRID_THREADS='{told}'"), emulate([]):
        pass
