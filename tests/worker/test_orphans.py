"""The processes of a killed driver are found, and nobody else is hit.

All processes here are real; none is Ray's (``ray/test_ray_executor.py`` has those).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from patience import alive, commands_naming, until

from orchestrator.worker import orphans
from orchestrator.worker.orphans import (
    VARIABLE,
    Owner,
    end_orphans,
    orphans_of,
    private_directory,
    remove_abandoned,
)
from workloads.util.processes import MARKER, ProcessIdentity, make_owned_directory

ROOT = Path(__file__).resolve().parents[2]

SAY = "\nimport os\nos.write(1, b'%d\\n' % os.getpid())\n"
SLEEP = SAY + "import time\ntime.sleep(600)\n"
#: It leaves its session and its parent: killing groups or closing pipes does not reach it.
DETACHED = "import os\nif os.fork(): os._exit(0)\nos.setsid()\n" + SLEEP

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str, **variables: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
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


#: Starts a child with these variables instead of its own mark, and says which it is.
PARENT = """
import os, subprocess, sys, time
environment = {k: v for k, v in os.environ.items() if k != "NIGHTGRID_OWNER"}
child = subprocess.Popen([sys.executable, "-c", %r], env=environment | %r, start_new_session=True)
time.sleep(600)
"""


def test_marks_and_descent_tell_orphans_from_others(start: Start, base: Path) -> None:
    run = f"run{os.getpid()}"
    before, now = (Owner(run_id=run, invocation_id=name) for name in "ab")
    mark = {VARIABLE: str(before)}
    orphan = start(DETACHED, **mark)
    child = start(PARENT % (SLEEP, {}), **mark)
    others = start(PARENT % (SLEEP, {VARIABLE: "other.x"}), **mark)
    bystanders = [others, start(SLEEP, **{VARIABLE: str(now)}), start(SLEEP)]
    pids = {found.pid for found in orphans_of(now)}
    assert {orphan, child} <= pids and len(pids) == 4  # and two parents
    assert not pids & set(bystanders)
    assert orphans_of(Owner(run_id="another", invocation_id="b")) == []
    assert set(end_orphans(now)) == pids
    try:
        assert not any(map(alive, pids)) and all(map(alive, bystanders))
    finally:
        os.kill(others, 9)


def test_the_cluster_of_a_killed_driver_goes_with_its_directory(start: Start, base: Path) -> None:
    directory = of_a_killed_driver(base, "")
    agent = start(SLEEP, RAY_TMPDIR=str(directory))
    bystanders = [
        start(SLEEP, RAY_TMPDIR=str(make_owned_directory("ng-", base).path)),
        start(f"import os\nos.chdir({str(directory)!r})\nfile = open('log', 'a')\n" + SLEEP),
    ]
    remove_abandoned()
    assert not alive(agent) and not directory.exists()
    assert all(map(alive, bystanders)) and len(list(base.iterdir())) == 1


_UPLOADING = """
import sys
from pathlib import Path
from orchestrator.worker import orphans

orphans.base_directories = lambda: [Path(sys.argv[1])]
with orphans.private_directory() as directory:
    (directory / "model.bin").write_bytes(b"x")
    print(flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_upload_left_goes_with_the_next(base: Path) -> None:
    uploading = subprocess.Popen(
        [sys.executable, "-c", _UPLOADING, str(base)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert uploading.stdout is not None and uploading.stdout.readline()
    with private_directory() as mine:
        assert len(list(base.glob("*/content/model.bin"))) == 1  # it is alive
    uploading.kill()
    uploading.communicate()
    with private_directory() as mine:
        assert [path.parent for path in base.glob("*/content")] == [mine.parent]
    assert list(base.iterdir()) == []


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
            stdout=log, stderr=log, env=os.environ | {"RAY_TMPDIR": str(directory.path)},
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
            assert alive(agent) and len(list(tmp_path.iterdir())) == 1
            driver.kill()
        else:
            assert driver.stdout.readline() == "ended\n"
    assert until(lambda: not alive(agent) and not list(tmp_path.iterdir()), 30)
    guards = ("orchestrator.worker.orphans", str(tmp_path))
    assert until(lambda: commands_naming(*guards) == [], 30)


def test_a_number_that_came_back_is_another_process() -> None:
    me = ProcessIdentity.of_this_process()
    assert not me.is_gone()
    values = asdict(me) | {"started_ticks": me.started_ticks - 1}
    assert ProcessIdentity(**values).is_gone()
