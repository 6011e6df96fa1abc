"""`make test` runs each test once, in one of two processes, and tells of a failure in either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "tools" / "run_tests.py"
TESTS = """\
import os
import pytest

def ran(name):
    with open("ran", "a") as file:
        print(name, os.getpid(), os.getpriority(os.PRIO_PROCESS, 0), file=file)

@pytest.mark.ray
def test_on_ray():
    ran("ray")
    assert "ray" != "FAILING"

def test_other():
    ran("other")
    assert "other" != "FAILING"
"""


@pytest.mark.parametrize("failing", ["", "ray", "other"])
def test_both_processes_count(failing: str, tmp_path: Path) -> None:
    """Both print, and the exit code is 1 when either has a failure."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = ray\n")
    (tmp_path / "test_two.py").write_text(TESTS.replace("FAILING", failing))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "-q"],
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # of libraries: they take long
        capture_output=True,
        text=True,
    )
    assert done.returncode == bool(failing), done.stdout + done.stderr
    assert done.stdout.count("1 passed") == 2 - bool(failing)
    assert done.stdout.count("1 failed") == bool(failing)
    other, on_ray = sorted(map(str.split, (tmp_path / "ran").read_text().splitlines()))
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    assert other[0] == "other" and int(other[2]) == min(19, niceness + 5)
    assert on_ray[0] == "ray" and int(on_ray[2]) == niceness
    assert other[1] != on_ray[1]
