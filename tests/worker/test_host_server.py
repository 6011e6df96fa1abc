"""The process server of a host, as a driver starts and ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import until
from source_tree import ROOT

from orchestrator.core.outcome import WorkerInfo
from orchestrator.worker.card_process import CardProcess, Launch
from orchestrator.worker.host_server import end_server, start_server, wait_for_server
from orchestrator.worker.process_table import processes
from orchestrator.worker.served_process import end_process

_LOADS_FOR_EVER = """
import os, pathlib, subprocess, time
child = subprocess.Popen(["sleep", "600"])
place = pathlib.Path(os.environ["PIDS"])
(place / "new").write_text(f"{os.getpid()} {child.pid}")
(place / "new").rename(place / str(os.getppid()))
time.sleep(600)
"""


@pytest.fixture
def loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[bytes], list[int], Path]]:
    """A server that still imports a module: its guardian, itself with a child, its socket."""
    (tmp_path / "loads_for_ever.py").write_text(_LOADS_FOR_EVER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PIDS", str(tmp_path))
    path = tmp_path / "own" / "s"
    path.parent.mkdir()
    guardian = start_server(str(path), ["loads_for_ever"], threads=1, log=tmp_path / "log")
    told = tmp_path / str(guardian.pid)
    assert until(told.exists, 20), (tmp_path / "log").read_text()
    pids = [int(pid) for pid in told.read_text().split()]
    yield guardian, pids, path
    for pid in processes().keys() & set(pids):
        os.kill(pid, signal.SIGKILL)
    guardian.kill()
    guardian.wait()


def test_a_server_can_be_ended_while_it_imports(
    loading: tuple[subprocess.Popen[bytes], list[int], Path],
) -> None:
    """Its guardian ends it, with all that it has started, and leaves no directory."""
    guardian, pids, path = loading
    end_server(guardian)
    assert guardian.returncode == 128 + signal.SIGKILL  # of the server; it was not killed itself
    assert not processes().keys() & set(pids)
    assert not path.parent.exists()


def test_a_server_that_imports_ends_with_its_guardian(
    loading: tuple[subprocess.Popen[bytes], list[int], Path],
) -> None:
    """Nobody is left to end it later."""
    guardian, (server, _), _ = loading
    guardian.kill()
    assert until(lambda: server not in processes(), 5)


_DRIVER = """
import os, pathlib, signal, subprocess, sys
from orchestrator.worker import host_server
signal.signal(signal.SIGINT, lambda *_: None)
started = []
def start(*args, **kwargs):
    started.append(start_server(*args, **kwargs))
    return started[-1]
start_server, host_server.start_server = host_server.start_server, start
with host_server.shared_server((), threads=1, log_dir=pathlib.Path(sys.argv[1])) as own:
    host_server.wait_for_server(own.shared.path, started[0], pathlib.Path(sys.argv[1]))
    print(own.shared.path, flush=True)
    sys.stdin.readline()
    try:
        print("ended", started[0].wait(0.5), flush=True)
    except subprocess.TimeoutExpired:
        print("there", flush=True)
    own.release()
    print("released", started[0].wait(20), flush=True)
"""


def test_what_a_terminal_sends_its_programs_is_not_for_the_server(tmp_path: Path) -> None:
    """Ctrl-C asks a driver to let its jobs end; they would end with their server. Once released it
    ends by itself."""
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group, as a shell makes one
    )
    assert driver.stdin is not None and driver.stdout is not None
    with driver:
        path = driver.stdout.readline().strip()
        os.killpg(driver.pid, signal.SIGINT)
        end_process(path, "nobody")  # it answers
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert driver.stdout.readline() == "there\n"
        assert driver.stdout.readline() == "released 0\n"
    assert driver.returncode == 0


@pytest.mark.slow
def test_workers_are_forked_however_many_threads_they_may_have(tmp_path: Path) -> None:
    """NumPy's OpenBLAS starts a thread for each of OpenMP's but the first; with it nothing could be
    forked, and each worker would make the imports by itself."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        path = f"{short}/own/s"
        os.mkdir(f"{short}/own")
        server = start_server(path, ["numpy"], threads=4, log=tmp_path / "log")
        try:
            wait_for_server(path, server, tmp_path / "log")
            launch = Launch(
                name="w",
                server=path,
                factory="scripted_worker:ScriptedWorker",
                config={"name": "w", "start": "import sys; assert 'numpy' in sys.modules"},
                environments={"": {}},
                log=str(tmp_path / "w.log"),
            )
            info = CardProcess(launch).start()
            assert isinstance(info, WorkerInfo), (tmp_path / "w.log").read_text()
        finally:
            end_server(server)
