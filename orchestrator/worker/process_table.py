"""This host's processes as the kernel shows them: who descends from whom, who logs where."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process that runs."""

    pid: int
    parent: int
    started_ticks: int  # since boot; with the number it names the process for good

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
        """Whether it has a file below ``directory`` open as a log is: to append, or only to write.
        An editor reads what it has open, and so does whoever looks at a log."""
        below = f"{directory}{os.sep}"
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    file = os.readlink(f"/proc/{self.pid}/fd/{number}")
                    if file.startswith(below) and _is_log(self.pid, number):
                        return True
        return False

    def is_own(self) -> bool:
        """Whether it is this user's."""
        try:
            return os.stat(f"/proc/{self.pid}").st_uid == os.geteuid()
        except OSError:
            return False

    def runs(self) -> bool:
        """Whether this very process still runs; it may have another parent now."""
        now = _read(self.pid)
        return now is not None and now.started_ticks == self.started_ticks

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


def processes() -> dict[int, Process]:
    """Every process of this host that runs; none where there is no ``/proc``."""
    numbers = (entry.name for entry in Path("/proc").glob("[0-9]*"))
    found = (_read(int(number)) for number in numbers)
    return {process.pid: process for process in found if process is not None}


def descendants(
    root: int, table: dict[int, Process], *, leave_out: Callable[[Process], bool]
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


def _read(pid: int) -> Process | None:
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(words) < 20 or words[0] in (b"Z", b"X"):
        return None
    return Process(pid=pid, parent=int(words[1]), started_ticks=int(words[19]))


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
