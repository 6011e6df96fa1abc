"""This host: its usable cores, its clocks, and its environment.

Durations, timeouts, backoffs and events use ``time.monotonic``, because the time of day may be set
by hand, by a time server or after a virtual machine resumes. The time of day is only for people
(rows, notes, status, locks) and ``--deadline`` (``CallAt`` here, ``ClockSet`` in the schedule).
``tests/project/test_architecture.py`` lists every function that may read it, and why.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
GROUPS = Path("/sys/fs/cgroup")
_OLD_QUOTA, _OLD_PERIOD = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


def usable_cores() -> tuple[int, ...]:
    """Return the usable cores, at least one: first hardware threads, up to the cgroup's quota."""
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
    else:
        allowed = list(range(os.cpu_count() or 1))
    first_of = {_siblings(number): number for number in reversed(allowed)}
    cores = sorted(first_of.values())
    quota = min(_quotas(), default=math.inf)
    return tuple(cores[: max(1, math.floor(min(quota, len(cores))))])


def _siblings(number: int) -> str:
    """Return a core's hardware threads as the kernel lists them, else the core alone."""
    try:
        return Path(SIBLINGS.format(number)).read_text().strip() or str(number)
    except OSError:
        return str(number)


def _quotas() -> Iterator[float]:
    """Yield processor quotas of this process's cgroups; in a container, the root is its own."""
    own = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                own = line[4:]
    for directory in {GROUPS, GROUPS / own}:
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            most, period = (directory / "cpu.max").read_text().split()
            yield float(most) / float(period)  # "max": no limit
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # cgroup v1
        quota = float((GROUPS / _OLD_QUOTA).read_text())
        if quota > 0:
            yield quota / float((GROUPS / _OLD_PERIOD).read_text())


#: Larger than any error of reading two clocks: the time of day was set.
STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Interval that starts now, with its end counted by the steady clock."""

    started_at: float = field(default_factory=time.time)  # seconds since the epoch
    _began: float = field(default_factory=time.monotonic)

    def until_now(self) -> float:
        """Return now, in seconds since the epoch by the clock as it was at the start."""
        return self.started_at + (time.monotonic() - self._began)


class CallAt:
    """Call a function once at a time of day, however often the clock is set meanwhile."""

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


# ---------------------------------------------------------------- environment variables

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def variable_in(text: str) -> str:
    """Return the first shell variable in a text, such as ``${HOME}``; "" if there is none."""
    variable = _VARIABLE.search(text)
    return variable[0] if variable else ""


#: Variables that name a proxy; libraries read both spellings.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def proxies() -> dict[str, str]:
    """Proxies that the environment names, by variable."""
    names = (*_PROXIES, *map(str.upper, _PROXIES))
    return {name: value for name in names if (value := os.environ.get(name))}


def bypass_proxies(*hosts: str) -> None:
    """Add loopback and these hosts to ``no_proxy``, if the environment names a proxy."""
    if not proxies():
        return
    both = ",".join(os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    known = list(filter(None, map(str.strip, both.split(","))))
    value = "*" if "*" in known else ",".join(dict.fromkeys((*known, *_LOOPBACK, *hosts)))
    os.environ |= {"no_proxy": value, "NO_PROXY": value}
