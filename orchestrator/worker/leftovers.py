"""What a driver that died has left running, and how its successor ends it.

A driver marks its own environment before it starts anything, so every process that descends from
it carries the mark, whatever session or parent it has moved to: Ray's own processes on an emulated
cluster, agents and actors, workers, and what a workload has detached. Only one driver at a time
holds a run (``results/lock.py``), so whatever carries the run's mark with another invocation was
left behind. A process that has cleared its environment is beyond this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Holds an ``Owner`` as text.
VARIABLE = "NIGHTGRID_OWNER"
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """One driver's turn at a run."""

    run_id: str  # stays with the run's directory
    invocation_id: str

    def __str__(self) -> str:
        return f"{self.run_id}.{self.invocation_id}"

    @classmethod
    def of(cls, text: str) -> Owner | None:
        """The owner that a mark names; None if it names none."""
        run_id, dot, invocation_id = text.partition(".")
        return cls(run_id=run_id, invocation_id=invocation_id) if dot and run_id else None

    @classmethod
    def of_this_process(cls) -> Owner | None:
        """The driver on whose behalf this process runs."""
        return cls.of(os.environ.get(VARIABLE, ""))

    def precedes(self, other: Owner | None) -> bool:
        """Whether ``other`` is a later turn at the same run."""
        return other is not None and self.run_id == other.run_id and self != other

    @contextlib.contextmanager
    def marks_this_process(self) -> Iterator[None]:
        """Have every process that is started within the block carry the mark."""
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = str(self)
        try:
            yield
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A process that an earlier driver of the run has left behind on this host."""

    pid: int
    owner: Owner
    command: str


def leftovers(owner: Owner) -> list[Leftover]:
    """The processes of this host that belong to ``owner``'s predecessors; none where the kernel
    does not show other processes' environments."""
    found = []
    sign = f"{VARIABLE}={owner.run_id}.".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes()
            if sign not in variables:
                continue
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:  # it has ended, or is another user's
            continue
        for variable in variables.split(b"\0"):
            name, _, value = variable.decode(errors="replace").partition("=")
            theirs = Owner.of(value) if name == VARIABLE else None
            if theirs is not None and theirs.precedes(owner) and int(entry.name) not in _own():
                command = words.decode(errors="replace").strip()
                found.append(Leftover(pid=int(entry.name), owner=theirs, command=command))
    return found


def end_leftovers(owner: Owner, patience_s: float = _PATIENCE_S) -> list[Leftover]:
    """Kill what ``owner``'s predecessors left on this host; returns it when all of it is gone.

    Raises:
        TimeoutError: something does not go (it hangs in the kernel), so its card is not free.
    """
    ended: dict[int, Leftover] = {}
    deadline = time.monotonic() + patience_s
    while there := leftovers(owner):  # again: what dies may just have started another
        if time.monotonic() > deadline:
            stuck = ", ".join(f"{each.pid} ({each.command[:60]})" for each in there[:5])
            raise TimeoutError(f"processes of an earlier driver do not end: {stuck}")
        for each in there:
            ended[each.pid] = each
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        time.sleep(0.02)
    return list(ended.values())


def _own() -> set[int]:
    """This process and its parents, which are never left over."""
    own, pid = set(), os.getpid()
    while pid > 1 and pid not in own:
        own.add(pid)
        try:
            words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            break
        pid = int(words[1])
    return own
