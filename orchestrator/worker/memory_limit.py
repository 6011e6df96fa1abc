"""Memory limits of emulated cards, and counts of the kernel's out-of-memory kills.

An emulated card computes in the host's memory, which would hide every out-of-memory path. So the
process gets a soft ``RLIMIT_DATA`` of the card's size above its use after imports; a refused
allocation ends the job as OUT_OF_MEMORY, as on a card.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from orchestrator.util.host import memory_use, text_of

STATUS = Path("/proc/self/status")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The limit of one emulated card, counted from what the process holds already."""

    baseline_bytes: int
    memory_bytes: int

    @classmethod
    def above_baseline(cls, memory_bytes: int) -> MemoryLimit:
        """Return a limit ``memory_bytes`` above this process's current use; not yet enforced.

        From now on glibc returns freed blocks of 1 MiB, which would count against the next job.
        """
        with contextlib.suppress(OSError, AttributeError):  # not glibc
            glibc = ctypes.CDLL("libc.so.6")
            glibc.mallopt(_M_TRIM_THRESHOLD, 1 << 20)
            glibc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        # What RLIMIT_DATA counts. (psutil reads ``statm``, where gVisor has 0.)
        line = re.search(r"^VmData:\s+(\d+) kB", text_of(STATUS), re.MULTILINE)
        data = int(line[1]) * 1024 if line else psutil.Process().memory_info().data
        return cls(baseline_bytes=data, memory_bytes=memory_bytes)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Enforce the limit within the block only: reporting an OOM needs memory."""
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
    """Bytes per emulated card: an even share of 80 % of the memory of the host or its cgroup, or of
    90 % of what is free now below the share from which Ray's memory monitor ends all jobs."""
    use = memory_use()
    free = (use.killed_from or 1.0) * use.limit_bytes - use.used_bytes
    total = min(0.8 * use.limit_bytes, 0.9 * max(free, 0.1 * use.limit_bytes))
    return int(total) // max(1, cards) // 2**20 * 2**20


# ---------------------------------------------------------------- out-of-memory kills

_MACHINE = "proc/vmstat"  # a fallback only: it includes other containers' kills
#: Mount of each version, and the file with the count. A container sees its own group there.
_VERSION_1 = ("sys/fs/cgroup/memory", "memory.oom_control")
_VERSION_2 = ("sys/fs/cgroup", "memory.events")


def memory_kills(root: Path = Path("/")) -> int:
    """Count OOM kills in this process's cgroup, else on the machine; 0 where unknown."""
    return _count(_counter(root)) or 0


@cache
def _counter(root: Path) -> Path:
    """The file with the count; fixed while the process stays in its cgroup."""
    files = _candidates(root, text_of(root / "proc/self/cgroup"))
    return next((file for file in files if _count(file) is not None), root / _MACHINE)


def _candidates(root: Path, text: str) -> Iterator[Path]:
    """Possible count files of a cgroup: below the mount, or (in some containers) in it."""
    for number, controllers, group in re.findall(r"^(\d+):([^:]*):/*(.*)$", text, re.MULTILINE):
        if "memory" in controllers.split(",") or (number, controllers) == ("0", ""):
            mount, name = _VERSION_1 if controllers else _VERSION_2
            yield from (root / mount / group / name, root / mount / name)


def _count(file: Path) -> int | None:
    """The number after ``oom_kill``; None where there is none (before Linux 4.13)."""
    line = re.search(r"^oom_kill (\d+)$", text_of(file), re.MULTILINE)
    return int(line[1]) if line else None
