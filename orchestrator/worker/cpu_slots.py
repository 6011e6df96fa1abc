"""CPU slots: shares of a host's cores for jobs that compute on them, and what jobs really got.

Emulated cards, and CPU cards of one host, share its cores. Were their jobs to run at the same time,
each figure would depend on its neighbours. So a job takes a slot, as many cores as it has threads,
before it loads and keeps it to its end, over all processes and drivers of a user of the host. One
core stays free for all else (Ray, the driver, workers that start), unless a single job needs it:
with every core taken, half of the rows waited for a processor for more than 5 % of their timed
part. Loading is within the slot, since it would disturb others' timed parts.

A core that is taken is a locked byte of one file. The kernel holds such locks for a process and
frees them when it dies, however it dies; its children do not inherit them. A job takes all its
cores at once, while it holds the lock of the queue, so that a gang which needs all of them is not
starved and two gangs never wait for each other. A process that is stopped (SIGSTOP) does not
compute: its locks are passed over.

The file lies in a directory that only this user can enter, since a lock that others can take would
let them stop a run. A link, a pipe or another's file in its place is passed over. Slots are a
courtesy, and what a process really got is measured beside its figure (``processor_reading``): where
there can be no slots, and where nothing has moved for hours, a job goes on without one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from orchestrator.core.readings import (
    SHORTEST_OF_HOST_S,
    HostTime,
    ProcessorReading,
    ThreadTime,
    Turn,
)
from workloads.base import Collective
from workloads.devices import host_device
from workloads.util import files
from workloads.util.processes import process_stat

#: Names another file, for processes that share slots among themselves alone.
VARIABLE = "NIGHTGRID_TURNS"
_FILE = "cpu-slots.lock"

#: Without any change in the locks that a job waits for it goes on without a slot after this time.
#: It is longer than a watchdog leaves a hung job in any phase.
PATIENCE_S = 4 * 3600.0
POLL_S = 0.05
ROUND_S = 2.0  # after which the ranks of a waiting gang show that they live

#: Bytes of the file: one for each core from 0, and the queue's.
_QUEUE = 1 << 20
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of fcntl(2) on 64-bit Linux


class Locks:
    """Locked bytes of one file, on behalf of this process. A process opens a file once, since
    closing any handle of it would free all of its locks."""

    _opened: ClassVar[dict[Path, Locks]] = {}

    def __init__(self, path: Path) -> None:
        self._handle = files.open_to_append(path)
        status = os.fstat(self._handle)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.identity = f"{boot} {status.st_dev} {status.st_ino}"  # among the files of all hosts
        self.holder(0)  # some file systems have no locks

    @classmethod
    def of(cls, path: Path) -> Locks:
        """The locks of a file, which is made if need be.

        Raises:
            OSError: it cannot be opened for writing, is no ordinary file, or has no locks.
        """
        known = cls._opened.get(path)
        if known is None or os.fstat(known._handle).st_nlink == 0:  # it was removed
            known = cls._opened[path] = cls(path)
        return known

    def lock(self, at: int) -> bool:
        """Lock a byte if no other process has."""
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
        except (BlockingIOError, PermissionError):  # as fcntl(2) has it, either
            return False
        return True

    def unlock(self, at: int) -> None:
        """Free a byte."""
        fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, at)

    def holder(self, at: int) -> int | None:
        """The process that has locked a byte, 0 where it cannot be seen from here, in another
        container; None if no process has, or only one that is stopped."""
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._handle, fcntl.F_GETLK, query))
        if kind == fcntl.F_UNLCK:
            return None
        status = process_stat(pid) if pid > 0 else None
        return None if status is not None and status.stopped else pid


class Slot:
    """A wait for cores, and the slot that comes of it, until ``release``."""

    def __init__(
        self,
        locks: Locks,
        cores: Sequence[int],
        threads: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._locks, self._cores, self._clock = locks, cores, clock
        self._threads = min(threads, len(cores))
        self._locked: list[int] = []
        self._is_first = False  # in the queue
        self._holders: object = None
        self._moved_at = clock()

    def wait(self, seconds: float) -> bool:
        """Wait so long for the slot; whether it is there, or nothing has moved for too long."""
        until = self._clock() + seconds
        while not self._take():
            now = self._clock()
            if now - self._moved_at > PATIENCE_S:
                return True
            if now >= until:
                return False
            time.sleep(min(POLL_S, until - now))
        return True

    def release(self) -> None:
        """Give everything back."""
        for at in self._locked:
            self._locks.unlock(at)
        self._locked.clear()

    def _take(self) -> bool:
        """Take all cores that are wanted, or none."""
        locks = self._locks
        if not self._is_first:
            self._is_first = self._lock(_QUEUE)
        holders = [locks.holder(core) for core in self._cores] if self._is_first else []
        if self._is_first:
            free = [c for c, holder in zip(self._cores, holders, strict=True) if holder is None]
            needed = min(self._threads + host_device().spare_cores, len(self._cores))
            if len(free) >= needed:
                for core in free[: self._threads]:
                    self._lock(core)
                if _QUEUE in self._locked:
                    self._locked.remove(_QUEUE)
                    locks.unlock(_QUEUE)
                return True
        state = holders or locks.holder(_QUEUE)
        if state != self._holders:
            self._holders, self._moved_at = state, self._clock()
        return False

    def _lock(self, at: int) -> bool:
        """Lock a byte, or pass over a stopped process that has it; whether this job may go on."""
        if not self._locks.lock(at):
            if self._locks.holder(at) is not None:
                return False
            if not self._locks.lock(at):  # its holder is stopped; otherwise it was just freed
                return True
        self._locked.append(at)
        return True


@contextlib.contextmanager
def cpu_slot(
    collective: Collective,
    rank: int,
    threads: int,
    cores: Sequence[int],
    *,
    path: Path | None = None,
) -> Iterator[Turn | None]:
    """Wait for the slot of a job and keep it within the block; None where there are no slots.

    A gang takes its slot as one: on each host its lowest rank takes the cores of all. A gang of
    several hosts takes them in the order of their files, as all others do. One that has more
    threads than its host has cores takes all of them.

    Args:
        collective: what the ranks do together; all of them call this.
        rank: this one.
        threads: of this rank.
        cores: of this host, those that this process may use (``usable_cores``).
        path: the file of locks; by default this user's.
    """
    began = time.monotonic()
    locks = _locks_of(path)
    own = locks.identity if locks is not None else ""
    ranks: list[tuple[str, int]] = collective.gather((own, threads))
    wanted = sum(count for file, count in ranks if file == own)
    leads = locks is not None and rank == [file for file, _ in ranks].index(own)
    slot: Slot | None = None
    try:
        for file in sorted({file for file, _ in ranks} - {""}):
            if leads and locks is not None and file == own:
                slot = Slot(locks, cores, wanted)
            waiting = slot if file == own else None
            while not any(collective.gather(waiting.wait(ROUND_S) if waiting else False)):
                pass
        waited_s, oversubscribed = time.monotonic() - began, wanted > len(cores)
        yield Turn(waited_s=waited_s, oversubscribed=oversubscribed) if locks else None
    finally:
        if slot is not None:
            slot.release()


def directories() -> tuple[Path, ...]:
    """Directories in which this user's file of locks may lie, the first one first."""
    cache = Path("~/.cache/nightgrid").expanduser() / f"slots-{socket.gethostname()}"
    return Path(f"/tmp/nightgrid-{os.geteuid()}"), cache


