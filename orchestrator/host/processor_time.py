"""Processor time of this process and its host, as the kernel counts it (proc(5): schedstat, stat).

``/proc/PID/task/TID/schedstat`` has the nanoseconds that a thread ran and those in which it was
runnable and had to wait, for another process or for its control group's quota. A thread that sleeps
or waits for a card waits in neither.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from orchestrator.domain.processor import HostTime, ProcessorReading, ThreadTime

_THREADS = Path("/proc/self/task")
_HOST = Path("/proc/stat")


def processor_reading() -> ProcessorReading:
    """This process and this host now."""
    return ProcessorReading(
        at=time.monotonic(),
        ran_s=time.process_time(),
        threads=thread_times(_THREADS),
        host=host_time(_HOST),
    )


def thread_times(tasks: Path) -> dict[int, ThreadTime] | None:
    """Times of every thread by its number; None where the kernel does not count them."""
    found = {}
    try:
        for task in os.scandir(tasks):
            try:
                ran, waited, _ = map(int, _read(f"{task.path}/schedstat").split())
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread ended meanwhile, or the kernel has no such file
            found[int(task.name)] = ThreadTime(ran_s=ran / 1e9, waited_s=waited / 1e9)
    except (OSError, ValueError):
        return None
    return found if any(each.ran_s for each in found.values()) else None


def _read(path: str | Path) -> bytes:
    """The beginning of a file of the kernel's, without a buffer around it: four a job are read."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, 256)
    finally:
        os.close(handle)


def host_time(stat: Path) -> HostTime | None:
    """Busy and stolen time of all processors; None where the kernel does not count them."""
    try:
        words = _read(stat).partition(b"\n")[0].split()
        user, nice, system, idle, waiting, interrupts, soft, stolen = map(int, words[1:9])
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    busy = user + nice + system + interrupts + soft
    if not busy + idle + waiting:
        return None  # as some sandboxes have it
    return HostTime(busy_s=busy / ticks, stolen_s=stolen / ticks)
