"""A cluster whose control store takes connections and says nothing, as a frozen one does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from patience import patience

from orchestrator.core.errors import ClusterError
from orchestrator.on_ray import cluster
from orchestrator.results.store import Store

ROOT = Path(__file__).resolve().parents[2]
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
    """The address of something that never answers: the kernel takes its connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def run(address: str, results: Path) -> subprocess.CompletedProcess[str]:
    """Run a grid there; every process of it must end by itself."""
    command = [sys.executable, "-c", IMPATIENT, "run", str(ROOT / "grids" / "smoke.yaml")]
    return subprocess.run(
        [*command, "--address", address, "--results", str(results), "--run", "night"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=patience(30),
    )


@pytest.mark.slow
def test_a_silent_control_store_is_told_and_not_waited_for(silent: str, tmp_path: Path) -> None:
    """First that it is waited for, then what it is, and nothing was made."""
    done = run(silent, tmp_path / "results")
    assert done.returncode == 3, done.stderr
    assert f"waiting up to 1 s for the control store of the Ray cluster at {silent}" in done.stderr
    assert "has not answered for 1 s: it is frozen, overloaded or still starting" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "results").exists()


@pytest.mark.slow
def test_who_holds_a_run_is_told_before_its_cluster_is_asked(silent: str, tmp_path: Path) -> None:
    """The second driver of a run learns who holds it while its cluster is away, and that the lock
    cannot be understood if that is so."""
    with Store.open(tmp_path, "night") as store:
        began = time.monotonic()
        done = run(silent, tmp_path)
        assert done.returncode == 4, done.stderr
        assert f"run 'night' is held by process {os.getpid()} on " in done.stderr
        assert "waiting" not in done.stderr, f"{time.monotonic() - began:.1f} s: {done.stderr}"
        lock = store.path / "driver.lock"
        sound = lock.read_bytes()
        lock.write_bytes(b"[" * 6000)
        done = run(silent, tmp_path)
        lock.write_bytes(sound)
        assert done.returncode == 4 and "driver.lock exists but does not say" in done.stderr


@pytest.mark.parametrize("answer", [OSError("connection reset"), None])
def test_nobody_joins_a_cluster_that_did_not_answer(
    answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would try for a quarter of an hour to reach one that ended while it was asked."""
    monkeypatch.setattr(cluster, "first_answer", lambda *_, **__: answer)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it was joined"))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterError, match=r"connection reset|has not answered for 30 s"):
        cluster.join_cluster("127.0.0.1:6379")
