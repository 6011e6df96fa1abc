"""The suite itself: its processes end with it, and its clusters take turns."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from lanes import Lanes, rank
from patience import alive, until

TESTS = Path(__file__).resolve().parents[1]

SESSION = """\
import os, socket, subprocess, sys, time

open("TOLD", "a").close()
LISTENER = (
    "import os, socket, sys, time\\n"
    "if sys.argv[2:] == [] and os.fork(): os._exit(0)\\n"  # leaves its parent, as Ray does
    "os.setsid()\\n"
    "listening = socket.socket(); listening.bind(('127.0.0.1', 0)); listening.listen()\\n"
    "open(sys.argv[1], 'a').write(f'{os.getpid()} {listening.getsockname()[1]}\\\\n')\\n"
    "time.sleep(600)\\n"
)

def start(**settings):
    return subprocess.Popen([sys.executable, "-S", "-c", LISTENER, "TOLD"], **settings)

def test_that_leaves_things():
    start(start_new_session=True)  # marked, and nobody's child
    mark = {"PATH": os.environ["PATH"]}  # not marked: noted while it is still somebody's child
    parent = (
        "import os, subprocess, sys, time\\n"
        f"subprocess.Popen([sys.executable, '-S', '-c', {LISTENER!r}, 'TOLD', 'stay'])\\n"
        "time.sleep(2)\\n"
    )
    subprocess.Popen([sys.executable, "-S", "-c", parent], env=mark, start_new_session=True)
    if os.fork() == 0:  # shares every open file with pytest
        open("TOLD", "a").write(f"{os.getpid()} 0\\n")
        time.sleep(600)
    while len(open("TOLD").readlines()) < 3:
        time.sleep(0.05)
    time.sleep(2.5)  # the guardian has looked, and then it is nobody's child
    open("READY", "w").close()
    time.sleep(END)
"""


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def pytest_in(directory: Path, source: str) -> subprocess.Popen[str]:
    """A pytest of its own over one file, with the real conftest."""
    directory.mkdir(exist_ok=True)
    (directory / "test_session.py").write_text(source)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "."],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_all_that_tests_start_ends_with_pytest(tmp_path: Path) -> None:
    ways = {"INT": signal.SIGINT, "KILL": signal.SIGKILL, "end": None}  # TERM is like KILL
    sessions = {}
    for way, number in ways.items():
        source = SESSION.replace("TOLD", str(tmp_path / way / "told"))
        source = source.replace("READY", str(tmp_path / way / "ready"))
        sessions[way] = pytest_in(tmp_path / way, source.replace("END", "600" if number else "0"))
    children: dict[str, list[tuple[int, int]]] = {}  # process and port, 0 for none
    try:
        for way, session in sessions.items():
            ready = tmp_path / way / "ready"
            assert until(lambda r=ready, s=session: r.exists() or s.poll() is not None, 60)
            assert ready.exists(), session.communicate()[0]
            lines = (tmp_path / way / "told").read_text().splitlines()
            children[way] = [(int(pid), int(port)) for pid, port in map(str.split, lines)]
            assert len(children[way]) == 3
        for way, number in ways.items():
            if number is not None:
                assert all(alive(pid) for pid, _ in children[way]), way
                sessions[way].send_signal(number)
        for way, session in sessions.items():
            assert until(lambda session=session: session.poll() is not None, 30), way
            left = children[way]
            assert until(lambda left=left: not any(alive(pid) for pid, _ in left), 10), way
            assert not any(port and listens(port) for _, port in left), way
    finally:
        for pid, _ in itertools.chain(*children.values()):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


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
    own = "tests/project/test_nothing_is_left.py"
    assert lanes._split_scope(f"{own}::test_d") == own
