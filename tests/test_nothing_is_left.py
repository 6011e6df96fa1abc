"""What tests start ends with them, also when pytest is killed: the real conftest over a small
session that leaves everything it can."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from guardian import VARIABLE
from patience import until

TESTS = Path(__file__).resolve().parent

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
    """Whether a process runs; one that is dead and not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def listens(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, None], ids=str)
def test_all_that_tests_start_ends_with_pytest(how: signal.Signals | None, tmp_path: Path) -> None:
    """Interrupted, terminated, killed, or at its end: nothing runs, nothing listens."""
    told, ready = tmp_path / "told", tmp_path / "ready"
    code = SESSION.replace("TOLD", str(told)).replace("READY", str(ready))
    (tmp_path / "test_session.py").write_text(code.replace("END", "600" if how else "0"))
    told.touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert until(lambda: ready.exists() or process.poll() is not None, 60)
    assert ready.exists(), process.communicate()[0].decode()
    left = [tuple(map(int, line.split())) for line in told.read_text().splitlines()]
    if how is not None:
        assert len(left) == 3 and all(alive(pid) for pid, _ in left)
        process.send_signal(how)
    assert until(lambda: process.poll() is not None, 30)
    try:
        assert until(lambda: not any(alive(pid) for pid, _ in left), 10)
        assert not any(port and listens(port) for _, port in left)
    finally:
        for pid, _ in left:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_what_tests_start_is_marked() -> None:
    """Every process of this session inherits the mark, by which the guardian knows it."""
    code = f"import os; print(os.environ[{VARIABLE!r}])"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == os.environ[VARIABLE] != ""
