"""Imports that a command begins at once, for an agent that starts on its host."""

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
from test_kept_imports import environment

from orchestrator.runtime import begun_imports as begun
from orchestrator.worker import kept_imports as kept
from orchestrator.worker.leftovers import VARIABLE, Owner
from orchestrator.worker.process_settings import start_without_owner

MODULES = ("json", "csv")
RUN = Owner(run_id="begun", invocation_id="a")
#: A process that has begun to import the modules, as ``begin_imports`` does.
BEGUN = """
import os, sys
from orchestrator.worker.child import die_with_parent
from orchestrator.worker.fork_server import serve_imports
from orchestrator.worker.kept_imports import key_of
from orchestrator.worker.private_directory import BEGUN_IMPORTS, make_private_directory
die_with_parent()
sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
modules = sys.argv[1:]
key = key_of(modules, os.environ)
serve_imports(make_private_directory(key, BEGUN_IMPORTS), modules, idle_s=60)
"""


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of private directories, for one test alone; sockets need a short name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(
            "orchestrator.worker.private_directory.base_directories", lambda: [Path(name)]
        )
        yield Path(name)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process with imports that it has begun, and that are there."""
    command = [sys.executable, "-c", BEGUN, *MODULES]
    with start_without_owner(command, environment(), subprocess.DEVNULL) as process:
        try:
            assert until(lambda: [each.ready for each in kept.begun_imports()] == [True], 10)
            yield process
        finally:
            begun.end(process)


def forked(directory: Path, *more: str, **variables: str) -> kept.ForkedServer | None:
    """A process server of an agent with these modules besides."""
    log = os.open(directory / "server.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        own = environment(**variables)
        return kept.forked_server(str(directory / "s"), (*MODULES, *more), own, log, MODULES)
    finally:
        os.close(log)


def test_an_agent_has_its_server_forked_there_with_what_it_needs_besides(
    process: subprocess.Popen[bytes], base: Path
) -> None:
    """A command begins before it knows which packages its jobs need."""
    server = forked(base, "wave")
    assert server is not None
    try:
        assert until(lambda: "imported wave" in (base / "server.log").read_text(), 10)
    finally:
        server.end(10)
    assert "imported json" not in (base / "server.log").read_text()


def test_an_agent_in_another_environment_imports_by_itself(
    process: subprocess.Popen[bytes], base: Path
) -> None:
    """Threads are counted when a library is imported."""
    assert forked(base, OMP_NUM_THREADS="77") is None


def test_an_agent_that_does_not_import_all_of_it_imports_by_itself(
    process: subprocess.Popen[bytes], base: Path
) -> None:
    """One whose workers are fresh interpreters imports nothing at all."""
    log = os.open(base / "server.log", os.O_WRONLY | os.O_CREAT)
    assert kept.forked_server(str(base / "s"), MODULES[:1], environment(), log, MODULES) is None
    os.close(log)


def test_a_command_that_ends_leaves_nothing_of_them(
    process: subprocess.Popen[bytes], base: Path
) -> None:
    """A process server that was forked there goes on."""
    server = forked(base)
    assert server is not None
    begun.end(process)
    assert process.returncode == -signal.SIGKILL
    assert not list(base.glob("ng-begun-*"))
    (base / "s").stat()
    server.end(10)


def test_it_is_no_imports_for_the_next_run(process: subprocess.Popen[bytes]) -> None:
    """They are neither listed nor ended with those that were kept on request."""
    assert not kept.kept_imports()


@pytest.mark.parametrize(
    ("mark", "session", "works"),
    [(str(RUN), "mine", True), (str(RUN), "another", False), ("", "mine", False)],
)
def test_a_run_is_at_work_whose_process_logs_in_the_session(
    base: Path, mark: str, session: str, works: bool
) -> None:
    """Neither a run of another cluster nor a process of Ray's."""
    for name in ("mine", "another"):
        (base / name).mkdir()
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        (base / session / "process-server.log").open("a") as log,
        subprocess.Popen(
            command, env=os.environ | {VARIABLE: mark}, stdin=subprocess.PIPE, stdout=log
        ) as other,
    ):
        if works:
            assert until(lambda: begun.works_in({base / "mine"}), 5)
        else:
            assert not begun.works_in({base / "mine"})
        other.communicate()
    assert not begun.works_in({base / "mine"})


def test_a_command_whose_nodes_are_elsewhere_begins_nothing(base: Path) -> None:
    """The process ends by itself, and leaves nothing."""
    ends = [sys.executable, "-m", begun.__name__, str(os.getpid()), "192.0.2.1:1"]
    done = subprocess.run(ends, env=environment(), capture_output=True, check=True)
    assert not done.stderr and not list(base.iterdir())


def test_a_process_that_lost_its_parent_at_once_begins_nothing(base: Path) -> None:
    """The kernel could not be told of it in time."""
    command = [sys.executable, "-m", begun.__name__, "1", "auto"]
    done = subprocess.run(command, env=environment(), capture_output=True, check=True)
    assert not done.stderr and not list(base.iterdir())
