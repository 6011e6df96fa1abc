"""Examining a real Ray cluster, which lacks a package, and in which a node is frozen."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import ray
from patience import patience
from ray_bench import Bench

from orchestrator.core.errors import CLUSTER_UNFIT
from orchestrator.core.events import NodeJoined
from orchestrator.core.job import Accelerator
from orchestrator.doctor.checks import exit_code, finding_lines, judge, summary_lines
from orchestrator.doctor.probe import examine
from orchestrator.on_ray import examination
from orchestrator.on_ray.cluster import described
from orchestrator.on_ray.examination import ClusterFacts, Examination, NodeFacts, clock_offset
from orchestrator.util.host import host_problems
from workloads.devices import Level

pytestmark = [pytest.mark.ray, pytest.mark.slow]

#: The frozen node is given up after this time, or four times that of the slowest of the others.
START_S = 5.0
TIMEOUT_S = 150.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def examined(bench, shared):
    bench.wait_for(lambda event: isinstance(event, NodeJoined) and event.node.name == "hpu-1")
    cluster = bench.cluster
    cluster.add_ray_node("bare", num_cpus=0, resources={"emulated": 1})
    cluster.add_ray_node("frozen", num_cpus=0, resources={"emulated": 1})
    raylet = cluster.ray_nodes["frozen"].all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGSTOP)
    patience = pytest.MonkeyPatch()
    patience.setattr(examination, "START_S", START_S)
    try:
        yield Examination(
            examine=examine,
            packages=("csv", "nightgrid_none"),
            shared_dir=str(shared),
            expected_nodes=6,
            timeout_s=TIMEOUT_S,
        ).of(cluster)
    finally:
        patience.undo()
        os.kill(raylet, signal.SIGCONT)
        bench.remove("frozen")
        bench.remove("bare")


def named(facts: ClusterFacts, name: str) -> NodeFacts:
    return next(node for node in facts.nodes if node.name == name)


def test_every_node_says_what_it_has(examined: ClusterFacts) -> None:
    cards = {node.name: dict(node.cards) for node in examined.nodes}
    assert cards["hpu-1"] == {Accelerator.HPU: 4}
    assert cards["gpu-1"] == {Accelerator.GPU: 2}
    assert cards["cpu-1"] == {Accelerator.CPU: 1}
    assert cards["bare"] == cards["frozen"] == {}
    assert [node.name for node in examined.nodes if node.head] == ["hpu-1"]
    assert examined.token  # a process without one was refused
    node = named(examined, "hpu-1")
    assert node.emulated and node.probe is not None and node.clock is not None
    assert node.probe.versions["ray"] == examined.driver.ray
    assert "csv" not in node.probe.import_errors
    assert abs(node.clock.offset_s) <= node.clock.bound_s < patience(2.0)


def test_nodes_are_asked_for_their_packages(bench: Bench) -> None:
    nodes = {node.name: node for node in bench.cluster.nodes()}
    gaudi = replace(nodes["hpu-1"], emulated_device="hpu")
    gone = replace(gaudi, name="gone", node_id="0" * 56)
    asked, gone, gpu = described([gaudi, gone, nodes["gpu-1"]])
    packages = dict(asked.packages or ())
    assert packages["torch"] == metadata.version("torch")
    assert packages["transformers"] == metadata.version("transformers")
    assert "optimum-habana" not in packages and "kernel" not in packages
    assert gone.packages is None and dict(gpu.packages or ())["torch"] == packages["torch"]
    assert len(asked.faults) == len(host_problems())


def test_cards_that_somebody_holds_are_not_free(examined: ClusterFacts) -> None:
    held = [f for f in judge(examined) if f.check == "cards-free" and f.where == "hpu-1"]
    assert [f.message for f in held] == ["4 of 4 cards are held in Ray's accounts"]


def test_nodes_that_lack_a_package_are_named(examined: ClusterFacts) -> None:
    found = {f.where: f.message for f in judge(examined) if f.check == "imports"}
    assert found.keys() == {"bare", "hpu-1", "gpu-1", "cpu-1"}
    assert "nightgrid_none does not import: ModuleNotFoundError" in found["hpu-1"]


def test_a_frozen_node_is_a_finding_and_not_a_hang(examined: ClusterFacts) -> None:
    found = judge(examined)
    silent = [f for f in found if f.check == "answer"]
    assert [(f.where, f.level) for f in silent] == [("frozen", Level.ERROR)]
    assert exit_code(found) == CLUSTER_UNFIT
    told = "\n".join([*summary_lines(examined), *finding_lines(found)])
    assert "ERROR   frozen: it" in told and "hpu-1 (head), 4 HPU" in told
    assert "6 expected nodes" in told  # it has five


def test_the_shared_directory_is_found_shared_and_left_clean(examined, shared) -> None:
    answered = [node.probe for node in examined.nodes if node.probe is not None]
    assert len(answered) == 4
    assert all(
        probe.shared and probe.shared.readable and probe.shared.written for probe in answered
    )
    assert list(shared.iterdir()) == []


def test_the_shortest_round_trip_bounds_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trips of 1.0, 0.2 and 0.6 s the second says most: two seconds less half of it."""
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr("orchestrator.on_ray.examination.ROUND_TRIPS", 3)
    times = iter([50.0, 51.0, 60.0, 60.2, 70.0, 70.6])
    offset = clock_offset(lambda: 1002.0, clock=lambda: 1000.0, steady=lambda: next(times))
    assert offset.offset_s == pytest.approx(1.9)
    assert offset.bound_s == pytest.approx(0.1)
