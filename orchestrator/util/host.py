"""This host: the cores that this process may use, and its two clocks.

Cores are those of the process's affinity and its control group's quota, by one of the hardware
threads of each.

The time of day (``time.time``) is set: by hand, by a time server that finds it wrong, by a virtual
machine that wakes up. A duration, a timeout or a backoff that was counted by it would be hours too
long or end at once. So all of them, and the events, are counted by ``time.monotonic``. The time of
day is read where people will read it: rows, notes, the status, locks; and for ``--deadline``, which
is a time of day (``CallAt`` here, ``ClockSet`` in the schedule). An interval that rows hold begins
at a time of day and ends as much later as the steady clock says (``Interval``).
``tests/project/test_architecture.py`` lists every function that may read the time of day, and why.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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


#: A difference that no two reads of two clocks explain: the time of day was set.
STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Starts when it is made. Its end is as far from its start as time has really passed."""

    started_at: float = field(default_factory=time.time)  # seconds since the epoch
    _began: float = field(default_factory=time.monotonic)

    def until_now(self) -> float:
        """Now, in seconds since the epoch by the clock as it was at the start."""
        return self.started_at + (time.monotonic() - self._began)


class CallAt:
    """Calls a function once at a time of day, however often that is set meanwhile."""

    def __init__(
        self,
        moment: float,
        act: Callable[[], object],
        *,
        wall: Callable[[], float] = time.time,
        look_every_s: float = 1.0,
    ) -> None:
        self._moment, self._act, self._wall = moment, act, wall
        self._look_every_s = look_every_s
        self._cancelled = threading.Event()
        threading.Thread(target=self._wait, name="deadline", daemon=True).start()

    def cancel(self) -> None:
        """Do not call it any more."""
        self._cancelled.set()

    def _wait(self) -> None:
        while (left := self._moment - self._wall()) > 0:
            if self._cancelled.wait(min(left, self._look_every_s)):
                return
        if not self._cancelled.is_set():
            self._act()
