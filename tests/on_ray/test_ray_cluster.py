"""Nodes of a cluster and verdicts on addresses, without any Ray running."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from patience import patience

from orchestrator.core.errors import ClusterError
from orchestrator.core.job import Accelerator
from orchestrator.on_ray import cluster
from orchestrator.on_ray.cluster import (
    MODE,
    TOKEN,
    TOKEN_PATH,
    connect,
    new_token,
    nodes_of,
    resolve_address,
)
from orchestrator.on_ray.local_cluster import emulate
from orchestrator.store.store import Store
from orchestrator.worker.environment import THREADS, configured_threads
from workloads import devices
from workloads.devices import device_spec, own_devices

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process to which no cluster is known, with these variables."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )


def ray_node(node_id: str, name: str = "10.0.0.1", **resources: float) -> dict[str, Any]:
    return {
        "NodeID": node_id,
        "Alive": True,
        "NodeName": name,
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerHostname": "server",
        "Resources": {"node:10.0.0.1": 1.0, "memory": 1e9} | resources,
    }


def test_kinds_follow_from_resources() -> None:
    nodes = nodes_of(
        [
            ray_node("a", "gaudi", HPU=8.0, CPU=160.0),
            ray_node("b", "dgx", GPU=4.0, CPU=96.0),
            ray_node("c", "plain", CPU=32.0),
            ray_node("d", "head"),
            ray_node("e", "npus", NPU=8.0, CPU=96.0),
            ray_node("f", "npus alone", NPU=8.0),
            ray_node("g", "dead", HPU=8.0) | {"Alive": False},
        ]
    )
    kinds = {node.name: (node.accelerator, len(node.card_indices)) for node in nodes}
    assert kinds == {
        "gaudi": (Accelerator.HPU, 8),
        "dgx": (Accelerator.GPU, 4),
        "plain": (Accelerator.CPU, 1),
        "npus": (Accelerator.CPU, 1),
    }
    assert not any(node.emulated for node in nodes)


def test_kinds_that_share_a_resource_are_told_apart_by_their_type(monkeypatch) -> None:
    """AMD's GPUs are torch's `cuda` and Ray's `GPU`, as NVIDIA's are: Ray's type decides."""
    amd = dataclasses.replace(
        device_spec("cuda"),
        name="rocm",
        accelerator="ROCM",
        torch_type="cuda",
        ray_type="AMD-Instinct",
    )
    monkeypatch.setattr(devices, "all_devices", lambda: (*own_devices(), amd))
    monkeypatch.setattr(cluster, "all_devices", devices.all_devices)
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


def test_a_node_says_what_it_has_by_its_resources() -> None:
    resources = {"HPU": 4.0, "emulated": 1.0, "server_cards": 8.0, "card_memory_mib": 512.0}
    (node,) = nodes_of([ray_node("a", "hpu-1", **resources)])
    assert node.emulated and node.device_name == "emulated HPU on CPU"
    assert (node.server_cards, node.memory_bytes_per_card) == (8, 512 * 2**20)
    (node,) = nodes_of([ray_node("a", HPU=2.0, **{"accelerator_type:Intel-GAUDI2": 1.0})])
    assert node.device_name == "Intel-GAUDI2" and node.server_cards == 8


def test_names_are_given_ones_else_hosts_and_never_twice() -> None:
    nodes = nodes_of([ray_node("aaaa1", HPU=1.0), ray_node("bbbb2", HPU=1.0)])
    assert [node.name for node in nodes] == ["server-aaaa", "server-bbbb"]
    (node,) = nodes_of([ray_node("aaaa1", "rack-7", HPU=1.0)])
    assert node.name == "rack-7"


def test_two_kinds_on_one_node_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"node both has both HPU and GPU.*--num-gpus 0"):
        nodes_of([ray_node("a", "both", HPU=8.0, GPU=1.0)])


@pytest.mark.parametrize("address", ["http://head:8265", "ray://head:10001", "head", "head:port"])
def test_an_address_of_another_kind_is_refused(address: str) -> None:
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
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(ClusterError, match=r"--emulate 2x8.*--address.*nightgrid submit"),
        connect(),
    ):
        pass


