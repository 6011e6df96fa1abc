"""Orphans: processes that outlive their driver, agent or worker, and how they are ended.

A driver sets a mark in its environment before it starts anything, so all its descendants carry it
and belong to it, unless another driver marked them. (Ray's agents overwrite their environment with
a title unless ``SPT_NOENV`` is set, as in our private clusters.) Only one driver holds a run, so
processes with the run's mark and another invocation are orphans. Run as a program (``guarded``),
this module waits for a driver with a private Ray to end and ends what uses its directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from workloads.util.processes import (
    OwnedDirectory,
    ProcessStat,
    abandoned_directories,
    descendants,
    kill,
    make_owned_directory,
    owned_directory,
    processes,
    remove_unmarked,
    variables,
)

#: Holds an ``Owner`` as text.
VARIABLE = "NIGHTGRID_OWNER"
#: Holds the private directory of a process's Ray cluster.
DIRECTORY_VARIABLE = "RAY_TMPDIR"
_END_S = 10.0  # for processes that are killed to end
_GUARD_S = 60.0  # for the guard of a killed driver
_ORDERLY_END = b"done\n"

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# ---------------------------------------------------------------- processes of this host


def variable_of(pid: int, name: str) -> str | None:
    """A variable of a process's initial environment; None if unset, overwritten or unreadable."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            key, equals, value = variable.decode(errors="replace").partition("=")
            if equals and key == name:
                return value
    return None


# ---------------------------------------------------------------- trees of processes


def become_subreaper() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(*, then: bool = True) -> None:
    """Have the kernel kill this process when its parent ends; ``then=False`` undoes it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if then else 0)


def end_descendants() -> None:
    """Kill all descendants of this process; give up after a few seconds."""

    def alive() -> list[ProcessStat]:
        beneath = descendants(os.getpid(), processes(ended=True))
        return [process for process in beneath if not process.ended]

    with contextlib.suppress(TimeoutError):
        _end(alive, _END_S / 2)


def _prctl(option: int, value: int) -> None:
    """Best effort: only Linux has it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ---------------------------------------------------------------- orphans of killed drivers


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """One driver of a run: what its processes are marked with."""

    run_id: str  # stays with the run's directory
    invocation_id: str

    def __str__(self) -> str:
        return f"{self.run_id}.{self.invocation_id}"

    @classmethod
    def of(cls, text: str) -> Owner | None:
        """The owner that a mark names; None if it names none."""
        run_id, dot, invocation_id = text.partition(".")
        return cls(run_id=run_id, invocation_id=invocation_id) if dot and run_id else None

    @classmethod
    def of_this_process(cls) -> Owner | None:
        """The driver on whose behalf this process runs."""
        return cls.of(os.environ.get(VARIABLE, ""))

    def precedes(self, other: Owner | None) -> bool:
        """Return whether ``other`` is a later driver of the same run."""
        return other is not None and self.run_id == other.run_id and self != other

    def marks_this_process(self) -> contextlib.AbstractContextManager[None]:
        """Have every process that is started within the block carry the mark."""
        return variables({VARIABLE: str(self)})


def orphans_of(owner: Owner) -> list[ProcessStat]:
    """Processes on this host of ``owner``'s predecessors; none without ``/proc``."""

    def precedes(process: ProcessStat) -> bool:
        mark = Owner.of(variable_of(process.pid, VARIABLE) or "")
        return mark is not None and mark.precedes(owner)

    return _with_descendants(precedes)


def end_orphans(owner: Owner) -> dict[int, str]:
    """Kill processes of ``owner``'s predecessors and return their commands by process id; raises
    TimeoutError if one does not end."""
    return _end(lambda: orphans_of(owner))


def end_users_of(directory: OwnedDirectory) -> None:
    """Kill the process trees of the Ray cluster with this private directory.

    Spares this process's descendants, which have the variable too, unless the directory is
    abandoned. Raises TimeoutError if a process does not end.
    """
    path = str(directory.path)

    def users() -> list[ProcessStat]:
        users = _with_descendants(lambda one: variable_of(one.pid, DIRECTORY_VARIABLE) == path)
        if directory.process.is_gone():
            return users
        own = {process.pid for process in descendants(os.getpid(), processes())}
        return [user for user in users if user.pid not in own]

    _end(users)


