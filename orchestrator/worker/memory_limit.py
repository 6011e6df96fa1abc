"""A real limit on the memory of an emulated card, and kills of the kernel for want of memory.

An emulated card computes on the CPU, whose memory is the whole host's: nothing would ever run out
of memory, and the code that lives with that would never run. So the process gets a limit on its
private writable memory (``RLIMIT_DATA``) as far above what it holds after its imports as the card
is large. An allocation beyond it is refused by the kernel, torch reports it, and the job ends as
OUT_OF_MEMORY in the way it would on a card. Only the soft limit is set: it is lifted while the
worker cleans up, and for processes that have no such counter (not Linux) it is refused outright.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STATUS = Path("/proc/self/status")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


class LimitUnavailable(Exception):
    """This system cannot limit the private memory of a process."""


def private_bytes() -> int:
    """Bytes of private writable memory mapped by this process, which RLIMIT_DATA counts.

    Raises:
        LimitUnavailable: the system does not say.
    """
    try:
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    except OSError as error:
        raise LimitUnavailable(f"cannot read {STATUS}: {error}") from error
    raise LimitUnavailable(f"{STATUS} has no VmData line")


def _return_freed_memory() -> None:
    """Make glibc map every block of a megabyte or more by itself, so that freeing it gives it
    back, and so with the end of its heap. By default it learns to keep ever larger blocks there,
    and what a job freed would stay counted against the next."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc: its own allocator's business
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(_M_TRIM_THRESHOLD, 1 << 20)
        glibc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The limit of one emulated card, counted from what the process holds already."""

    baseline_bytes: int
    memory_bytes: int

    @classmethod
    def above_baseline(cls, memory_bytes: int) -> MemoryLimit:
        """A limit of ``memory_bytes`` above what this process holds now; not yet in force."""
        _return_freed_memory()
        return cls(baseline_bytes=private_bytes(), memory_bytes=memory_bytes)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Enforce the limit within the block; afterwards the process may allocate freely again,
        since reporting an exhausted memory needs memory."""
        before = _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = self.baseline_bytes + self.memory_bytes
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def share_of_host(cards: int) -> int:
    """Bytes for each of so many emulated cards that all of them can be full at once, with a fifth
    of the host left for the system and for what every worker holds before its first job.

    The host is this container where a control group limits it.
    """
    import psutil

    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            total = min(total, int(Path(path).read_text()))
    return int(0.8 * total) // max(1, cards) // 2**20 * 2**20


# ---------------------------------------------------------------- kills for want of memory

_MACHINE = "proc/vmstat"
#: Mount of each version, and the file with the count. A container sees its own group there.
_VERSION_1 = ("sys/fs/cgroup/memory", "memory.oom_control")
_VERSION_2 = ("sys/fs/cgroup", "memory.events")


def memory_kills(root: Path = Path("/")) -> int:
    """Count of the processes of this one's control group that the kernel killed for want of memory;
    on the whole machine where the group's cannot be read; 0 where neither can.

    The kernel counts for the machine (``/proc/vmstat``) and for each group (``memory.events``, or
    ``memory.oom_control`` of version 1). The machine's count would take the kill of another
    container, user or test for that of a worker which was killed at the same moment.
    """
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
