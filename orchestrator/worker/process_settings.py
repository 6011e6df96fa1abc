"""Settings that a process inherits from the one that starts it, for one that has another parent.

A process server that is forked from a fork server (``fork_server.py``) has to be as if its agent
had started it: with the agent's priority, cores, limits and mark.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CAP_SYS_NICE = 23


def may_raise_priority() -> bool:
    """Return whether this process may have a lower niceness than it was started with."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        return bool(int(status_of_this_process()["CapEff"], 16) >> _CAP_SYS_NICE & 1)
    return False


def raise_priority(niceness: int) -> None:
    """Give all threads of this process, and what it starts later, at most this niceness.

    Raises:
        PermissionError: they have more, and may not have less.
    """
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
            if os.getpriority(os.PRIO_PROCESS, int(name)) > niceness:
                os.setpriority(os.PRIO_PROCESS, int(name), niceness)


def status_of_this_process() -> dict[str, str]:
    """The calling thread as the kernel describes it, line by line.

    Raises:
        OSError: there is no ``/proc``.
    """
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
