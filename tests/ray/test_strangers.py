"""Attempts of strangers on an emulated cluster, from another address or as another user here."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray_bench import Bench

from orchestrator.core.events import NodeJoined
from orchestrator.on_ray.cluster import MODE, TOKEN, TOKEN_PATH

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HERE = Path(__file__).parent
JOINS_WITHIN_S = 20.0
#: Loopback addresses at which only sockets of all interfaces answer, and of a stranger's node.
OUTSIDE, STRANGER = "127.0.0.213", "127.0.0.214"
#: What answers without a token, and gives away no more than that it lives.
HEALTH = {
    "/grpc.health.v1.Health/Check",
    "GET /api/healthz",
    "GET /api/local_raylet_healthz",
}


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ngs-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def environment(home: Path, token: str = "") -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "NIGHTGRID_"))}
    mine = {"HOME": str(home), "RAY_TMPDIR": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
    mine |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # or it would look for 127.0.0.1 elsewhere
    mine |= {"RAY_NUM_REDIS_GET_RETRIES": "1", "RAY_py_gcs_connect_timeout_s": "2"}
    return kept | mine | ({MODE: "token", TOKEN: token} if token else {})


def begin(command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=variables,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def told(process: subprocess.Popen[str], timeout_s: float = 150) -> tuple[int | None, str]:
    exit_code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            exit_code = process.wait(timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return exit_code, process.communicate()[0]


@pytest.fixture(scope="module")
def joining(bench: Bench, home: Path) -> Iterator[tuple[subprocess.Popen[str], float]]:
    """Stock `ray start --address` from another address, and when it began. (An open cluster has it
    join in 3 s; a closed one lets it try for half a minute, so it begins before all else here.)"""
    port = bench.cluster.address.rpartition(":")[2]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"]
    start += ["--address", f"{OUTSIDE}:{port}", "--node-ip-address", STRANGER]
    abroad = environment(home)
    del abroad["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
    process = begin(start, abroad)
    yield process, time.monotonic()
    if process.poll() is None:
        told(process, 0)


def sockets_of_the_cluster(bench: Bench) -> dict[int, tuple[str, str]]:
    """Port, program and address of every listening socket of this process and its descendants,
    which are all processes of the cluster."""
    found = {}
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM:
                    found[each.laddr.port] = (process.name(), each.laddr.ip)
    return {port: found[port] for port in found.keys() - bench.ports_before}


@pytest.mark.usefixtures("joining")
def test_everything_listens_on_the_loopback_address(bench: Bench) -> None:
    bench.wait_for(lambda event: isinstance(event, NodeJoined))  # so its agent is up
    sockets = sockets_of_the_cluster(bench)
    programs = {program for program, _ in sockets.values()}
    assert {"gcs_server", "raylet", "ray::DashboardAgent", "ray::NodeAgent"} <= programs
    wide = {k: v for k, v in sockets.items() if v[1].removeprefix("::ffff:") != "127.0.0.1"}
    assert wide == {}
    for port in sockets:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((OUTSIDE, port), 5).close()


@pytest.mark.parametrize("token", ["", "0" * 64], ids=["no token", "another token"])
def test_every_port_asks_for_the_token(bench: Bench, home: Path, token: str) -> None:
    """But for the metrics, which are figures alone, and for what says that a process lives."""
    bench.wait_for(lambda event: isinstance(event, NodeJoined))
    ports = [str(port) for port in sockets_of_the_cluster(bench)]
    probe = [sys.executable, str(HERE / "port_probe.py"), token, *ports]
    exit_code, output = told(begin(probe, environment(home)))
    assert exit_code == 0, output
    answers = json.loads(output.splitlines()[-1])
    metrics = {port for port, each in answers.items() if not each["refused"]}
    assert len(metrics) >= len(bench.cluster.ray_cluster.list_all_nodes())
    for port, each in answers.items():
        if port in metrics:
            assert each["protocol"] == "http" and set(each["answered"].values()) <= {200, 405}, each
        else:
            assert set(each["answered"]) <= HEALTH, (port, each)


def test_a_stranger_neither_joins_nor_runs_anything(bench, joining, home) -> None:
    """The actor would have written a file."""
    program = [sys.executable, str(HERE / "stranger.py"), bench.cluster.address]
    processes = [
        begin([*program, str(home / f"proof-{len(token)}")], environment(home, token))
        for token in ("", "0" * 64)
    ]
    for process in processes:
        exit_code, output = told(process)
        assert exit_code and "AuthenticationError" in output, output
    assert not list(home.glob("proof-*"))
    process, began = joining
    exit_code, output = told(process, max(0.0, began + JOINS_WITHIN_S - time.monotonic()))
    assert exit_code != 0 and "Ray runtime started" not in output, output
    addresses = {node["NodeManagerAddress"] for node in ray.nodes()}
    assert addresses == {"127.0.0.1"}


def test_the_token_is_in_the_clusters_directory_and_environment_alone(bench: Bench) -> None:
    directory = bench.cluster.directory
    path = directory / "token"
    token = path.read_text()
    assert len(token) == 64 and len(set(token)) > 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    ours = psutil.Process().children(recursive=True)
    assert len(ours) > 8
    for process in ours:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert token not in " ".join(process.cmdline())
            assert token.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert os.environ[MODE] == "token" and os.environ[TOKEN_PATH] == str(path)
    assert TOKEN not in os.environ
    kept = Path.home() / ".ray" / "auth_token"
    assert not kept.exists() or kept.read_text().strip() != token
