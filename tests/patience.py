"""Time limits of tests, longer where the machine is busy.

A limit says how long something may take on a machine that does nothing else. Under load the same
work gets a share of the processors only, so limits grow with the tasks for each of them, and with
the time for which the kernel says that tasks wait. A test that never comes to its end still fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

MOST = 12.0


def busyness() -> float:
    """The factor by which work takes longer now than on an idle machine: 1 to ``MOST``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    tasks = os.getloadavg()[0] / (cores or 1)
    return min(MOST, max(1.0, 1.0 + tasks, 1.0 / max(0.01, 1.0 - share_waiting())))


def share_waiting() -> float:
    """The share of the last ten seconds in which some task waited for a processor; 0 if unknown."""
    try:
        some = Path("/proc/pressure/cpu").read_text().split()[1]
        return float(some.partition("=")[2]) / 100
    except (OSError, IndexError, ValueError):
        return 0.0


def patience(seconds: float) -> float:
    return seconds * busyness()


def until(condition: Callable[[], object], seconds: float, *, every_s: float = 0.05) -> bool:
    """Wait for a condition; False when it was not met in time. The limit follows the load."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > patience(seconds):
            return bool(condition())
        time.sleep(every_s)
    return True


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def commands_naming(*words: str) -> list[str]:
    """Command lines, of all that runs on this machine, with these words in them."""
    commands = (" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
    return [command for command in commands if all(word in command for word in words)]
