"""Imports that a run leaves for the next: shared by what is alike, ended in time, never needed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from patience import until
from test_card_process import alive

from orchestrator.cli import main
from orchestrator.doctor.facts import Level, NodeFacts, Probe
from orchestrator.doctor.node_checks import check_kept_imports
from orchestrator.domain.attempt import WorkerInfo
from orchestrator.worker import host_server
from orchestrator.worker import kept_imports as kept
from orchestrator.worker.card_process import CardProcess, Launch
from orchestrator.worker.kept_imports import ForkedServer, KeptImports
from orchestrator.worker.leftovers import VARIABLE, Owner, leftovers
from orchestrator.worker.process_settings import ProcessSettings, may_raise_priority
from orchestrator.worker.process_table import processes

MODULES = ("scripted_worker", "imported_once")
RUN = Owner(run_id=f"kept{os.getpid()}", invocation_id="a")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A module of this test's own, on the path."""
    directory = tmp_path_factory.mktemp("package")
    (directory / "imported_once.py").write_text("import os\nIMPORTED_BY = os.getpid()\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        yield directory / "imported_once.py"


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """The directory of private directories, for these tests alone; sockets need a short name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        base = Path(name)
        patch.setenv("TMPDIR", str(base))
        patch.setattr("orchestrator.worker.private_directory.base_directories", lambda: [base])
        yield base


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(kept.import_path())
    here = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return {**here, "PYTHONPATH": path, VARIABLE: str(RUN), **more}


@pytest.fixture(scope="module")
def one(package: Path, base: Path) -> Iterator[KeptImports]:
    """Imports that are kept, and no others."""
    yield keep()
    for each in kept.kept_imports():
        assert each.end()


def keep(idle_s: float = kept.IDLE_S) -> KeptImports:
    before = {each.process.pid for each in kept.kept_imports()}
    kept.keeper(MODULES, environment(), idle_s=idle_s)()
    (new,) = [each for each in kept.kept_imports() if each.process.pid not in before]
    return new


def forked(directory: Path, **more: str) -> ForkedServer | None:
    """A process server forked for this process."""
    own = directory / "own"
    own.mkdir(exist_ok=True)
    log = os.open(directory / "server.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        return kept.forked_server(str(own / "s"), MODULES, environment(**more), log)
    finally:
        os.close(log)


def worker(directory: Path, start: str = "") -> tuple[CardProcess, int]:
    """A worker of the server that runs this as it starts, and its process id."""
    launch = Launch(
        name="w",
        server=str(directory / "own" / "s"),
        factory="scripted_worker:ScriptedWorker",
        config={"name": "w", "start": start, "run": ""},
        environments={"": {"CARD": "5"}},
        log=str(directory / "w.log"),
    )
    process = CardProcess(launch)
    info = process.start()
    assert isinstance(info, WorkerInfo), (info, (directory / "w.log").read_text())
    return process, info.pid


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a short name, for sockets."""
    return tmp_path_factory.mktemp("s")


def test_every_thread_of_a_process_gets_the_priority_that_is_asked_for() -> None:
    """The kernel keeps one for each, and one that is made later has its maker's."""
    command = [sys.executable, "-c", _NICER]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    allowed = {"[19, 19] 19"} | ({"[3, 3] 3"} if may_raise_priority() else set())
    assert done.stdout.strip() in allowed


_NICER = """
import os, threading
from orchestrator.worker.process_settings import raise_priority
os.setpriority(os.PRIO_PROCESS, 0, 19)
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    raise_priority(3)
except PermissionError:
    pass
tasks = [os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir("/proc/self/task")]
later = []
thread = threading.Thread(target=lambda: later.append(os.getpriority(os.PRIO_PROCESS, 0)))
thread.start()
thread.join()
print(tasks, *later)
"""


def test_a_process_server_is_forked_as_its_agent_would_start_it(
    one: KeptImports, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the owner's mark, by which leftovers are found, and with the asker's priority and
    limits; it ends with its lifeline, and with all its workers."""
    here = ProcessSettings.of_this_process()
    wanted = replace(here, niceness=min(19, here.niceness + 3), umask=0o27)
    wanted = replace(wanted, limits={**here.limits, "RLIMIT_CORE": [0, 0]})
    monkeypatch.setattr(ProcessSettings, "of_this_process", lambda: wanted)
    server = forked(short)
    assert server is not None, one.log.read_text()
    _, pid = worker(short)
    found = {each.pid for each in leftovers(replace(RUN, invocation_id="b"))}
    assert len(found) == 3 and pid in found  # guardian, server and worker
    assert one.process.pid not in found
    for each in found:
        assert os.getpriority(os.PRIO_PROCESS, each) == wanted.niceness
        status = Path(f"/proc/{each}/status").read_text()
        assert "Umask:\t0027" in status
        assert processes()[each].variable(VARIABLE) == str(RUN)
    server.end(10)
    assert until(lambda: not any(map(alive, found)), 5)  # reaped, too
    assert not (short / "own").exists()
    assert one.process.runs()


def test_workers_find_what_was_imported_once(one: KeptImports, short: Path) -> None:
    """The module was imported by the process that was kept, and by no other since."""
    server = forked(short)
    assert server is not None
    worker(short, f"import imported_once as m; assert m.IMPORTED_BY == {one.process.pid}, m")
    server.end(10)


def test_workers_look_for_modules_where_their_own_run_does(
    one: KeptImports, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is imported later is found as the asker would, not as who kept the imports did."""
    (short / "of_this_run.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(short), *sys.path])
    server = forked(short)
    assert server is not None, one.log.read_text()
    worker(short, f"import of_this_run, sys; assert sys.path == {kept.import_path()!r}, sys.path")
    server.end(10)


@pytest.mark.parametrize(
    "more", [{"OMP_NUM_THREADS": "77"}, {"HF_HOME": "/elsewhere"}, {"LD_PRELOAD": ""}]
)
def test_another_environment_shares_nothing(
    more: dict[str, str], one: KeptImports, short: Path
) -> None:
    """A library may read any variable while it is imported; Ray's own say nothing of it."""
    assert forked(short, **more) is None
    assert one.process.runs()
    assert kept.key_of(MODULES, environment(**more)) != one.directory.owner
    neutral = environment(RAY_JOB_ID="7", PWD="/x", HABANA_VISIBLE_MODULES="3")
    assert kept.key_of(MODULES, neutral) == one.directory.owner
    assert kept.key_of(MODULES[:1], environment()) != one.directory.owner


def test_a_package_that_would_be_found_elsewhere_is_not_shared(
    one: KeptImports, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory before the others on the path may hide it; so may an installed plug-in."""
    (short / "imported_once.py").write_text("")
    monkeypatch.syspath_prepend(short)
    assert forked(short) is None
    assert "imported_once would be imported from elsewhere" in one.log.read_text()
    (short / "imported_once.py").unlink()
    (short / "plugin-1.0.dist-info").mkdir()
    assert kept.key_of(MODULES, environment()) != one.directory.owner
    assert one.process.runs()


def test_a_connection_without_the_token_is_refused(one: KeptImports, short: Path) -> None:
    """Even one of the same user."""
    token = one.directory.path / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    right = token.read_text()
    token.write_text("0" * len(right))
    assert forked(short) is None
    token.write_text(right)
    assert "refused a request: the token is wrong" in one.log.read_text()


def test_one_that_hangs_costs_a_moment(
    one: KeptImports, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The asker goes on with a server of its own, which the late one does not touch."""
    monkeypatch.setattr(kept, "ANSWER_S", 0.2)
    os.kill(one.process.pid, signal.SIGSTOP)
    try:
        assert forked(short) is None
        (short / "own" / "s").touch()
    finally:
        os.kill(one.process.pid, signal.SIGCONT)
    late = "who asked has gone"
    assert until(lambda: late in one.log.read_text(), 5)
    assert os.listdir(short / "own") == ["s"]


def test_a_server_that_is_forked_too_late_leaves_the_askers_own_alone(short: Path) -> None:
    """The asker may give up while it is forked; it ends then, and nothing else does."""
    own, path = short / "own", str(short / "own" / "s")
    own.mkdir()
    Path(path).touch()
    lifeline, held = os.pipe()
    asker, answers = socket.socketpair()
    with asker, answers:
        script = (
            "import socket, sys; from orchestrator.worker.process_server import run; "
            f"sys.exit(run({path!r}, lambda: False, socket.socket(fileno={asker.fileno()})))"
        )
        command = [sys.executable, "-c", script]
        server = subprocess.Popen(
            command, stdin=lifeline, env=environment(), pass_fds=[asker.fileno()]
        )
        os.close(lifeline)
        asker.close()
        told = json.loads(answers.makefile("r").readline())
    assert sorted(os.listdir(own)) == sorted(["s", Path(told["socket"]).name])
    os.close(held)
    server.wait(10)  # it ends itself, or its guardian kills it as it begins
    assert os.listdir(own) == ["s"]


def test_imports_are_kept_once_and_outlive_who_kept_them(one: KeptImports) -> None:
    """It has no parent of ours, which Ray or a run's end would take it along with."""
    kept.keeper(MODULES, environment())()
    assert [each.process.pid for each in kept.kept_imports()] == [one.process.pid]
    assert processes()[one.process.pid].parent != os.getpid()


def test_they_are_listed_and_ended(one: KeptImports, capsys: pytest.CaptureFixture[str]) -> None:
    """By the doctor, with the command that ends them, which ends them."""
    pid = one.process.pid
    probe = Probe(
        hostname="h",
        python="3",
        versions={},
        import_errors={},
        kept_imports=tuple(each.process.pid for each in kept.kept_imports()),
    )
    (note,) = check_kept_imports(NodeFacts(name="n", node_id="1"), probe)
    assert f"process {pid} holds imports" in note.message and note.level is Level.NOTE
    command = re.search(r"`nightgrid (stop [\w-]+)`", note.remedy)
    assert command is not None
    assert main([*command[1].split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ended": 1}
    assert not one.process.runs() and not one.directory.path.exists()


def test_a_forked_server_outlives_what_it_was_forked_from(
    package: Path, base: Path, short: Path
) -> None:
    """And a killed one is no use to the next asker, and no harm."""
    for each in kept.kept_imports():
        assert each.end()
    first = keep()
    server = forked(short)
    assert server is not None
    assert first.end() and not first.directory.path.exists()
    _, pid = worker(short)
    assert alive(pid)
    assert forked(short / "own") is None
    server.end(10)
    assert not alive(pid)


def test_what_is_kept_is_what_the_run_began_with(
    package: Path, base: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray puts packages of its own on the path while the run goes on; the next run has none yet."""
    for each in kept.kept_imports():
        assert each.end()
    leave = kept.keeper(MODULES, environment())
    with monkeypatch.context() as later:
        (short / "of_ray-1.0.dist-info").mkdir()
        later.syspath_prepend(short)
        leave()
    server = forked(short)
    assert server is not None
    server.end(10)


def test_it_ends_when_a_file_has_changed_and_when_it_was_idle(
    package: Path, base: Path, short: Path
) -> None:
    """A run measures the code that is there now."""
    for each in kept.kept_imports():
        assert each.end()
    stale = keep()
    server = forked(short)
    assert server is not None
    server.end(10)
    package.write_text(package.read_text() + "\n")
    assert forked(short) is None
    assert until(lambda: not stale.process.runs(), 5)
    idle = keep(idle_s=1.0)  # long enough to be seen
    assert until(lambda: not idle.process.runs(), 10)
    assert not idle.directory.path.exists()


def test_of_those_that_begin_together_one_stays(
    package: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents of one host, whose runs end together, do not see each other's yet."""
    for each in kept.kept_imports():
        assert each.end()
    with monkeypatch.context() as unseen:
        unseen.setattr(kept, "kept_imports", list)
        for _ in range(2):
            kept.keeper(MODULES, environment())()
    assert until(lambda: [each.ready for each in kept.kept_imports()] == [True], 10)
    for each in kept.kept_imports():
        assert each.end()


@pytest.mark.parametrize(("told", "kept_then"), [(None, 0), ("", 0), ("0", 0), ("1", 1)])
def test_imports_are_kept_on_request(
    told: str | None, kept_then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of 0 asks for nothing, as elsewhere."""
    monkeypatch.delenv(kept.KEEP, raising=False)
    if told is not None:
        monkeypatch.setenv(kept.KEEP, told)
    asked: list[object] = []
    monkeypatch.setattr(host_server, "keeper", lambda *found: lambda: asked.append(found))
    host_server.to_keep(["json"], threads=1)()
    assert len(asked) == kept_then


def test_a_fork_server_that_does_not_start_is_not_waited_for(
    base: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a run holds cards; a file system that hangs would have it hang, too."""
    hangs = short / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 3\n")
    hangs.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hangs))
    monkeypatch.setattr(kept, "START_S", 0.1)
    before, started_s = set(processes()), time.monotonic()
    kept.keeper(MODULES, environment())()
    assert time.monotonic() - started_s < 2
    assert not any(
        each.parent == os.getpid() for pid, each in processes().items() if pid not in before
    )


def test_what_cannot_be_imported_is_not_kept(
    package: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers would have to start afresh, which any process server lets them do."""
    kept.keeper(("no_such_module_anywhere",), environment())()
    assert until(lambda: not kept.kept_imports(), 10)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    kept.keeper(MODULES, environment())()  # it says so, and goes on
    assert not kept.kept_imports()
    assert not subprocess.run(["ls", str(base)], capture_output=True, check=True).stdout
