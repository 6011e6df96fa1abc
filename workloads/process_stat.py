"""A process as ``/proc/PID/stat`` has it: the one reader of that file."""

from __future__ import annotations

from typing import NamedTuple

#: The kernel's flag of a process that is ending (PF_EXITING).
_EXITING = 0x4


class ProcessStat(NamedTuple):
    """One process at one moment. Its number comes back one day, with another start."""

    pid: int
    parent: int
    started_ticks: int  # since boot, as the kernel counts
    ended: bool  # a zombie, which waits for its parent to look
    stopped: bool  # by a signal or a debugger, until another lets it go on
    ending: bool  # on its way out, which may last where a driver has to let go of memory


def process_stat(pid: int) -> ProcessStat | None:
    """The process of this number; None if there is none, or no ``/proc``."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name comes second, in brackets, and may hold anything, brackets included.
            words = file.read().rpartition(b")")[2].split()
        state = words[0]
        return ProcessStat(
            pid=pid,
            parent=int(words[1]),
            started_ticks=int(words[19]),
            ended=state in (b"Z", b"X"),
            stopped=state in (b"T", b"t"),
            ending=bool(int(words[6]) & _EXITING),
        )
    except (OSError, IndexError, ValueError):
        return None


def started_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if it has ended."""
    stat = process_stat(pid)
    return None if stat is None or stat.ended else stat.started_ticks
