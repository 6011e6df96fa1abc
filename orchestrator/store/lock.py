"""One driver on one run: a lock file that says who holds it, and when it may be taken over.

The file is created whole in one step (a hard link), so it is exclusive on network file systems
too. A holder on this host is looked up by process id *and* start time, since process ids come
back; in another container of this host by its ``flock``, which the kernel drops with the process;
a host that was rebooted holds nothing. A holder on another host cannot be looked up from here, but
it touches the lock file every few seconds: one that has been silent for long can be taken over when
the second driver is told to (``nightgrid run --resume``), else that is refused. Taking over happens
under an ``flock`` of a guard file, so that of two drivers that find a dead holder one wins. A
holder that was only cut off finds its lock gone before its next write, and writes no more.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from orchestrator.core.errors import StoreError, StoreLocked
from orchestrator.store import disk
from orchestrator.store.files import LOCK, LOCK_GUARD
from workloads.util import files
from workloads.util.processes import ProcessIdentity, started_ticks

HEARTBEAT_S = 5.0
_RENEW_S = 1.0  # between two signs of life that looks leave beside it
_LARGEST_BYTES = 2**16
#: The most that a number of the lock file can be: of the last, the year 2286.
_LARGEST = {"pid": 2**31, "process_started": 1e15, "locked_at": 1e10}
_NUMBERS = tuple(_LARGEST)
SILENCE_S = 60.0  # twelve heartbeats: longer than a network file system is usually away


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds a run, as the lock file describes it."""

    host: str
    machine_id: str  # survives reboots; empty where unknown
    boot_id: str
    pid_namespace: str  # process ids mean something only in the same one (containers)
    pid: int
    process_started: float  # clock ticks since boot, as the kernel counts
    locked_at: float  # seconds since the epoch
    token: str
    flocked: bool = False  # whether the lock file itself is locked while the holder lives

    @classmethod
    def this_process(cls) -> Holder:
        """This process, now."""
        process = ProcessIdentity.of_this_process()
        return cls(
            host=socket.gethostname(),
            machine_id=_first_line("/etc/machine-id"),
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

    def alive(self, here: Holder) -> bool | None:
        """Return whether the holder still runs, seen from ``here``; None when that cannot be
        known."""
        if not self.on_kernel_of(here):
            same_machine = (self.host, self.machine_id) == (here.host, here.machine_id)
            return False if same_machine and self.machine_id and self.boot_id else None
        if self.pid_namespace != here.pid_namespace:
            return None
        started = _process_started(self.pid)
        return started is not None and started == self.process_started

    def on_kernel_of(self, here: Holder) -> bool:
        """Return whether both run on one kernel since the same boot, in a container or not."""
        return self.boot_id == here.boot_id and bool(self.boot_id or self.host == here.host)


def driver_lives(directory: Path) -> bool | None:
    """Tell if the driver that took the lock of a run's directory lives; None where that cannot be
    known from here, or nobody has taken it. Takes nothing and writes nothing."""
    lock, here = RunLock(directory), Holder.this_process()
    try:
        holder = lock.holder()
        return None if holder is None else lock.alive(holder, here)
    except (OSError, StoreError):
        return None


def is_held(directory: Path) -> bool:
    """Tell if a driver works on the run of a directory, or may: one on another host is taken at its
    word for a minute after its last sign of life."""
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

        self._renew_at = 0.0  # monotonic: not before then does a look renew the sign of life
        self._directory = directory
        self._holder: Holder | None = None
        self._inode: tuple[int, int] | None = None
        self._file: int | None = None  # kept open for its flock
        self._released = threading.Event()  # ends the heartbeat
        #: After how long a silence a holder that cannot be looked up counts as dead.
        self.silence_means_death_s = float("inf")

    @property
    def held(self) -> bool:
        """Return whether this object took the lock and has not released it."""
        return self._holder is not None

    def acquire(self) -> Holder | None:
        """Take the lock; returns the dead holder from whom it was taken over, if any.

        Raises:
            StoreLocked: another driver holds the run, or may.
            StoreError: the lock cannot be written.
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
        """Refuse as ``acquire`` would now, and take nothing.

        Raises:
            StoreLocked: another driver holds the run, or may.
            StoreError: the lock cannot be read.
        """
        if os.path.lexists(self.path):  # else there is nothing to guard either
            with _guard(self._guard_path):
                self._dead_holder(Holder.this_process())

    @property
    def _guard_path(self) -> Path:
        return self._directory / LOCK_GUARD

    def _dead_holder(self, me: Holder) -> Holder | None:
        """Return the holder that left the lock behind; None if there is none. Call it under the
        guard.

        Raises:
            StoreLocked: its holder lives, or may.
        """
        holder = self.holder()
        if holder is None:
            return None
        alive = self.alive(holder, me)
        if alive is None and self._silent_s() > self.silence_means_death_s:
            alive = False
        if alive is not False:
            raise StoreLocked(self._refusal(holder, alive, self._silent_s(), here=me))
        return holder

    def _beat(self) -> None:
        """Leave a sign of life every few seconds, as long as the lock is ours."""
        mine, released = self._inode, self._released
        while not released.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                if inode(self.path) != mine:
                    return
                os.utime(self.path)

    def _silent_s(self) -> float:
        """Time since the holder's last sign of life, by the clock of the file system."""
        try:
            os.utime(self._guard_path)
            return self._guard_path.stat().st_mtime - self.path.stat().st_mtime
        except OSError:
            return 0.0

    def _create(self, me: Holder) -> None:
        aside = self.path.with_name(f".{LOCK}.{me.token}")
        file = None
        ours: tuple[int, int] | None = None
        try:
            file = files.create(aside)
            me = replace(me, flocked=_flock(file))
            data = memoryview((json.dumps(asdict(me), indent=1) + "\n").encode())
            while data:  # a disk that fills up makes a write short before it makes it fail
                data = data[os.write(file, data) :]
            os.fsync(file)  # after a power failure it is whole or absent
            ours = inode(aside)
            os.link(aside, self.path)
            self._inode = inode(self.path)
            self._holder, self._file, file = me, file, None
        except FileExistsError:
            rival = self.holder()
            if rival is None:
                raise StoreLocked(f"another driver was quicker to take {self.path}") from None
            raise StoreLocked(self._refusal(rival, None, 0.0, here=me)) from None
        except OSError as error:
            with contextlib.suppress(OSError):  # nobody would hold it
                if inode(self.path) == ours:
                    self.path.unlink()
            raise StoreError(f"cannot lock {self.path}: {error.strerror or error}") from error
        finally:
            if file is not None:
                os.close(file)
            with contextlib.suppress(OSError):
                aside.unlink()

    def alive(self, holder: Holder, here: Holder) -> bool | None:
        """Return whether a holder still runs, by its process or by the lock on the file."""
        alive = holder.alive(here)
        if alive is None and holder.on_kernel_of(here) and holder.flocked:
            alive = not _flock_is_free(self.path)
        return alive

    def holder(self) -> Holder | None:
        """Return the holder of the lock; None when it is free.

        Raises:
            StoreLocked: there is a lock file that cannot be understood.
        """
        try:
            values = json.loads(disk.read(self.path, _LARGEST_BYTES))
            found = Holder(**{field.name: values[field.name] for field in fields(Holder)})
            here = asdict(Holder.this_process())
            wrong = [n for n, v in asdict(found).items() if type(v) is not type(here[n])]
            # Later than any calendar, infinite, or a process id that no kernel gives.
            wrong += [n for n in _NUMBERS if n not in wrong and not 0 <= values[n] <= _LARGEST[n]]
            if wrong:
                raise ValueError(f"{wrong[0]} is {values[wrong[0]]!r:.40}")
            return found
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreLocked(
                f"{self.path} exists but does not say who holds the run ({error!r}). If no driver "
                "works on it, delete the file."
            ) from error

    def still_mine(self) -> None:
        """Verify that no other driver has taken the lock, and renew its sign of life.

        Raises:
            StoreLocked: it is not held any more.
            StoreError: it never was, or the file system does not say.
        """
        if self._holder is None:
            raise StoreError(f"rows can be written only by the holder of {self.path}")
        try:
            mine = inode(self.path) == self._inode
        except FileNotFoundError:
            mine = False
        except OSError as error:  # it may do better in a moment
            raise StoreError(f"cannot look at {self.path}: {error.strerror or error}") from error
        if not mine:
            raise StoreLocked(f"{self.path} was removed or taken over; this driver stops writing")
        now = time.monotonic()
        if now >= self._renew_at:  # a busy driver asks a hundred times a second
            self._renew_at = now + _RENEW_S
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def release(self) -> None:
        """Give the lock back. Harmless when it is not held."""
        self._released.set()
        if self._holder is not None:
            with contextlib.suppress(OSError):
                if inode(self.path) == self._inode:
                    self.path.unlink()
        if self._file is not None:
            os.close(self._file)
        self._holder = self._file = None

    def _refusal(self, holder: Holder, alive: bool | None, silent_s: float, *, here: Holder) -> str:
        age = _duration(time.time() - holder.locked_at)
        text = f"run {self._directory.name!r} is held by process {holder.pid} on {holder.host}"
        text += f" for {age}, last seen {_duration(silent_s)} ago"
        if alive and holder.flocked and holder.on_kernel_of(here) and _flock_is_free(self.path):
            # It keeps its own lock file locked; this one came with a copy of the directory.
            return (
                f"{text}, says {self.path}, which was copied from that process's own. If this run "
                f"is a copy that no driver uses, delete {self.path}."
            )
        if alive:
            return f"{text}. Wait for it, stop it, or use another --run name."
        return (
            f"{text}. Whether it still runs cannot be seen from here ({socket.gethostname()}): "
            f"`nightgrid run --resume` takes over from a driver that has not been seen for "
            f"{SILENCE_S:.0f} s. If you are sure that it does not run, delete {self.path}."
        )


@contextlib.contextmanager
def _guard(path: Path) -> Iterator[None]:
    """Let one process of this host at a time in; does nothing where files cannot be locked.

    Raises:
        StoreError: its file cannot be opened.
    """
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
    """Return whether no living process of this kernel holds the file locked; false where that
    cannot be found out."""
    try:
        with files.opened(path) as file:
            return _flock(file.fileno())
    except OSError:
        return False


def inode(path: Path) -> tuple[int, int]:
    """Device and number of a file, which another one of its name does not have."""
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


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().strip()
    except (OSError, ValueError):
        return ""


def _duration(seconds: float) -> str:
    seconds = max(0, int(seconds))
    if seconds < 120:
        return f"{seconds} s"
    minutes, hours = seconds // 60, seconds // 3600
    return f"{minutes} min" if minutes < 120 else f"{hours} h {minutes % 60} min"
