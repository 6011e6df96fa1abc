"""The processes of a killed driver are found by more than its environment, and nobody else is hit.

All processes here are real; none is Ray's (``ray/test_ray_executor.py`` has those).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from orchestrator.worker import orphans
from orchestrator.worker.orphans import (
    VARIABLE,
    Owner,
    end_orphans,
    orphans_of,
    remove_abandoned,
)
from workloads.util.processes import MARKER, ProcessIdentity, make_owned_directory

ROOT = Path(__file__).resolve().parents[2]

#: Writes over its own environment, as setproctitle does with long titles.
FORGET = """
import ctypes
words = open('/proc/self/stat', 'rb').read().rpartition(b')')[2].split()
start, end = int(words[47]), int(words[48])
ctypes.memset(start, 0, end - start)
"""
SAY = "\nimport os\nos.write(1, b'%d\\n' % os.getpid())\n"
SLEEP = SAY + "import time\ntime.sleep(600)\n"

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program and returns its process id, once it says so; ends it afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str, mark: str = "", cwd: Path = tmp_path) -> int:
        kept = {k: v for k, v in os.environ.items() if k != VARIABLE}
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=kept | ({VARIABLE: mark} if mark else {}) | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of private directories, for this test alone."""
    base = tmp_path / "base"
    base.mkdir()
    monkeypatch.setattr(orphans, "base_directories", lambda: [base])
    return base


def of_a_killed_driver(base: Path, owner: str) -> Path:
    """A private directory whose maker has ended."""
    path = make_owned_directory("ng-", base, owner).path
    ended = subprocess.Popen(["sleep", "600"])
    ticks = ProcessIdentity.of_this_process().started_ticks
    ended.kill()
    ended.wait()
    marker = json.loads((path / MARKER).read_text())
    (path / MARKER).write_text(json.dumps(marker | {"pid": ended.pid, "started_ticks": ticks}))
    return path


def logs_in(directory: Path, name: str = "agent.log") -> str:
    """Code that opens a log there, as Ray and our workers do."""
    return f"import os\nos.open({str(directory / name)!r}, os.O_WRONLY|os.O_APPEND|os.O_CREAT)\n"


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state != b"Z"


def test_a_process_that_wrote_over_its_environment_is_found(start: Start, base: Path) -> None:
    """By its log, and its child by descent; the mark is in the environment of neither."""
    run = f"run{os.getpid()}"
    directory = of_a_killed_driver(base, f"{run}.a")
    child = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {FORGET + SLEEP!r}])\n"
        "import time\ntime.sleep(600)\n"
    )
    agent = start(logs_in(directory) + FORGET + SLEEP, mark=f"{run}.a")
    grandchild = start(logs_in(directory, "parent.log") + FORGET + child, mark=f"{run}.a")
    for pid in (agent, grandchild):
        assert VARIABLE.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    now = Owner(run_id=run, invocation_id="b")
    found = {each.pid for each in orphans_of(now)}
    assert {agent, grandchild} <= found and len(found) == 3  # and the grandchild's parent
    assert {each.owner for each in orphans_of(now)} == {Owner(run_id=run, invocation_id="a")}
    assert orphans_of(Owner(run_id="another", invocation_id="b")) == []
    assert {each.pid for each in end_orphans(now)} == found
    assert not any(map(lives, found)) and directory.exists()
    remove_abandoned()
    assert not directory.exists()


def test_nobody_is_hit_who_only_looks(start: Start, base: Path, tmp_path: Path) -> None:
    """An editor with a file of the results open, to write; who reads a log of the private
    directory; a shell that stands in it; a child of ours that belongs to another driver."""
    run = f"run{os.getpid()}"
    directory = of_a_killed_driver(base, f"{run}.a")
    log = directory / "raylet.out"
    log.write_text("…")
    results = tmp_path / "ng-2026-11-21-results"
    results.mkdir()
    edit = f"import os\nos.open({str(results / 'notes')!r}, os.O_RDWR | os.O_CREAT)\n"
    swap = f"import os\nos.open({str(directory / '.raylet.out.swp')!r}, os.O_RDWR | os.O_CREAT)\n"
    read = f"file = open({str(log)!r})\n"
    bystanders = [
        start(edit + SLEEP),
        start(logs_in(results) + SLEEP),
        start(swap + SLEEP),
        start(read + SLEEP, str(log)),
        start(SLEEP, cwd=directory),
        start(logs_in(of_this_test(base)) + SLEEP),  # its driver lives
    ]
    other = (
        "import os, subprocess, sys\n"
        f"os.environ[{VARIABLE!r}] = 'other.x'\n"
        f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        "import time\ntime.sleep(600)\n"
    )
    others_child = start(logs_in(directory) + other)
    remove_abandoned()
    end_orphans(Owner(run_id=run, invocation_id="b"))
    try:
        assert all(map(lives, [*bystanders, others_child]))
    finally:
        os.kill(others_child, 9)
    assert not directory.exists()  # and the one whose log it was is gone, or it would have stayed


def of_this_test(base: Path) -> Path:
    return make_owned_directory("ng-", base, "run.mine").path


_DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from orchestrator.worker.orphans import guarded
from workloads.util.processes import make_owned_directory

directory = make_owned_directory("ng-", Path(sys.argv[1]), "run.a")
with guarded(directory):
    with open(directory.path / "agent.log", "ab") as log:
        agent = subprocess.Popen(
            [sys.executable, "-c", "import os; os.setsid(); import time; time.sleep(600)"],
            stdout=log, stderr=log,
        )
    print(agent.pid, flush=True)
    if sys.argv[2] == "killed":
        time.sleep(600)
    agent.kill()
    directory.remove()
print("ended", flush=True)
"""


@pytest.mark.parametrize("how", ["killed", "in order"])
def test_a_killed_drivers_directory_is_cleared_up_by_its_guard(tmp_path: Path, how: str) -> None:
    """Within seconds, with no other driver about; and the guard ends with a driver in any case."""
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(tmp_path), how],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdout is not None
        agent = int(driver.stdout.readline())
        if how == "killed":
            assert lives(agent) and len(list(tmp_path.iterdir())) == 1
            driver.kill()
        else:
            assert driver.stdout.readline() == "ended\n"
    deadline = time.monotonic() + 30
    while (lives(agent) or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(agent) and list(tmp_path.iterdir()) == []
    while guards(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert guards(tmp_path) == []


def guards(base: Path) -> list[int]:
    """The guards of directories in ``base`` that run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"orchestrator.worker.orphans" in words and str(base).encode() in words:
            found.append(int(entry.name))
    return found


def test_a_number_that_came_back_is_another_process() -> None:
    """The start time tells them apart, so nothing is killed or kept by number alone."""
    me = ProcessIdentity.of_this_process()
    assert not me.is_gone()
    values = asdict(me) | {"started_ticks": me.started_ticks - 1}
    assert ProcessIdentity(**values).is_gone()