def _end(orphans: Callable[[], list[ProcessStat]], limit_s: float = _END_S) -> dict[int, str]:
    ended: dict[int, str] = {}
    deadline = time.monotonic() + limit_s
    quiet = 0
    while quiet < 2:  # what dies may just have started another, which has no environment yet
        alive = orphans()
        quiet = 0 if alive else quiet + 1
        if alive and time.monotonic() > deadline:
            stuck = ", ".join(f"{one.pid} ({ended.get(one.pid, '')[:60]})" for one in alive[:5])
            raise TimeoutError(f"processes of an earlier driver do not end: {stuck}")
        for orphan in alive:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{orphan.pid}/cmdline").read_bytes().replace(b"\0", b" ")
                ended.setdefault(orphan.pid, command.decode(errors="replace").strip())
            kill(orphan)
        time.sleep(0.02)
    return ended


def _with_descendants(belongs: Callable[[ProcessStat], bool]) -> list[ProcessStat]:
    """Matching processes and descendants, without our ancestors and other drivers' subtrees."""
    table = processes()
    own, pid = set[int](), os.getpid()
    while pid > 0 and pid not in own:
        own.add(pid)
        pid = table[pid].parent if pid in table else 0
    orphans = {pid: process for pid, process in table.items() if belongs(process)}
    marks = {variable_of(pid, VARIABLE) for pid in orphans} | {None}

    def is_somebody_elses(process: ProcessStat) -> bool:
        return process.pid in own or variable_of(process.pid, VARIABLE) not in marks

    for root in set(orphans) - own:
        for child in descendants(root, table, leave_out=is_somebody_elses):
            orphans[child.pid] = child
    return [process for pid, process in orphans.items() if pid not in own]


# ---------------------------------------------------------------- private directories

_PREFIX = "ng-"
_LONGEST_BASE = 23  # Ray's sockets lie below, and a socket's path has at most 107 characters


def make_private_directory(owner: str) -> OwnedDirectory:
    """Make a marked directory (mode 0700) for sockets, logs and tokens; OSError if unwritable."""
    return make_owned_directory(_PREFIX, base_directories()[0], owner)


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """An empty directory of this user for the block; a later run removes it if this one is killed.

    Raises OSError if it cannot be made.
    """
    remove_abandoned()
    directory = make_private_directory(os.environ.get(VARIABLE, ""))
    try:
        content = directory.path / "content"
        content.mkdir()
        yield content
    finally:
        directory.remove()


def abandoned_private_directories() -> list[OwnedDirectory]:
    """Directories of this user's killed processes, of this boot and pid namespace."""
    return [gone for base in base_directories() for gone in abandoned_directories(_PREFIX, base)]


def base_directories() -> list[Path]:
    """Parents of private directories, this process's first."""
    base, usual = Path(tempfile.gettempdir()), Path("/tmp")
    return [base, usual] if base != usual and len(str(base)) <= _LONGEST_BASE else [usual]


def remove_abandoned() -> None:
    """End what uses private directories whose processes were killed, and remove them."""
    for directory in abandoned_private_directories():
        with contextlib.suppress(TimeoutError):  # then it stays, for the next run
            end_users_of(directory)
            directory.remove()
    for base in base_directories():
        remove_unmarked(_PREFIX, base)


# ---------------------------------------------------------------- the guard of a driver


@contextlib.contextmanager
def guarded(directory: OwnedDirectory) -> Iterator[None]:
    """Have a guard process clean up the directory if this one is killed within the block."""
    paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE} | {"PYTHONPATH": paths}
    guard = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.worker.orphans", str(directory.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,  # what a terminal sends its programs is not for the guard
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it was killed
            guard.stdin.write(_ORDERLY_END)
            guard.stdin.close()
        try:
            guard.wait(_END_S)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()


def main(path: str) -> int:
    """Wait for the end of the driver; clean up its directory unless the end was orderly."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as is sent to all when a host shuts down
    if sys.stdin.buffer.read() == _ORDERLY_END:
        return 0
    deadline = time.monotonic() + _GUARD_S
    while (directory := owned_directory(Path(path))) is not None and time.monotonic() < deadline:
        if directory.process.is_gone():
            with contextlib.suppress(TimeoutError):
                end_users_of(directory)
                directory.remove()
        time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
