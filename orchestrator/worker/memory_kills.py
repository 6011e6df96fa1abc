"""Count of the processes that the kernel killed for want of memory, where this one can be meant.

The kernel counts such kills for the whole machine (``/proc/vmstat``) and for each control group
(``memory.events``, or ``memory.oom_control`` of version 1): whatever the reason was, a process
counts for the group that it was in. A host's count would take the kill of another container, user
or test for that of a worker which somebody killed at the same moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

_MACHINE = "proc/vmstat"
#: Mount of each version, and the file with the count. A container sees its own group there.
_VERSION_1 = ("sys/fs/cgroup/memory", "memory.oom_control")
_VERSION_2 = ("sys/fs/cgroup", "memory.events")


def memory_kills(root: Path = Path("/")) -> int:
    """The kills in this process's control group; on the whole machine where the group's cannot be
    read; 0 where neither can."""
    return _count(_counter(root)) or 0


@cache
def _counter(root: Path) -> Path:
    """The file that counts, which stays the same while a process stays in its group."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        lines = []
    return next((f for f in _candidates(root, lines) if _count(f) is not None), root / _MACHINE)


def _candidates(root: Path, lines: Iterable[str]) -> Iterator[Path]:
    """Paths at which the count of a group may lie that ``/proc/self/cgroup`` names so: below the
    mount, or, in a container that is shown its host's path, in the mount itself."""
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if "memory" in controllers.split(","):
            mount, name = _VERSION_1
        elif (number, controllers) == ("0", ""):
            mount, name = _VERSION_2
        else:
            continue
        yield root / mount / group.lstrip("/") / name
        yield root / mount / name


def _count(file: Path) -> int | None:
    """The number after ``oom_kill``; None where there is none (before Linux 4.13)."""
    try:
        for line in file.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    except (OSError, ValueError):
        pass
    return None
