"""A process of the process server with all that descends from it, and how trees of processes end.

Descendants that moved to sessions of their own are found too: the kernel gives orphans to the
nearest *subreaper*, which a worker is for what it starts, and the server for what a dead worker
leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from orchestrator.worker.process_table import Identity, descendants, processes

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_S = 5.0


@dataclass(slots=True)
class Child:
    """A worker process and the connection of its requester."""

    pid: int
    name: str
    asker: int  # the process that asked for it
    connection: socket.socket
    memory_kills_before: int
    asked: bool = False  # the asker ended it
    status: int | None = None  # exit code, or minus the signal, once it is reaped
    dead_since: float = 0.0  # monotonic
    tree: set[Identity] = field(default_factory=set)  # what descends from it, as far as known

    def kill(self) -> None:
        """Kill it and all that descends from it; what it starts at this very moment shows when it
        is dead."""
        beneath = descendants(self.pid, processes(ended=True))
        self.tree |= {process.identity for process in beneath}
        _kill_group(self.pid)
        for process in beneath:
            process.kill()

    def kill_what_is_left(self, others: Iterable[Child]) -> bool:
        """Kill what it has left, being dead; whether anything of it is still there.

        Whoever is this process's own child now, and none of ``others``, was left by one that died.
        """
        table = processes(ended=True)
        here = os.getpid()
        known = {other.pid: other for other in others}
        theirs = {each for other in known.values() for each in other.tree}
        beneath = descendants(here, table)
        for stray in beneath:
            if stray.parent != here or stray.pid in known or stray.pid == self.pid:
                continue
            if stray.identity not in theirs:
                self.tree |= {stray.identity}
                self.tree |= {each.identity for each in descendants(stray.pid, table)}
        left = [p for p in beneath if p.identity in self.tree and not p.ended]
        for process in left:
            process.kill()
        return _kill_group(self.pid) or bool(left)


def adopt_orphans() -> None:
    """Be given what descendants of this process leave."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(*, then: bool = True) -> None:
    """Have the kernel kill this process when the one that started it ends, or not any more."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if then else 0)


def end_all(but: Set[Identity] = frozenset()) -> None:
    """Kill everything beneath this process, for a few seconds at most: it ends itself."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        left = [
            process
            for process in descendants(os.getpid(), processes(ended=True))
            if process.identity not in but and not process.ended
        ]
        if not left:
            return
        for process in left:
            process.kill()
        time.sleep(0.02)


def _kill_group(pid: int) -> bool:
    """Kill a process group; whether anything of it is left."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _prctl(option: int, value: int) -> None:
    """Best effort: only Linux has it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
