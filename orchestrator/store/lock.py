"""The lock file of a run: one driver at a time, and rules for taking over from a dead one.

The file is created by a hard link, so it is exclusive on network file systems too. A holder on this
host is found by process id *and* start time, in another container of this host by its ``flock``; a
rebooted host holds nothing. A holder on another host touches the file every few seconds, and
``nightgrid run --resume`` takes over from a silent one. A guard file's ``flock`` serialises
takeovers. A holder that was cut off checks its lock before each write.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from orchestrator.core.errors import StoreError, StoreLocked
from orchestrator.store import disk
from orchestrator.store.files import LOCK, LOCK_GUARD
from orchestrator.util.format import duration
from workloads.util import files
from workloads.util.processes import ProcessIdentity, started_ticks

HEARTBEAT_S = 5.0
SILENCE_S = 60.0  # twelve heartbeats: longer than a network file system is usually away
_LARGEST_BYTES = 2**16
#: Errors of ``link`` on file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTSUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds a run, as the lock file describes it."""

    host: str
    machine_id: str  # survives reboots; empty where unknown
    boot_id: str
    pid_namespace: str  # process ids mean something only in the same one (containers)
    pid: Annotated[int, Field(ge=0, le=2**31)]
    #: Clock ticks since boot, as the kernel counts.
    process_started: Annotated[float, Field(ge=0, le=1e15)]
    locked_at: Annotated[float, Field(ge=0, le=1e10)]  # seconds since the epoch, to the year 2286
    token: str
    flocked: bool = False  # whether the lock file itself is locked while the holder lives

    @classmethod
    def this_process(cls) -> Holder:
        """This process, now."""
        process = ProcessIdentity.of_this_process()
        machine_id = ""
        with contextlib.suppress(OSError, ValueError):
            machine_id = Path("/etc/machine-id").read_text(encoding="utf-8").strip()
        return cls(
            host=socket.gethostname(),
            machine_id=machine_id,
            boot_id=process.boot_id,
            pid_namespace=process.pid_namespace,
            pid=process.pid,
            process_started=_process_started(process.pid) or 0.0,
            locked_at=time.time(),
            token=secrets.token_hex(8),
        )

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.locked_at))
        return f"process {self.pid} on {self.host}, which held the run since {since}"

    def alive(self, here: Holder, lock: Path) -> bool | None:
        """Return whether the holder runs, by its process or its file's flock; None if unknown."""
        if not self.on_kernel_of(here):
            same_machine = (self.host, self.machine_id) == (here.host, here.machine_id)
            return False if same_machine and self.machine_id and self.boot_id else None
        if self.pid_namespace == here.pid_namespace:
            return _process_started(self.pid) == self.process_started
        return not _flock_is_free(lock) if self.flocked else None

    def on_kernel_of(self, here: Holder) -> bool:
        """Return whether both run on one kernel since the same boot, in any container."""
        return self.boot_id == here.boot_id and bool(self.boot_id or self.host == here.host)


_HOLDER = TypeAdapter(Holder)


def driver_lives(directory: Path) -> bool | None:
    """Return whether the holder of a run's lock lives; None if unknown or unlocked. Read-only."""
    lock = RunLock(directory)
    try:
        holder = lock.holder()
        return None if holder is None else holder.alive(Holder.this_process(), lock.path)
    except (OSError, StoreError):
        return None


def is_held(directory: Path) -> bool:
    """Return whether a driver holds a run; on another host, for a minute after its heartbeat."""
    lives = driver_lives(directory)
    if lives is not None:
        return lives
    with contextlib.suppress(OSError):
        return time.time() - (directory / LOCK).stat().st_mtime < SILENCE_S
    return False


