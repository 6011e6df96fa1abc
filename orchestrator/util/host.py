"""This host: its usable cores, its clocks, and its environment.

Durations, timeouts and events use ``time.monotonic``, because the time of day may be set. The time
of day is only for people and ``--deadline``; ``tests/project/test_architecture.py`` lists every
function that may read it, and why.
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


# ---------------------------------------------------------------- memory

#: Ray's variables, and its default of the first.
_THRESHOLD, _REFRESH = "RAY_memory_usage_threshold", "RAY_memory_monitor_refresh_ms"
_KILLED_FROM = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of the host, or of this process's cgroup where that has less."""

    used_bytes: int = 0
    limit_bytes: int = 0  # 0: unknown
    killed_from: float = 0.0  # share from which Ray's memory monitor kills; 0: it is off

    @property
    def share(self) -> float:
        """The used share, from 0 to 1."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0

    @property
    def problem(self) -> str:
        """Text on memory of which Ray's monitor leaves less than a tenth; "" otherwise."""
        if not self.killed_from or self.share < self.killed_from - 0.1:
            return ""
        return (
            f"{self.share:.0%} of {self.limit_bytes / 2**30:.1f} GiB of memory are in use; from "
            f"{self.killed_from:.0%} on Ray's memory monitor ends all jobs of this host"
        )


MEMORY_REMEDY = (
    f"end what uses the memory, or turn the monitor off: {_REFRESH}=0 in the environment in which "
    "that node's Ray starts"
)


def memory_use(root: Path = Path("/")) -> MemoryUse:
    """Return the memory in use as Ray's monitor counts it, without reclaimable files."""
    known = meminfo(root)
    limit = known.get("MemTotal", 0) * 1024
    used = limit - known.get("MemAvailable", 0) * 1024
    groups = root / "sys/fs/cgroup"
    own = re.search(r"^0::/(.*)$", text_of(root / "proc/self/cgroup"), re.MULTILINE)
    for directory in (groups, groups / (own[1] if own else "")):
        most, now = (text_of(directory / name).strip() for name in ("memory.max", "memory.current"))
        if most.isdecimal() and now.isdecimal() and int(most) < limit:
            files = re.search(r"^inactive_file (\d+)$", text_of(directory / "memory.stat"), re.M)
            limit, used = int(most), int(now) - int(files[1] if files else 0)
    killed_from = _KILLED_FROM
    with contextlib.suppress(ValueError):
        killed_from = float(os.environ.get(_THRESHOLD, _KILLED_FROM))
    if os.environ.get(_REFRESH) == "0":
        killed_from = 0.0
    return MemoryUse(used_bytes=used, limit_bytes=limit, killed_from=killed_from)


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """Parse ``/proc/meminfo``: kibibytes, or counts."""
    lines = re.findall(r"^(\w+):\s+(\d+)", text_of(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(value) for name, value in lines}


def text_of(path: Path) -> str:
    """The text of a file; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


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


def complete_environment() -> None:
    """Set what libraries take for granted: a home directory, a user's name, no proxy to loopback.

    A container's user may have neither home nor name, at which ``Path.home`` and
    ``getpass.getuser`` raise.
    """
    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = "/"  # as container engines do; ``home_problem`` says so
    if not any(map(os.environ.get, ("LOGNAME", "USER", "LNAME", "USERNAME"))):
        with contextlib.suppress(ImportError):
            import pwd

            try:
                pwd.getpwuid(os.getuid())
            except KeyError:
                os.environ["LOGNAME"] = f"user-{os.getuid()}"
    bypass_proxies()


HOME_REMEDY = (
    "set HOME to a directory that its user can write to, or NIGHTGRID_CACHE and HF_HOME to two "
    "such directories"
)


def host_problems() -> tuple[str, ...]:
    """Problems of this host with a home directory and with memory, each with its remedy."""
    problems = ((home_problem(), HOME_REMEDY), (memory_use().problem, MEMORY_REMEDY))
    return tuple(f"{problem}; {remedy}" for problem, remedy in problems if problem)


#: Programs that compute on a processor's share of this host: figures are disturbed from there on.
MOST_LOAD = 0.25


def load_problem() -> str:
    """Text on other programs that compute on this host now, and what it means; "" if few do."""
    cores, load = len(usable_cores()), os.getloadavg()[0]
    if load < MOST_LOAD * cores:
        return ""
    slower = max(1.0, (load + 1) / cores)
    lasting = f", and jobs up to {slower:.1f} times as long" if slower > 1.05 else ""
    return (
        f"this host is loaded: {load:.1f} other programs on {cores} cores; figures measured on its "
        f"processor are lower bounds meanwhile{lasting} (rows say which, and are repeated)"
    )


def home_problem() -> str:
    """Text on a home directory that can hold no cache, where caches lie there; "" otherwise."""
    if os.environ.get("NIGHTGRID_CACHE") and os.environ.get("HF_HOME"):
        return ""
    home = Path(os.path.expanduser("~"))
    if os.access(home / ".cache" if (home / ".cache").is_dir() else home, os.W_OK):
        return ""
    why = "cannot be written to" if home.is_dir() else "is not a directory"
    return f"the home directory {home} of user {os.getuid()} {why}: caches have no place"
