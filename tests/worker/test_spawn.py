"""The spawner of a host, as a driver or an agent starts and ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import until
from scripted_worker import Script
from source_tree import ROOT

from orchestrator.core.outcome import WorkerInfo
from orchestrator.worker.orphans import processes
from orchestrator.worker.process import WorkerProcess
from orchestrator.worker.protocol import Start
from orchestrator.worker.spawn import OwnSpawner

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
) -> Iterator[tuple[OwnSpawner, list[int]]]:
    (tmp_path / "loads_for_ever.py").write_text(_LOADS_FOR_EVER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PIDS", str(tmp_path))
    spawner = OwnSpawner(["loads_for_ever"], threads=1, log=tmp_path / "log")
    written = tmp_path / str(spawner.reaper.pid)
    assert until(written.exists, 20), (tmp_path / "log").read_text()
    pids = [int(pid) for pid in written.read_text().split()]
    yield spawner, pids
    for pid in processes().keys() & set(pids):
        os.kill(pid, signal.SIGKILL)
    spawner.close()


def test_a_spawner_can_be_ended_while_it_imports(loading: tuple[OwnSpawner, list[int]]) -> None:
    spawner, pids = loading
    spawner.close()
    assert spawner.reaper.returncode == 128 + signal.SIGKILL  # of the spawner
    assert not processes().keys() & set(pids)
    assert not Path(spawner.shared.path).parent.exists()


def test_a_spawner_that_imports_ends_with_its_reaper(
    loading: tuple[OwnSpawner, list[int]],
) -> None:
    spawner, (pid, _) = loading
    spawner.reaper.kill()
    assert until(lambda: pid not in processes(), 5)


_DRIVER = """
import pathlib, signal, sys, time
from orchestrator.worker.spawn import shared_spawner, wait_for_end
signal.signal(signal.SIGINT, lambda *_: None)
log_dir = pathlib.Path(sys.argv[1])
with shared_spawner((), threads=1, log_dir=log_dir) as own:
    (log,) = log_dir.glob("spawner-*.log")
    while "serving" not in log.read_text():
        time.sleep(0.01)
    print(own.shared.path, flush=True)
    sys.stdin.readline()
    time.sleep(0.2)
    print(own.shared.serves(1), flush=True)
    own.release()
    wait_for_end(own.shared.path)
    print("released", own.reaper.wait(20), flush=True)
"""


def test_what_a_terminal_sends_its_programs_is_not_for_the_spawner(tmp_path: Path) -> None:
    """Ctrl-C asks a driver to let its jobs end; they would end with their spawner."""
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
        path = Path(driver.stdout.readline().strip())
        os.killpg(driver.pid, signal.SIGINT)
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert driver.stdout.readline() == "True\n"
        assert driver.stdout.readline() == "released 0\n"
    assert driver.returncode == 0 and not path.parent.exists()


@pytest.mark.slow
def test_workers_are_forked_however_many_threads_they_may_have(tmp_path: Path) -> None:
    """NumPy's OpenBLAS starts a thread for each of OpenMP's but the first, which would rule out
    forking."""
    spawner = OwnSpawner(["numpy"], threads=4, log=tmp_path / "log")
    try:
        request = Start(
            worker_id="w",
            server=spawner.shared.path,
            factory="scripted_worker:ScriptedWorker",
            config=Script(start="import sys; assert 'numpy' in sys.modules"),
            environments={"": {}},
            log=str(tmp_path / "w.log"),
        )
        info = WorkerProcess(request).start()
        assert isinstance(info, WorkerInfo), (tmp_path / "w.log").read_text()
    finally:
        spawner.close()
