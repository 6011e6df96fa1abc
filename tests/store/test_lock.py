"""One driver on one run: who is refused, who takes over, and what the refusal says."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import store_processes
from driver_cases import STATUS
from hypothesis import example, given
from hypothesis import strategies as st
from measurements import journal_row, row
from patience import patience
from store_processes import CONTEXT

from orchestrator.cli.main import main
from orchestrator.core.errors import StoreError, StoreLocked
from orchestrator.doctor.probe import locks_missing
from orchestrator.report.run_report import read_status
from orchestrator.store import files as run_files
from orchestrator.store import lock
from orchestrator.store.lock import driver_lives
from orchestrator.store.store import Store
from orchestrator.watch.state import RunFeed
from workloads.data.cache import build_aside, cached_directory

MACHINE_ID = Path("/etc/machine-id")
NEEDS_MACHINE_ID = pytest.mark.skipif(
    not (MACHINE_ID.exists() and MACHINE_ID.read_text().strip()), reason="this machine has no id"
)


def holder(results: Path) -> BaseProcess:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=store_processes.hold, args=(results, theirs), daemon=True)
    process.start()
    assert ours.poll(60) and ours.recv() == "held"
    return process


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join(patience(60))


def edit_lock(results: Path, **changes: Any) -> None:
    path = results / "night" / run_files.LOCK
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def first(tmp_path: Path) -> Iterator[BaseProcess]:
    process = holder(tmp_path)
    yield process
    kill(process)


#: Opened for writing and closed, the file keeps its inode, and its holder keeps the flock.
CONTAINER = {"pid_namespace": "pid:[1]", "host": "container"}


@pytest.mark.parametrize(
    ("killed", "changes"),
    [
        (True, {}),
        (True, {"pid": os.getpid()}),
        (True, CONTAINER),
        pytest.param(False, {"boot_id": "of yesterday"}, marks=NEEDS_MACHINE_ID),
    ],
    ids=["killed", "its process id came back", "in another container", "before a reboot"],
)
def test_a_dead_holder_is_taken_over(tmp_path, first, killed, changes) -> None:
    if killed:
        kill(first)
    edit_lock(tmp_path, **changes)
    with Store(tmp_path, "night") as store:
        assert store.taken_over_from is not None
        assert store.taken_over_from.pid == changes.get("pid", first.pid)
        store.append(row())
    assert not (tmp_path / "night" / run_files.LOCK).exists()


@pytest.mark.parametrize(
    ("killed", "changes", "words"),
    [
        (False, {}, "run 'night' is held by process PID on HOST for .*s, last seen"),
        (False, CONTAINER, "on container"),
        (False, {"boot_id": "of yesterday", "machine_id": ""}, "cannot be seen"),
        (True, {"host": "node-7", "boot_id": "", "machine_id": "x"}, r"on node-7.*delete .*\.lock"),
    ],
    ids=["here", "in another container", "on a machine without an id", "on another host"],
)
def test_a_holder_that_may_live_is_respected(tmp_path, first, killed, changes, words) -> None:
    if killed:
        kill(first)
    edit_lock(tmp_path, **changes)
    words = words.replace("PID", str(first.pid)).replace("HOST", socket.gethostname())
    with pytest.raises(StoreLocked, match=words), Store(tmp_path, "night"):
        pass
    assert Store(tmp_path, "night").measurements() == []


def test_a_second_store_of_the_same_process_is_refused(tmp_path: Path) -> None:
    """Two threads of one program are two drivers as well."""
    with Store(tmp_path, "night"):
        with pytest.raises(StoreLocked), Store(tmp_path, "night"):
            pass
        with Store(tmp_path, "other"):
            pass


def test_an_orderly_end_leaves_no_lock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Store(tmp_path, "night"):
        raise ZeroDivisionError
    with Store(tmp_path, "night") as store:
        assert store.taken_over_from is None


#: Numbers of a lock that no process can have.
IMPOSSIBLE = [
    f'"{name}": {value}'
    for name in ("locked_at", "process_started", "pid")
    for value in ("1e400", "-1e400", "NaN", "9" * 400, "-1")
]


@given(content=st.binary(max_size=200) | st.sampled_from([b"", b"[]", b"{", b"[" * 50_000]))
@example(content=b'{"pid": 1}')
def test_a_lock_that_cannot_be_understood_is_respected(content: bytes) -> None:
    """It may be a living driver's, so nobody takes it over."""
    with TemporaryDirectory() as directory:
        lock_file = Path(directory, "night", run_files.LOCK)
        lock_file.parent.mkdir()
        lock_file.write_bytes(content)
        with pytest.raises(StoreLocked, match="delete the file"), Store(Path(directory), "night"):
            pass
        assert lock_file.read_bytes() == content


