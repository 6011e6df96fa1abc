"""This host's processes as the kernel shows them: who descends from whom, who logs where."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from workloads.process_stat import process_stat, started_ticks

#: A process id comes back one day, with another start.
Identity = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of this host."""

    pid: int
    parent: int
    started_ticks: int  # since boot
    ended: bool = False  # a zombie, which waits for its parent to look
    stopped: bool = False  # by a signal or a debugger

    @property
    def identity(self) -> Identity:
        """Permanent identity of the process."""
        return self.pid, self.started_ticks

    @property
    def command(self) -> str:
        """Its command line, for people."""
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ")
            return words.decode(errors="replace").strip()
        return ""

    def variable(self, name: str) -> str | None:
        """A variable of the environment it was started with; None if it has none, has overwritten
        it, or is another user's."""
        with contextlib.suppress(OSError):
            for variable in Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0"):
                found, equals, value = variable.decode(errors="replace").partition("=")
                if equals and found == name:
                    return value
        return None

    def writes_in(self, directory: Path) -> bool:
        """Return whether it has a file below ``directory`` open as a log is: to append, or only to
        write. An editor opens files to read, and so does whoever looks at a log."""
        below = f"{directory}{os.sep}"
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    file = os.readlink(f"/proc/{self.pid}/fd/{number}")
                    if file.startswith(below) and _is_log(self.pid, number):
                        return True
        return False

    def is_own(self) -> bool:
        """Return whether the process belongs to this user."""
        try:
            return os.stat(f"/proc/{self.pid}").st_uid == os.geteuid()
        except OSError:
            return False

    def runs(self) -> bool:
        """Return whether this very process still runs; it may have another parent now."""
        return started_ticks(self.pid) == self.started_ticks

    def kill(self) -> None:
        """Kill this process, and no other that has its number meanwhile."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            handle = _pidfd(self.pid)
            try:
                if not self.runs():
                    return
                if handle is None:
                    os.kill(self.pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                if handle is not None:
                    os.close(handle)


def processes(*, ended: bool = False) -> dict[int, Process]:
    """Every process of this host that runs, and those that have ``ended`` if asked for; none where
    there is no ``/proc``."""
    table: dict[int, Process] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            stat = process_stat(int(name)) if name.isdecimal() else None
            if stat is not None and (ended or not stat.ended):
                table[stat.pid] = Process(
                    pid=stat.pid,
                    parent=stat.parent,
                    started_ticks=stat.started_ticks,
                    ended=stat.ended,
                )
    return table


def descendants(
    root: int,
    table: Mapping[int, Process],
    *,
    leave_out: Callable[[Process], bool] = lambda _: False,
) -> list[Process]:
    """The children of ``root``, theirs, and so on; nothing that is left out, nor its children."""
    children: dict[int, list[Process]] = defaultdict(list)
    for process in table.values():
        children[process.parent].append(process)
    found: dict[int, Process] = {}
    waiting = [root]
    while waiting:
        for child in children[waiting.pop()]:
            if child.pid not in found and not leave_out(child):
                found[child.pid] = child
                waiting.append(child.pid)
    return list(found.values())


def this_process_and_parents(table: dict[int, Process]) -> set[int]:
    """This process and those it descends from, which are never left over."""
    own, pid = set(), os.getpid()
    while pid > 0 and pid not in own:
        own.add(pid)
        process = table.get(pid)
        pid = process.parent if process is not None else 0
    return own


def _pidfd(pid: int) -> int | None:
    """A handle that stays with the process; None where the kernel has none (before Linux 5.3)."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None


def _is_log(pid: int, number: str) -> bool:
    for line in Path(f"/proc/{pid}/fdinfo/{number}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            flags = int(value, 8)
            return bool(flags & os.O_APPEND) or flags & os.O_ACCMODE == os.O_WRONLY
    return False
