"""The suite itself: its processes end with it, and its clusters take turns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lanes import Lanes, rank
from patience import alive, until

TESTS = Path(__file__).resolve().parents[1]
SESSION = """\
import os, subprocess, sys, time

SLEEP = "import os, sys, time; os.setsid(); open(sys.argv[1], 'a').write(f'{os.getpid()}\\\\n'); "
ORPHAN = "import os; os.fork() and os._exit(0); "  # leaves its parent, as Ray does

def start(before, **settings):
    code = before + SLEEP + "time.sleep(600)"
    subprocess.Popen([sys.executable, "-S", "-c", code, "told"], **settings)

def test_that_leaves_things():
    start(ORPHAN)  # marked, and nobody's child
    start("", env={})  # not marked: noted as a child
    if os.fork() == 0:  # shares every open file with pytest
        open("told", "a").write(f"{os.getpid()}\\n")
        time.sleep(600)
    time.sleep(600)
"""


@pytest.mark.slow
def test_all_that_tests_start_ends_with_a_pytest_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "test_session.py").write_text(SESSION)
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.DEVNULL,
    )
    told = tmp_path / "told"
    assert until(lambda: told.exists() and told.read_text().count("\n") == 3, 60)
    children = [int(pid) for pid in told.read_text().split()]
    time.sleep(2.5)  # the guardian has looked
    assert all(map(alive, children))
    session.kill()
    session.wait()
    assert until(lambda: not any(map(alive, children)), 10)


def test_every_test_with_a_cluster_waits_for_its_turn(request: pytest.FixtureRequest) -> None:
    """A file is known by the mark in its source: no mark that pytest knows is spelt otherwise."""
    items = request.session.items
    assert {rank(item.path) for item in items if item.get_closest_marker("ray")} <= {0}
    assert rank(TESTS / "ray" / "test_telemetry_on_ray.py") == 0
    lanes = Lanes.__new__(Lanes)  # without processes
    lanes.config = request.config
    first, second = ("tests/ray/test_telemetry_on_ray.py::test_a", "tests/ray/test_strangers.py::b")
    assert lanes._split_scope(first) == lanes._split_scope(second) == "shared clusters"
    assert lanes._split_scope("tests/chaos/test_chaos.py::test_c") == "one cluster after another"
    own = "tests/project/test_lanes.py"
    assert lanes._split_scope(f"{own}::test_d") == own
