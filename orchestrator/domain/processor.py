"""Time on the host's processors: what a process got in its timed part, and its turn on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Threads that ran less than this share of the busiest one's time are helpers, such as samplers:
#: nobody waits for them, so that they wait says nothing of the figure.
HELPER_SHARE = 0.1
#: Times of the host are counted in ticks of 10 ms: in less than this one tick would be a share that
#: means something.
SHORTEST_OF_HOST_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The turn of one job on its host's processors."""

    waited_s: float
    oversubscribed: bool  # all its threads together are more than the host has cores


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Seconds of all processors of a host since it started."""

    busy_s: float
    stolen_s: float  # in which something was to run and the hypervisor ran another machine
    at: float | None = None  # of the count, on the clock of readings; None: that of its reading


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadTime:
    """Seconds of one thread since it started."""

    ran_s: float
    waited_s: float  # runnable, and not running


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorReading:
    """Counts of the kernel for a process at one moment; None: it does not count."""

    at: float  # on a monotonic clock
    ran_s: float  # CPU time of all threads, those that have ended included
    threads: Mapping[int, ThreadTime] | None
    host: HostTime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse:
    """Use of the processors between two readings. None: the kernel does not count."""

    cores: float  # CPU seconds of the process per second
    wait_share: float | None  # of that time, in which threads that compute were kept waiting
    stolen_share: float | None  # of the processor time that the host wanted
    host_load: float | None  # processors that were busy, with whatever process


def use_between(before: ProcessorReading, after: ProcessorReading) -> ProcessorUse | None:
    """Use between two readings of one process; None where no time passed.

    A thread that waits while it could run holds up those that wait for it, so the waiting of all
    threads that compute is added up.
    """
    wall_s = after.at - before.at
    if wall_s <= 0:
        return None
    wait_share = stolen_share = host_load = None
    if before.threads is not None and after.threads is not None:
        never = ThreadTime(ran_s=0.0, waited_s=0.0)
        pairs = [(before.threads.get(each, never), now) for each, now in after.threads.items()]
        spent = [(b.ran_s - a.ran_s, b.waited_s - a.waited_s) for a, b in pairs]
        least = HELPER_SHARE * max((ran for ran, _ in spent), default=0.0)
        wait_share = sum(max(waited, 0.0) for ran, waited in spent if ran >= least) / wall_s
    if before.host and after.host and wall_s >= SHORTEST_OF_HOST_S:
        busy = max(after.host.busy_s - before.host.busy_s, 0.0)
        stolen = max(after.host.stolen_s - before.host.stolen_s, 0.0)
        stolen_share = stolen / (busy + stolen) if busy + stolen else 0.0
        host_load = busy / (_counted_at(after) - _counted_at(before))
    return ProcessorUse(
        cores=max(after.ran_s - before.ran_s, 0.0) / wall_s,
        wait_share=wait_share,
        stolen_share=stolen_share,
        host_load=host_load,
    )


def _counted_at(reading: ProcessorReading) -> float:
    """The moment at which the host of a reading was counted."""
    host = reading.host
    return reading.at if host is None or host.at is None else host.at
