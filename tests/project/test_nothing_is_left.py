"""Processes of tests end with them, also when pytest is killed: the real conftest over a small
session that leaves everything it can."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from guardian import VARIABLE
from patience import until

TESTS = Path(__file__).resolve().parents[1]

SESSION = """\
import os, socket, subprocess, sys, time

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


def alive(pid: int) -> bool:
    """Return whether a process runs; one that is dead and not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def listens(port: int) -> bool:
    """Return whether somebody accepts connections there."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Session:
    """A pytest of its own, over a test that leaves things behind."""

    directory: Path
    ends_itself: bool
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.directory.mkdir()
        code = SESSION.replace("TOLD", str(self.directory / "told"))
        code = code.replace("READY", str(self.directory / "ready"))
        code = code.replace("END", "0" if self.ends_itself else "600")
        (self.directory / "test_session.py").write_text(code)
        (self.directory / "told").touch()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "."],
            cwd=self.directory,
            env=os.environ | {"PYTHONPATH": str(TESTS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def left(self) -> list[tuple[int, int]]:
        """Its children: process and port, 0 for none."""
        ready = self.directory / "ready"
        assert until(lambda: ready.exists() or self.process.poll() is not None, 60)
        assert ready.exists(), self.process.communicate()[0]
        lines = (self.directory / "told").read_text().splitlines()
        return [(int(pid), int(port)) for pid, port in map(str.split, lines)]


@pytest.mark.slow
def test_all_that_tests_start_ends_with_pytest(tmp_path: Path) -> None:
    ways = {"INT": signal.SIGINT, "TERM": signal.SIGTERM, "KILL": signal.SIGKILL, "end": None}
    sessions = {way: Session(tmp_path / way, how is None) for way, how in ways.items()}
    started = {way: session.left() for way, session in sessions.items()}
    try:
        for way, how in ways.items():
            assert len(started[way]) == 3
            if how is not None:
                assert all(alive(pid) for pid, _ in started[way]), way
                sessions[way].process.send_signal(how)
        for way, session in sessions.items():
            assert until(lambda process=session.process: process.poll() is not None, 30), way
            left = started[way]
            assert until(lambda left=left: not any(alive(pid) for pid, _ in left), 10), way
            assert not any(port and listens(port) for _, port in left), way
    finally:
        for pid, _ in itertools.chain(*started.values()):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_what_tests_start_hears_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "test_session.py").write_text(
        "import subprocess, sys\n"
        "def test_child():\n"
        "    code = 'import signal as s; assert s.getsignal(s.SIGINT) is s.default_int_handler'\n"
        "    assert subprocess.run([sys.executable, '-c', code]).returncode == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 0, done.stdout


def test_what_tests_start_is_marked() -> None:
    code = f"import os; print(os.environ[{VARIABLE!r}])"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == os.environ[VARIABLE] != ""
