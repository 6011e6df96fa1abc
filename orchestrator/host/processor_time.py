"""Processor time of this process and its host, as the kernel counts it (proc(5): schedstat, stat).

``/proc/PID/task/TID/schedstat`` has the nanoseconds that a thread ran and those in which it was
runnable and had to wait, for another process or for its control group's quota. A thread that sleeps
or waits for a card waits in neither.

A short job takes little longer than two such readings. So the files of a process with few threads
stay open, and the host, which is counted in ticks, is read once a tick at most.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from orchestrator.core.readings import SHORTEST_OF_HOST_S, HostTime, ProcessorReading, ThreadTime

_THREADS = Path("/proc/self/task")
_HOST = Path("/proc/stat")
#: The host's counts are no finer.
TICK_S = 0.01
#: Files of more threads than these are not kept open: jobs need descriptors, too.
MOST_KEPT = 16
_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC


def processor_reading(since: ProcessorReading | None = None) -> ProcessorReading:
    """This process and this host now.

    Args:
        since: a reading that this one will be compared with. The host is not read where that would
            say nothing of so short a time.
    """
    at = time.monotonic()
    if since is not None and at - since.at < SHORTEST_OF_HOST_S:
        host = None
    else:
        host = _host.time(at, fresh=since is not None)
    return ProcessorReading(at=at, ran_s=time.process_time(), threads=_threads.times(), host=host)


def thread_times(tasks: Path) -> dict[int, ThreadTime] | None:
    """Times of every thread by its number; None where the kernel does not count them."""
    found = {}
    try:
        for task in os.scandir(tasks):
            try:
                found[int(task.name)] = _thread_time(_read(f"{task.path}/schedstat"))
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread ended meanwhile, or the kernel has no such file
    except (OSError, ValueError):
        return None
    return found if any(each.ran_s for each in found.values()) else None


def host_time(stat: Path, at: float | None = None) -> HostTime | None:
    """Busy and stolen time of all processors, read ``at`` this moment; None where the kernel does
    not count them."""
    try:
        words = _read(stat).partition(b"\n")[0].split()
        user, nice, system, idle, waiting, interrupts, soft, stolen = map(int, words[1:9])
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    busy = user + nice + system + interrupts + soft
    if not busy + idle + waiting:
        return None  # as some sandboxes have it
    return HostTime(busy_s=busy / ticks, stolen_s=stolen / ticks, at=at)


def _thread_time(line: bytes) -> ThreadTime:
    ran, waited, _ = map(int, line.split())
    return ThreadTime(ran_s=ran / 1e9, waited_s=waited / 1e9)


def _read(path: str | Path) -> bytes:
    """The beginning of a file of the kernel's, without a buffer around it."""
    handle = os.open(path, _READ_ONLY)
    try:
        return os.read(handle, 256)
    finally:
        os.close(handle)


class OwnThreads:
    """Times of this process's threads. Their files stay open while the threads are the same: their
    directory has two links, and one for each thread, and of one that has ended nothing is read."""

    def __init__(self) -> None:
        self._pid = 0  # of the process that opened them, which may have been forked since
        self._directory = -1
        self._files: dict[int, int] = {}  # descriptors by thread

    def times(self) -> dict[int, ThreadTime] | None:
        """Times of every thread by its number; None where the kernel does not count them."""
        known = self._read_kept() if self._files and self._pid == os.getpid() else None
        if known is not None:
            return known
        found = thread_times(_THREADS)
        self._keep(found or {})
        return found

    def _read_kept(self) -> dict[int, ThreadTime] | None:
        """The same of files that are open; None where the threads are not those any more."""
        try:
            if os.fstat(self._directory).st_nlink != len(self._files) + 2:
                return None
            return {
                number: _thread_time(os.pread(file, 256, 0)) for number, file in self._files.items()
            }
        except (OSError, ValueError):  # one has ended, or the job has closed what it did not open
            return None

    def _keep(self, numbers: dict[int, ThreadTime]) -> None:
        """Keep files of these threads open, if they are few and all there are."""
        self._close()
        if not numbers or len(numbers) > MOST_KEPT:
            return
        self._pid = os.getpid()
        try:
            self._directory = os.open(_THREADS, _READ_ONLY)
            for number in numbers:
                self._files[number] = os.open(f"{_THREADS}/{number}/schedstat", _READ_ONLY)
        except OSError:
            self._close()

    def _close(self) -> None:
        """Close what is open, unless a job has closed it and has another file there."""
        for file in (self._directory, *self._files.values()):
            with contextlib.suppress(OSError):
                if file >= 0 and os.readlink(f"/proc/self/fd/{file}").startswith("/proc/"):
                    os.close(file)
        self._directory = -1
        self._files.clear()


class _HostOnce:
    """Time of the host, read once a tick."""

    def __init__(self) -> None:
        self._last: HostTime | None = None

    def time(self, at: float, *, fresh: bool) -> HostTime | None:
        last = self._last
        if fresh or last is None or last.at is None or not 0 <= at - last.at < TICK_S:
            self._last = last = host_time(_HOST, at)
        return last


_threads, _host = OwnThreads(), _HostOnce()