def test_what_ray_says_of_dead_workers_stays_out_of_our_output() -> None:
    """It would stand, coloured, between the lines of a log and in the JSON of `run --json`."""
    code = (
        "import orchestrator.on_ray.cluster, ray._private.worker as worker\n"
        "worker.print_to_stdstream({'lines': ['A worker died'], 'pid': 'raylet', 'is_err': False},"
        " ignore_prefix=False)\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("told", "asked"), [("", None), ("1", 1), ("12", 12)])
def test_the_environment_may_ask_for_threads(told, asked, monkeypatch) -> None:
    monkeypatch.setenv(THREADS, told)
    assert configured_threads() == asked


@pytest.mark.parametrize("told", ["0", "-1", "two", "1.5"])
def test_no_number_of_threads_stops_emulation_before_it_starts(told, monkeypatch) -> None:
    monkeypatch.setenv(THREADS, told)
    with pytest.raises(ClusterError, match=f"NIGHTGRID_THREADS='{told}'"), emulate([]):
        pass


# ---------------------------------------------------------------- tokens


#: Prints what this process would send: at first, in two blocks one after another, at the end.
_PROGRAM = """
import json, os, sys
from pathlib import Path
from orchestrator.on_ray.cluster import new_token, ray_environment, take_own_token
from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode

def sent():
    if get_authentication_mode() != AuthenticationMode.TOKEN:
        return "nothing"
    (header,) = AuthenticationTokenLoader.instance().get_token_for_http_header().values()
    return header

take_own_token()
told = [sent()]
for name in ("one", "two"):
    place = Path(sys.argv[1]) / name
    place.mkdir()
    before = dict(os.environ)
    with ray_environment(new_token(place)):
        told.append(sent() == "Bearer " + (place / "token").read_text())
    assert dict(os.environ) == before
    told.append(sent())
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.parametrize("users", ["kept by Ray", "path", "gone"])
def test_clusters_one_after_another_have_tokens_of_their_own(tmp_path: Path, users: str) -> None:
    """Where the user has no token, Ray is not asked for it: it would abort the process."""
    mine = "a" * 64
    variables = {}
    if users == "kept by Ray":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(mine)
    elif users == "path":
        (tmp_path / "mine").write_text(mine)
        variables = {MODE: "token", TOKEN_PATH: str(tmp_path / "mine")}
    elif users == "gone":
        variables = {MODE: "disabled", TOKEN_PATH: "/none"}
    own = "nothing" if users == "gone" else f"Bearer {mine}"
    done = python(_PROGRAM, tmp_path, HOME=str(tmp_path), **variables)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [own, True, own, True, own]


def test_a_token_is_random_and_for_this_user_alone(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    before = os.umask(0)
    try:
        variables = new_token(tmp_path)
    finally:
        os.umask(before)
    path = Path(variables[TOKEN_PATH] or "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = Path(new_token(tmp_path / "second")[TOKEN_PATH] or "")
    assert len(path.read_text()) == 64 and path.read_text() != other.read_text()
    assert variables[TOKEN] is None  # which would go before the file
    with pytest.raises(FileExistsError):
        new_token(tmp_path)


# ---------------------------------------------------------------- a silent cluster


#: `nightgrid` that is told of silence after 0.2 s, and gives up after one.
IMPATIENT = """\
import sys
from orchestrator.on_ray import cluster, gcs
cluster._FIRST_ANSWER_S, gcs.SILENT_AFTER_S = 1.0, 0.2
from orchestrator.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def run(address: str, results: Path) -> subprocess.CompletedProcess[str]:
    options = ("--address", address, "--results", results, "--run", "night")
    grid = ROOT / "grids" / "smoke.yaml"
    return python(IMPATIENT, "run", grid, *options, RAY_AUTH_MODE="disabled")


@pytest.mark.slow
def test_a_silent_control_store_is_told_and_not_waited_for(silent: str, tmp_path: Path) -> None:
    done = run(silent, tmp_path / "results")
    assert done.returncode == 3, done.stderr
    assert f"waiting up to 1 s for the control store of the Ray cluster at {silent}" in done.stderr
    assert "has not answered for 1 s: it is frozen, overloaded or still starting" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "results").exists()


@pytest.mark.slow
def test_who_holds_a_run_is_told_before_its_cluster_is_asked(silent: str, tmp_path: Path) -> None:
    with Store(tmp_path, "night"):
        done = run(silent, tmp_path)
    assert done.returncode == 4, done.stderr
    assert f"run 'night' is held by process {os.getpid()} on " in done.stderr
    assert "waiting" not in done.stderr


@pytest.mark.parametrize("answer", [OSError("connection reset"), None])
def test_nobody_joins_a_cluster_that_did_not_answer(answer, monkeypatch) -> None:
    """Ray would try for a quarter of an hour to reach one that ended while it was asked."""
    monkeypatch.setattr(cluster, "first_answer", lambda *_, **__: answer)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it was joined"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test's cluster is shared
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterError, match=r"connection reset|has not answered for 30 s"):
        cluster.join_cluster("127.0.0.1:6379")
