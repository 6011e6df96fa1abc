"""Processors of this host that this process may use: its affinity, its control group's quota, and
one of the hardware threads of each core."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
GROUPS = Path("/sys/fs/cgroup")
_OLD_QUOTA, _OLD_PERIOD = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may use, at least one: the first hardware thread of
    each physical core, and no more than the control group has time for."""
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
    else:
        allowed = list(range(os.cpu_count() or 1))
    first_of = {_siblings(number): number for number in reversed(allowed)}
    cores = sorted(first_of.values())
    quota = min(_quotas(), default=math.inf)
    return tuple(cores[: max(1, math.floor(min(quota, len(cores))))])


def threads_of_card(cores: int, cards: int, spare: int) -> int:
    """Threads of each of the cards that share a host's cores: an even share of those that are not
    spared for the rest of the host, at least one."""
    return max(1, (cores - spare) // cards)


def _siblings(number: int) -> str:
    """The hardware threads of a core as the kernel lists them; alone where it does not."""
    try:
        return Path(SIBLINGS.format(number)).read_text().strip() or str(number)
    except OSError:
        return str(number)


def _quotas() -> Iterator[float]:
    """Processors that this process's control groups may keep busy, of those that have a limit. In a
    container the root of their file system is its own group."""
    own = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                own = line[4:]
    for directory in {GROUPS, GROUPS / own}:
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            most, period = (directory / "cpu.max").read_text().split()
            yield float(most) / float(period)  # "max" is no number: no limit
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # of the older kind
        quota = float((GROUPS / _OLD_QUOTA).read_text())
        if quota > 0:
            yield quota / float((GROUPS / _OLD_PERIOD).read_text())
