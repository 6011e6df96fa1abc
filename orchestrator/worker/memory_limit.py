"""A real limit on the memory of an emulated card.

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
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

    def in_force(self) -> AbstractContextManager[None]:
        """Enforce the limit within the block; afterwards the process may allocate freely again,
        since reporting an exhausted memory needs memory."""
        return _InForce(self.baseline_bytes + self.memory_bytes)


class _InForce:
    """A limit of so many bytes, and the one before it."""

    __slots__ = ("_before", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        limit, hard = self._limit, self._before[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)


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