@pytest.mark.parametrize("number", IMPOSSIBLE)
def test_a_lock_with_an_impossible_number_is_not_understood(tmp_path: Path, number: str) -> None:
    with Store(tmp_path, "night") as store:
        text = (store.path / run_files.LOCK).read_text()
    text = json.dumps(json.loads(text))[:-1]  # without its end; the last of two values counts
    (store.path / run_files.LOCK).write_text(f"{text}, {number}}}")
    with pytest.raises(StoreLocked, match=r"driver\.lock"):
        store.refuse_if_held()


def test_a_writer_whose_lock_was_taken_away_stops_writing(tmp_path: Path) -> None:
    with Store(tmp_path, "night") as store:
        store.append(row(0))
        (tmp_path / "night" / run_files.LOCK).unlink()
        with pytest.raises(StoreLocked, match="taken over"):
            store.append(row(1))
        with Store(tmp_path, "night") as usurper:
            usurper.append(row(2))
            usurper.begin(journal_row(3))
            with pytest.raises(StoreLocked):
                store.append(row(1))
            store.__exit__(None, None, None)
            for name in (run_files.LOCK, "begun.log", ".reserve"):
                assert (tmp_path / "night" / name).exists(), "it is the usurper's"
    assert [m.batch_size for m in store.measurements()] == [1, 3]


def test_a_file_system_that_does_not_answer_is_not_a_lock_that_is_lost(tmp_path, monkeypatch):
    """A server of files that is away for a moment must not end a night."""

    def stale(_: Path) -> tuple[int, int]:
        raise OSError(errno.ESTALE, "Stale file handle")

    with Store(tmp_path, "night") as store:
        with monkeypatch.context() as patched:
            patched.setattr(lock, "inode", stale)
            with pytest.raises(StoreError, match="Stale file handle") as refused:
                store.append(row(0))
            assert not isinstance(refused.value, StoreLocked)
        store.append(row(0))


@pytest.mark.parametrize("dead_holder", [False, True])
def test_of_many_drivers_at_once_one_wins(tmp_path: Path, dead_holder: bool) -> None:
    if dead_holder:
        kill(holder(tmp_path))
    at = time.time() + 1.0
    rivals = []
    for _ in range(5):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(
            target=store_processes.try_to_hold, args=(tmp_path, at, theirs), daemon=True
        )
        process.start()
        rivals.append((process, ours))
    answers = [ours.recv() if ours.poll(60) else "silent" for _, ours in rivals]
    assert answers.count("held") == 1, answers
    assert all("held by process" in a or a == "held" or "quicker" in a for a in answers), answers
    for process, ours in rivals:
        ours.close()
        process.join(patience(60))


def test_a_driver_that_was_killed_reads_as_dead(tmp_path, capsys, first) -> None:
    directory = tmp_path / "night"
    status = replace(STATUS, run="night", at=time.time())
    (directory / run_files.STATUS).write_text(status.to_json())
    assert driver_lives(directory) is True
    store = Store.existing(tmp_path, "night")
    assert read_status(store) == status
    kill(first)
    assert driver_lives(directory) is False
    dead = read_status(store)
    assert dead is not None and dead.driver_died and not dead.running and dead.eta_s is None
    assert main(["status", "night", "--results", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert (
        "it died; the same `nightgrid run` or `submit` resumes it" in told and "about" not in told
    )
    assert "Its driver died" in RunFeed(store).snapshot()["sentence"]


# ---------------------------------------------------------------- file systems without locks


def failing(code: int) -> Callable[..., None]:
    def call(*_: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("links", [True, False])
def test_a_file_system_without_locks_keeps_one_driver_or_says_why_not(tmp_path, monkeypatch, links):
    """flock fails with ENOLCK on NFS without its daemon, links with EPERM on FAT and many FUSE."""
    monkeypatch.setenv("NIGHTGRID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fcntl.flock", failing(errno.ENOLCK))
    if not links:
        monkeypatch.setattr("os.link", failing(errno.EPERM))
    said = "flock: No locks available" if links else "link: Operation not permitted"
    assert locks_missing(str(tmp_path)) == said

    def build(directory: Path) -> None:  # and so does another process meanwhile
        if not (final := directory.parent / "key").exists():
            build_aside(final, lambda other: (other / "file").touch())
        (directory / "file").touch()

    assert [path.name for path in cached_directory("key", build).iterdir()] == ["file"]
    store, lock_file = Store(tmp_path, "night"), tmp_path / "night" / run_files.LOCK
    if links:
        with store, pytest.raises(StoreLocked, match="held by process"), Store(tmp_path, "night"):
            pass
        return
    with pytest.raises(StoreError, match=rf"{lock_file}: Operation.* no hard links.*DIR"), store:
        pass
    assert not lock_file.exists()