def _locks_of(path: Path | None) -> Locks | None:
    """The locks of this file, of the one that the environment names, or of the first directory that
    is this user's alone; only on Linux."""
    if sys.platform != "linux":
        return None
    named = path or os.environ.get(VARIABLE)
    for file in [Path(named)] if named else [place / _FILE for place in directories()]:
        with contextlib.suppress(OSError):
            if not named:
                make_private(file.parent)
            return Locks.of(file)
    return None


def make_private(directory: Path) -> None:
    """Make a directory of mode 0700, or see that this one is.

    Raises:
        OSError: it is a link, another user's, or open to others.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a private directory of this user")


# ---------------------------------------------------------------- what a process really got


def processor_reading(since: ProcessorReading | None = None) -> ProcessorReading:
    """Processor time of this process and its host until now, as the kernel counts it (proc(5):
    schedstat, stat).

    ``/proc/PID/task/TID/schedstat`` has the nanoseconds that a thread ran and those in which it was
    runnable and had to wait, for another process or for its control group's quota. A thread that
    sleeps or waits for a card waits in neither.

    Args:
        since: a reading that this one will be compared with. The host, which is counted in ticks,
            is not read where that would say nothing of so short a time.
    """
    at = time.monotonic()
    short = since is not None and at - since.at < SHORTEST_OF_HOST_S
    return ProcessorReading(
        at=at,
        ran_s=time.process_time(),
        threads=thread_times(Path("/proc/self/task")),
        host=None if short else host_time(Path("/proc/stat")),
    )


def thread_times(tasks: Path) -> dict[int, ThreadTime] | None:
    """Times of every thread by its number; None where the kernel does not count them."""
    times = {}
    try:
        for task in os.scandir(tasks):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                ran, waited, _ = map(int, Path(task.path, "schedstat").read_bytes().split())
                times[int(task.name)] = ThreadTime(ran_s=ran / 1e9, waited_s=waited / 1e9)
    except (OSError, ValueError):
        return None
    return times if any(thread.ran_s for thread in times.values()) else None


def host_time(file: Path) -> HostTime | None:
    """Busy and stolen time of all processors; None where the kernel does not count them."""
    try:
        words = file.read_bytes().partition(b"\n")[0].split()
        user, nice, system, idle, waiting, interrupts, soft, stolen = map(int, words[1:9])
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    busy = user + nice + system + interrupts + soft
    if not busy + idle + waiting:
        return None  # as some sandboxes have it
    return HostTime(busy_s=busy / ticks, stolen_s=stolen / ticks)
