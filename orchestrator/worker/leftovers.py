"""Processes that a killed driver has left running, and their end.

A driver's processes are recognised in three ways, since each alone misses some:

- by a mark in their environment: a driver marks its own before it starts anything, so all that
  descends from it carries the mark, whatever session or parent it has moved to. A process that
  changes its title may overwrite it (Ray's agents do);
- by their logs: whoever writes a log in the private directory of a driver that has ended
  (``private_directory.py``) belongs to it. Reading there proves nothing;
- by descent from one of those, unless the child carries the mark of another driver.

Only one driver at a time holds a run (``results/lock.py``), so whatever carries the run's mark with
another invocation was left behind. A process that has cleared its environment, lost its parent and
logs elsewhere is beyond this.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.worker.private_directory import abandoned_private_directories
from orchestrator.worker.process_table import (
    Process,
    descendants,
    processes,
    this_process_and_parents,
)
from workloads.owned_directory import OwnedDirectory

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
        """Return whether ``other`` is a later turn at the same run."""
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
    """A process that an earlier driver has left behind on this host."""

    process: Process
    owner: Owner | None  # None: the driver had no run (a directory's may have none)
    command: str

    @property
    def pid(self) -> int:
        return self.process.pid


def leftovers(owner: Owner) -> list[Leftover]:
    """The processes of this host that belong to ``owner``'s predecessors; none where the kernel
    does not show other processes."""
    table = processes()
    found: dict[int, Owner | None] = {}
    for pid, process in table.items():
        theirs = Owner.of(process.variable(VARIABLE) or "")
        if theirs is not None and theirs.precedes(owner):
            found[pid] = theirs
    for directory in abandoned_private_directories():
        theirs = Owner.of(directory.owner)
        if theirs is not None and theirs.precedes(owner):
            for process in _users(directory.path, table):
                found.setdefault(process.pid, theirs)
    return _with_descendants(found, table)


def users_of(directory: OwnedDirectory) -> list[Leftover]:
    """The processes that write logs in a driver's private directory, and their descendants."""
    table = processes()
    theirs = Owner.of(directory.owner)
    return _with_descendants({p.pid: theirs for p in _users(directory.path, table)}, table)


def end_leftovers(owner: Owner) -> list[Leftover]:
    """Kill what ``owner``'s predecessors left on this host; returns it when all of it is gone.

    Raises:
        TimeoutError: something does not go (it hangs in the kernel), so its card is not free.
    """
    return _end(lambda: leftovers(owner))


def end_users_of(directory: OwnedDirectory) -> list[Leftover]:
    """Kill the processes of a private directory; returns them when they are gone.

    Raises:
        TimeoutError: something does not go.
    """
    return _end(lambda: users_of(directory))


def remove_abandoned() -> None:
    """End what uses the private directories of drivers that were killed, and remove them."""
    for directory in abandoned_private_directories():
        with contextlib.suppress(TimeoutError):  # then it stays, for the next who comes
            end_users_of(directory)
            directory.remove()


def _end(find: Callable[[], list[Leftover]]) -> list[Leftover]:
    ended: dict[int, Leftover] = {}
    deadline = time.monotonic() + _PATIENCE_S
    while there := find():  # again: what dies may just have started another
        if time.monotonic() > deadline:
            stuck = ", ".join(f"{each.pid} ({each.command[:60]})" for each in there[:5])
            raise TimeoutError(f"processes of an earlier driver do not end: {stuck}")
        for each in there:
            ended[each.pid] = each
            each.process.kill()
        time.sleep(0.02)
    return list(ended.values())


def _users(directory: Path, table: dict[int, Process]) -> list[Process]:
    place = directory.resolve()  # as the kernel names its files
    return [each for each in table.values() if each.is_own() and each.writes_in(place)]


def _with_descendants(found: dict[int, Owner | None], table: dict[int, Process]) -> list[Leftover]:
    """Add what descends from the processes found. This process and those that it descends from are
    left out, and children with the mark of a driver that is none of the found; so is what descends
    from those."""
    own = this_process_and_parents(table)
    known = set(found.values())

    def is_somebody_elses(process: Process) -> bool:
        mark = process.variable(VARIABLE)
        return process.pid in own or (mark is not None and Owner.of(mark) not in known)

    everyone = dict(found)
    for root, theirs in found.items():
        if root not in own:
            for child in descendants(root, table, leave_out=is_somebody_elses):
                everyone.setdefault(child.pid, theirs)
    return [
        Leftover(process=table[pid], owner=theirs, command=table[pid].command)
        for pid, theirs in everyone.items()
        if pid not in own
    ]
