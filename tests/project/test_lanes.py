"""Several processes share the suite out: clusters take turns, files stay whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from lanes import rank

TESTS = Path(__file__).resolve().parents[1]

#: Two files that start clusters, and four that do not: each test says which process it is in.
CODE = """import os, pathlib, pytest
{mark}
@pytest.mark.parametrize("n", range(4))
def test(n):
    here = pathlib.Path({told!r}) / os.environ["PYTEST_XDIST_WORKER"]
    with here.open("a") as file:
        file.write("{name}\\n")
"""


def test_every_test_with_a_cluster_waits_for_its_turn(request: pytest.FixtureRequest) -> None:
    marked = {
        item.path for item in request.session.items if item.get_closest_marker("ray") is not None
    }
    assert {rank(file) for file in marked} <= {0}
    assert rank(TESTS / "ray" / "test_prometheus.py") == 0


@pytest.mark.slow
def test_files_stay_whole_and_clusters_in_one_process(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    ray: r\n")
    for name in ("a", "b", "c", "d", "e", "f"):
        mark = "pytestmark = pytest.mark.ray" if name in "cf" else ""
        text = CODE.format(mark=mark, told=str(told), name=name)
        (tmp_path / f"test_{name}.py").write_text(text)
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "conftest", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    processes = defaultdict(list)
    for path in told.iterdir():
        for name in path.read_text().split():
            processes[name].append(path.name)
    assert sorted(processes) == list("abcdef")
    assert all(len(where) == 4 and len(set(where)) == 1 for where in processes.values())
    assert processes["c"] == processes["f"]
