"""Processors of this host that this process may use: its affinity, its control group's quota, and
one of the hardware threads of each core."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_GROUPS = Path("/sys/fs/cgroup")


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


def _siblings(number: int) -> str:
    """The hardware threads of a core as the kernel lists them; alone where it does not."""
    try:
        return Path(_SIBLINGS.format(number)).read_text().strip() or str(number)
    except OSError:
        return str(number)


def _quotas() -> Iterator[float]:
    """Processors that this process's control groups may keep busy, of those that have a limit."""
    own = {"cpu": "", "": ""}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                own[controller] = path.strip("/")
    for directory in {_GROUPS, _GROUPS / own[""]}:
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            most, period = (directory / "cpu.max").read_text().split()
            yield float(most) / float(period)  # "max" is no number: no limit
    for directory in {_GROUPS / "cpu", _GROUPS / "cpu" / own["cpu"]}:
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            most = (directory / "cpu.cfs_quota_us").read_text()
            if float(most) > 0:
                yield float(most) / float((directory / "cpu.cfs_period_us").read_text())