class RunLock:
    """The lock of one run directory. ``acquire``, ``still_mine`` before each write, ``release``."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK
        self._guard_path = directory / LOCK_GUARD
        self._inode: tuple[int, int] | None = None  # of the lock file, while this object holds it
        self._file: int | None = None  # open for its flock
        self._released = threading.Event()  # ends the heartbeat
        #: Silence after which a holder on another host counts as dead.
        self.silence_means_death_s = float("inf")

    def acquire(self) -> Holder | None:
        """Take the lock and return its dead previous holder, if any.

        Raises StoreLocked if another driver holds it or may, StoreError if it cannot be written.
        """
        me = Holder.this_process()
        with _guard(self._guard_path):
            dead = self._dead_holder(me)
            if dead is not None:
                self.path.unlink()
            self._create(me)
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()
        return dead

    def refuse_if_held(self) -> None:
        """Raise StoreLocked or StoreError as ``acquire`` would, without taking the lock."""
        if os.path.lexists(self.path):  # else there is nothing to guard either
            with _guard(self._guard_path):
                self._dead_holder(Holder.this_process())

    def holder(self) -> Holder | None:
        """Return the holder, None if free; StoreLocked if invalid, StoreError if unreadable."""
        try:
            return _HOLDER.validate_json(disk.read(self.path, _LARGEST_BYTES), strict=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror or error}") from error
        except ValidationError as error:
            why = error.errors(include_url=False)[0]["msg"]
            raise StoreLocked(
                f"{self.path} exists but does not say who holds the run ({why}). If no driver "
                "works on it, delete the file."
            ) from error

    def still_mine(self) -> None:
        """Raise StoreLocked if the lock was taken away, StoreError if never held or unreadable."""
        if self._inode is None:
            raise StoreError(f"rows can be written only by the holder of {self.path}")
        try:
            mine = inode(self.path) == self._inode
        except FileNotFoundError:
            mine = False
        except OSError as error:  # it may do better in a moment
            raise StoreError(f"cannot look at {self.path}: {error.strerror or error}") from error
        if not mine:
            raise StoreLocked(f"{self.path} was removed or taken over; this driver stops writing")

    def release(self) -> None:
        """Give the lock back. Harmless when it is not held."""
        self._released.set()
        with contextlib.suppress(OSError):
            if self._inode is not None and inode(self.path) == self._inode:
                self.path.unlink()
        if self._file is not None:
            os.close(self._file)
        self._inode = self._file = None

    def _dead_holder(self, me: Holder) -> Holder | None:
        """Return the dead holder, if any; StoreLocked if it may live. Call under the guard."""
        holder = self.holder()
        if holder is None:
            return None
        alive = holder.alive(me, self.path)
        silent_s = self._silent_s()
        if alive or (alive is None and silent_s <= self.silence_means_death_s):
            raise StoreLocked(self._refusal(holder, alive, silent_s, me))
        return holder

    def _silent_s(self) -> float:
        """Time since the holder's last sign of life, by the clock of the file system."""
        try:
            os.utime(self._guard_path)
            return self._guard_path.stat().st_mtime - self.path.stat().st_mtime
        except OSError:
            return 0.0

    def _beat(self) -> None:
        """Touch the lock file every few seconds while this object holds it."""
        mine, released = self._inode, self._released
        while not released.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                if inode(self.path) != mine:
                    return
                os.utime(self.path)

    def _create(self, me: Holder) -> None:
        """Write the lock file whole under another name and link it, which one process can do."""
        aside = self.path.with_name(f".{LOCK}.{me.token}")
        ours: tuple[int, int] | None = None
        try:
            self._file = files.create(aside)
            me = replace(me, flocked=_flock(self._file))
            disk.write_all(self._file, (json.dumps(asdict(me), indent=1) + "\n").encode())
            os.fsync(self._file)  # after a power failure it is whole or absent
            ours = inode(aside)
            os.link(aside, self.path)
            self._inode = ours
        except FileExistsError:
            rival = self.holder()
            if rival is None:
                raise StoreLocked(f"another driver was quicker to take {self.path}") from None
            raise StoreLocked(self._refusal(rival, None, 0.0, me)) from None
        except OSError as error:
            with contextlib.suppress(OSError):  # else a lock without a holder would stay
                if inode(self.path) == ours:
                    self.path.unlink()
            text = f"cannot lock {self.path}: {error.strerror or error}"
            if ours is not None and error.errno in _NO_LINKS:
                text += (
                    ". Its file system has no hard links, by which a run is locked: put results on "
                    "a local disk or NFS with --results DIR or NIGHTGRID_RESULTS"
                )
            raise StoreError(text) from error
        finally:
            if self._inode is None and self._file is not None:
                os.close(self._file)
                self._file = None
            with contextlib.suppress(OSError):
                aside.unlink()

    def _refusal(self, holder: Holder, alive: bool | None, silent_s: float, here: Holder) -> str:
        age = duration(time.time() - holder.locked_at)
        text = (
            f"run {self.path.parent.name!r} is held by process {holder.pid} on {holder.host} for "
            f"{age}, last seen {duration(silent_s)} ago"
        )
        if alive and holder.flocked and holder.on_kernel_of(here) and _flock_is_free(self.path):
            # It keeps its own lock file locked; this one came with a copy of the directory.
            return (
                f"{text}, says {self.path}, which was copied from that process's own. If this run "
                f"is a copy that no driver uses, delete {self.path}."
            )
        if alive:
            return f"{text}. Wait for it, stop it, or use another --run name."
        return (
            f"{text}. Whether it still runs cannot be seen from here ({here.host}): "
            f"`nightgrid run --resume` takes over from a driver that has not been seen for "
            f"{SILENCE_S:.0f} s. If you are sure that it does not run, delete {self.path}."
        )


@contextlib.contextmanager
def _guard(path: Path) -> Iterator[None]:
    """Serialise this host's processes by flock, where supported; StoreError if it cannot open."""
    try:
        file = files.open_to_append(path)
    except OSError as error:
        raise StoreError(f"cannot lock {path}: {error.strerror or error}") from error
    try:
        _flock(file, wait=True)
        yield
    finally:
        os.close(file)


def _flock(file: int, *, wait: bool = False) -> bool:
    """Lock an open file until it is closed; false where the file system cannot."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _flock_is_free(path: Path) -> bool:
    """Return whether no process of this kernel locks the file; False where unknown."""
    try:
        with files.opened(path) as file:
            return _flock(file.fileno())
    except OSError:
        return False


def inode(path: Path) -> tuple[int, int]:
    """Device and inode number of a file."""
    status = os.stat(path)  # as ``Path.stat`` does, by way of half as many calls
    return status.st_dev, status.st_ino


def _process_started(pid: int) -> float | None:
    """Start time of a process; None if it is gone (a zombie is)."""
    if os.path.exists("/proc/self/stat"):
        ticks = started_ticks(pid)
        return None if ticks is None else float(ticks)
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None
