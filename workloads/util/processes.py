"""Processes of this host: their state, their environment, and directories that they own.

An owned directory has a marker file with its process's id, start time (ids are reused), pid
namespace and boot. Directories with one from another namespace or boot are left alone, as are those
without one that hold anything: they may be in use.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from workloads.util import files

_EXITING = 0x4  # the kernel's PF_EXITING

MARKER = ".nightgrid-owner.json"
_FORMAT = 1
_LONGEST_MARKER_BYTES = 4096
_PID_LIMIT = 2**31
_MARKER_TYPES = {
    "format": int,
    "pid": int,
    "started_ticks": int,
    "pid_namespace": str,
    "boot_id": str,
    "owner": str,
}


class ProcessStat(NamedTuple):
    """One process at one moment."""

    pid: int
    parent: int
    started_ticks: int  # since boot, as the kernel counts
    ended: bool  # a zombie
    stopped: bool  # by a signal or a debugger
    ending: bool  # exiting, which may take long while a driver frees memory

    @property
    def identity(self) -> tuple[int, int]:
        """Process id and start time: ids are reused."""
        return self.pid, self.started_ticks


def process_stat(pid: int) -> ProcessStat | None:
    """State of a process; None if there is none, or no ``/proc``."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the name in brackets, which may contain brackets.
            words = file.read().rpartition(b")")[2].split()
        state = words[0]
        return ProcessStat(
            pid=pid,
            parent=int(words[1]),
            started_ticks=int(words[19]),
            ended=state in (b"Z", b"X"),
            stopped=state in (b"T", b"t"),
            ending=bool(int(words[6]) & _EXITING),
        )
    except (OSError, IndexError, ValueError):
        return None


def started_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if it has ended."""
    stat = process_stat(pid)
    return None if stat is None or stat.ended else stat.started_ticks


def kill(process: ProcessStat) -> None:
    """Kill this process, but none that has reused its id."""
    if started_ticks(process.pid) == process.started_ticks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def processes(*, ended: bool = False) -> dict[int, ProcessStat]:
    """Running processes of this host by id, with zombies if ``ended``; none without ``/proc``."""
    table: dict[int, ProcessStat] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            stat = process_stat(int(name)) if name.isdecimal() else None
            if stat is not None and (ended or not stat.ended):
                table[stat.pid] = stat
    return table


def descendants(
    root: int,
    table: Mapping[int, ProcessStat],
    *,
    leave_out: Callable[[ProcessStat], bool] = lambda _: False,
) -> list[ProcessStat]:
    """All descendants of ``root``, less those left out and their children."""
    children: dict[int, list[ProcessStat]] = defaultdict(list)
    for process in table.values():
        children[process.parent].append(process)
    beneath: dict[int, ProcessStat] = {}
    parents = [root]
    while parents:
        for child in children[parents.pop()]:
            if child.pid not in beneath and not leave_out(child):
                beneath[child.pid] = child
                parents.append(child.pid)
    return list(beneath.values())


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started in a session of its own, with all of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables (None: unset) for the block."""

    def put(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    before = {name: os.environ.get(name) for name in values}
    try:
        put(values)
        yield
    finally:
        put(before)


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module or class for the block."""
    before = {name: inspect.getattr_static(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """Identity of a process that survives reuse of its id."""

    pid: int
    started_ticks: int  # since boot, as the kernel counts
    pid_namespace: str
    boot_id: str

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """This process; namespace and boot are empty where there is no ``/proc``."""
        pid_namespace = boot_id = ""
        with contextlib.suppress(OSError):
            pid_namespace = os.readlink("/proc/self/ns/pid")
        with contextlib.suppress(OSError):
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(
            pid=os.getpid(),
            started_ticks=started_ticks(os.getpid()) or 0,
            pid_namespace=pid_namespace,
            boot_id=boot_id,
        )

    def is_gone(self) -> bool:
        """Return whether the process has certainly ended; False for another container or boot."""
        here = ProcessIdentity.of_this_process()
        same = (self.pid_namespace, self.boot_id) == (here.pid_namespace, here.boot_id)
        if not (same and here.pid_namespace and here.boot_id):
            return False
        return started_ticks(self.pid) != self.started_ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedDirectory:
    """A directory with a valid marker of this user."""

    path: Path
    process: ProcessIdentity  # its creator
    owner: str  # free text of the creator

    def remove(self) -> None:
        """Remove it and its content, the marker last, so that a partial removal can be resumed."""
        if self.path.is_symlink():
            return
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self.path)):
                if entry.name == MARKER:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
            if os.listdir(self.path) == [MARKER]:
                os.unlink(self.path / MARKER)
                os.rmdir(self.path)


def make_owned_directory(prefix: str, base: Path, owner: str = "") -> OwnedDirectory:
    """Make a directory for this user alone (mode 0700), with a marker; OSError if it cannot."""
    process = ProcessIdentity.of_this_process()
    path = Path(tempfile.mkdtemp(prefix=f"{prefix}{process.pid}-", dir=base))
    marker = {"format": _FORMAT, **asdict(process), "owner": owner}
    try:
        with os.fdopen(files.create(path / MARKER, 0o600), "w", encoding="utf-8") as file:
            json.dump(marker, file)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return OwnedDirectory(path=path, process=process, owner=owner)


def abandoned_directories(prefix: str, base: Path) -> list[OwnedDirectory]:
    """This user's owned directories in ``base`` with this prefix whose creators have ended."""
    try:
        names = sorted(name for name in os.listdir(base) if name.startswith(prefix))
    except OSError:
        return []
    directories = (owned_directory(base / name) for name in names)
    return [directory for directory in directories if directory and directory.process.is_gone()]


def remove_unmarked(prefix: str, base: Path) -> None:
    """Remove this user's directories of that name whose creators were killed while they made or
    removed them: they hold nothing, or a marker that was not written to its end."""
    for path in base.glob(f"{prefix}*"):
        made = re.fullmatch(rf"{prefix}([0-9]+)-[a-z0-9_]{{8}}", path.name)
        with contextlib.suppress(OSError):
            status = path.lstat()
            own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            gone = made is not None and started_ticks(int(made[1])) is None
            if own and gone and owned_directory(path) is None:
                if os.listdir(path) == [MARKER]:
                    os.unlink(path / MARKER)
                os.rmdir(path)  # fails unless it is empty


def owned_directory(path: Path) -> OwnedDirectory | None:
    """The directory at ``path`` if it is this user's, not a link, and validly marked; else None."""
    marker = path / MARKER
    try:
        owners = {os.lstat(path).st_uid, os.lstat(marker).st_uid}
        if not stat.S_ISDIR(os.lstat(path).st_mode) or owners != {os.geteuid()}:
            return None
        content = files.read_bytes(marker, limit_bytes=_LONGEST_MARKER_BYTES, follow=False)
        values = json.loads(content)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or any(
        type(values.get(name)) is not kind for name, kind in _MARKER_TYPES.items()
    ):
        return None
    names = [field.name for field in fields(ProcessIdentity)]
    process = ProcessIdentity(**{name: values[name] for name in names})
    possible = 0 < process.pid < _PID_LIMIT and process.started_ticks > 0
    if values["format"] != _FORMAT or not (possible and process.pid_namespace and process.boot_id):
        return None
    return OwnedDirectory(path=path, process=process, owner=values["owner"])
