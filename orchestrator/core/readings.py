"""Readings of an attempt's timed part: energy, utilization and clocks of its cards. Pure.

Energy is the difference of two readings of the card's counter, or else its power integrated. It is
None, never a guess, for an interval not covered by readings or too short for their distance.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from workloads.devices.monitor.host import CardTelemetry
from workloads.util.statistics import percentile

#: Least length of an interval over its longest gap between readings: its ends are interpolated.
STRETCH_PER_GAP = 4.0

Source = Literal["counter", "power"]
Reading = tuple[float, CardTelemetry]  # when, on the host's monotonic clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy that one card took."""

    energy_j: float
    duration_s: float
    source: Source  # the card's own counter, or its power integrated

    @property
    def power_w(self) -> float:
        """The mean power."""
        return self.energy_j / self.duration_s


def energy_between(readings: Sequence[Reading], start: float, end: float) -> Energy | None:
    """The energy from ``start`` to ``end``, by readings in order of time; None if they do not
    cover the interval, are too sparse, or lack both counter and power."""
    if end <= start:
        return None
    first = max((i for i, (at, _) in enumerate(readings) if at <= start), default=None)
    last = min((i for i, (at, _) in enumerate(readings) if at >= end), default=None)
    if first is None or last is None:
        return None
    watched = readings[first : last + 1]
    gap = max(later - earlier for (earlier, _), (later, _) in itertools.pairwise(watched))
    if end - start < STRETCH_PER_GAP * gap:
        return None
    counts = [(at, read.energy_j) for at, read in watched if read.energy_j is not None]
    reset = any(later < earlier for (_, earlier), (_, later) in itertools.pairwise(counts))
    if len(counts) == len(watched) and not reset:  # by a reload of the driver
        energy_j = _at(counts[-2:], end) - _at(counts[:2], start)
        return Energy(energy_j=energy_j, duration_s=end - start, source="counter")
    powers = [(at, read.power_w) for at, read in watched if read.power_w is not None]
    if len(powers) < len(watched):
        return None
    inner = [(at, power) for at, power in powers if start < at < end]
    cut = [(start, _at(powers[:2], start)), *inner, (end, _at(powers[-2:], end))]
    energy_j = sum((b - a) * (p + q) / 2 for (a, p), (b, q) in itertools.pairwise(cut))
    return Energy(energy_j=energy_j, duration_s=end - start, source="power")


def _at(line: Sequence[tuple[float, float]], moment: float) -> float:
    (a, p), (b, q) = line
    return p if b == a else p + (q - p) * (moment - a) / (b - a)


FEWEST_FOR_PERCENTILES = 20

_FIGURES = ("utilization_percent", "temperature_c", "sm_clock_mhz")


def card_readings(readings: Sequence[Reading], start: float, end: float) -> dict[str, str]:
    """Summarise the readings between two moments as details of a row; empty where there is none."""
    within = [reading for at, reading in readings if start <= at <= end]
    details = {}
    for name in _FIGURES:
        values = [value for read in within if (value := getattr(read, name)) is not None]
        if not values:
            continue
        details[f"{name}_mean"] = f"{fmean(values):.4g}"
        if len(values) >= FEWEST_FOR_PERCENTILES:
            for share in (5, 95):
                details[f"{name}_p{share}"] = f"{percentile(values, share):.4g}"
    used = [read.memory_used_bytes for read in within if read.memory_used_bytes is not None]
    if used:
        details["peak_card_memory_used_bytes"] = str(max(used))
    if power := {read.power_of for read in within if read.power_of}:
        details["power_of"] = " and ".join(sorted(power))
    throttled = [read.throttled for read in within if read.throttled is not None]
    if throttled:
        counts = Counter(reason for reasons in throttled for reason in reasons)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        shares = (f"{reason} {count / len(throttled):.0%}" for reason, count in ranked)
        details["throttled"] = ", ".join(shares) or "never"
    return details | ({"card_readings": str(len(within))} if details else {})


#: Threads that ran less than this share of the busiest one's time are helpers, whose waits are
#: ignored.
HELPER_SHARE = 0.1
#: Shortest interval for host times, which count in ticks of 10 ms.
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
    """Use between two readings of one process, or None if no time passed; waits of all computing
    threads are added up, since each holds up the others."""
    wall_s = after.at - before.at
    if wall_s <= 0:
        return None
    wait_share = stolen_share = host_load = None
    if before.threads is not None and after.threads is not None:
        never = ThreadTime(ran_s=0.0, waited_s=0.0)
        pairs = [(before.threads.get(thread, never), now) for thread, now in after.threads.items()]
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
    host = reading.host
    return reading.at if host is None or host.at is None else host.at
