"""CPU slots: shares of a host's cores for jobs that compute on them, and processor readings.

Emulated and CPU cards of one host share its cores. A job takes as many as it has threads before it
loads and keeps them to its end, across all drivers of a user on the host; one core stays free for
Ray and the driver unless a single job needs it. A taken core is a locked byte of one file: the
kernel frees it when the process dies. A job takes all its cores at once under the queue's lock, so
gangs neither starve nor deadlock. Locks of stopped processes (SIGSTOP) are ignored.

The file lies in a directory private to the user, since others' locks could stop a run. Slots are
best effort: without them, or after hours without movement, a job runs anyway, and
``processor_reading`` records the processor time that it got.
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

import psutil

from orchestrator.core import readings
from workloads.base import Collective
from workloads.devices import host_device
from workloads.util import files
from workloads.util.processes import process_stat

#: Names another file, for processes that share slots among themselves alone.
VARIABLE = "NIGHTGRID_TURNS"
_FILE = "cpu-slots.lock"

#: A job proceeds without a slot if no lock changes for longer than any phase's watchdog limit.
PATIENCE_S = 4 * 3600.0
POLL_S = 0.05
ROUND_S = 2.0  # after which the ranks of a waiting gang show that they live

#: Bytes of the file: one for each core from 0, and the queue's.
_QUEUE = 1 << 20
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of fcntl(2) on 64-bit Linux


class Locks:
    """Byte locks of one file, opened once a process: closing any handle frees all its locks."""

    _opened: ClassVar[dict[Path, Locks]] = {}

    def __init__(self, path: Path) -> None:
        self._handle = files.open_to_append(path)
        status = os.fstat(self._handle)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.identity = f"{boot} {status.st_dev} {status.st_ino}"  # among the files of all hosts
        self.holder(0)  # some file systems have no locks

    @classmethod
    def of(cls, path: Path) -> Locks:
        """Return the locks of a file, created if absent; OSError if it cannot be locked."""
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
        """Return the pid that locks a byte, 0 for another container's; None if free or stopped."""
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._handle, fcntl.F_GETLK, query))
        if kind == fcntl.F_UNLCK:
            return None
        status = process_stat(pid) if pid > 0 else None
        return None if status is not None and status.stopped else pid


class Slot:
    """A pending or granted slot of one job, until ``release``."""

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
        """Wait up to ``seconds``; return True once the slot is taken or ``PATIENCE_S`` is over."""
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
        """Lock a byte, ignoring a stopped holder; return whether this job may go on."""
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
) -> Iterator[readings.Turn | None]:
    """Hold a job's slot within the block; None where there are no slots.

    On each host the lowest rank of a gang takes the cores of all its ranks there, at most all of
    the host's; hosts are locked in the order of their files, so gangs do not deadlock. All ranks
    call this. ``cores`` are those that this process may use; ``path`` is the lock file, else
    ``VARIABLE``'s, else that of the first private directory.
    """
    began = time.monotonic()
    locks: Locks | None = None
    named = path or os.environ.get(VARIABLE)
    candidates = [Path(named)] if named else [directory / _FILE for directory in directories()]
    for place in candidates if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            if not named:
                make_private(place.parent)
            locks = Locks.of(place)
            break
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
        yield readings.Turn(waited_s=waited_s, oversubscribed=oversubscribed) if locks else None
    finally:
        if slot is not None:
            slot.release()


def directories() -> tuple[Path, ...]:
    """Candidate directories of this user's lock file, in order of preference."""
    cache = Path("~/.cache/nightgrid").expanduser() / f"slots-{socket.gethostname()}"
    return Path(f"/tmp/nightgrid-{os.geteuid()}"), cache


def make_private(directory: Path) -> None:
    """Make a directory of mode 0700; raise OSError for a link, another user's or an open one."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a private directory of this user")


# ---------------------------------------------------------------- processor readings


def processor_reading(since: readings.ProcessorReading | None = None) -> readings.ProcessorReading:
    """Processor time of this process and its host until now (proc(5): schedstat, stat).

    ``schedstat`` has the nanoseconds that a thread ran, and those it was runnable but waited for
    another process or its cgroup's quota. Sleeping and waiting for a card count as neither.
    The host, counted in ticks, is skipped if ``since``, the reading to compare with, is too recent.
    """
    at = time.monotonic()
    short = since is not None and at - since.at < readings.SHORTEST_OF_HOST_S
    return readings.ProcessorReading(
        at=at,
        ran_s=time.process_time(),
        threads=thread_times(Path("/proc/self/task")),
        host=None if short else _host_time(),
    )


def thread_times(tasks: Path) -> dict[int, readings.ThreadTime] | None:
    """Times of every thread by its number; None where the kernel does not count them."""
    times = {}
    try:
        for task in os.scandir(tasks):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                ran, waited, _ = map(int, Path(task.path, "schedstat").read_bytes().split())
                times[int(task.name)] = readings.ThreadTime(ran_s=ran / 1e9, waited_s=waited / 1e9)
    except (OSError, ValueError):
        return None
    return times if any(thread.ran_s for thread in times.values()) else None


def _host_time() -> readings.HostTime | None:
    """Busy and stolen time of all processors; None where the kernel does not count them, as in
    some sandboxes."""
    try:
        times = psutil.cpu_times()
        busy_s = times.user + times.nice + times.system + times.irq + times.softirq
        if busy_s + times.idle + times.iowait:
            return readings.HostTime(busy_s=busy_s, stolen_s=times.steal)
    except (OSError, AttributeError, TypeError, ValueError):  # not Linux, or a file without it
        pass
    return None
