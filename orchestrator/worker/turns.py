"""Turns of processes that compute on their host's processors.

Emulated cards, and CPU cards of one host, share its cores. Were their jobs to run at the same time,
each figure would tell of its neighbours. So a job takes its turn before it loads and keeps it to
its end: as many jobs at once as there are cores for their threads, over all processes, drivers and
users of the host. One core stays free for all else (Ray, the driver, workers that start), unless a
single job needs it: with every core taken, half of the rows waited for a processor for more than
5 % of their timed part. Loading is within the turn, since it would disturb others' timed parts.

A turn is a set of locked bytes of one file, a byte for each core. The kernel holds such locks for a
process and frees them when it dies, however it dies; its children do not inherit them. Whoever
waits has a byte of its own beyond those of the cores, at the time of its arrival, and takes a turn
only when no byte is locked before its own: first come, first served, so that nobody starves, a gang
that needs all cores neither. Who gives cores back wakes the first of the queue (``wake_up.py``),
which else looks by itself, as it must where a holder was killed. All cores of a turn are taken at
once or none (the *gate* is locked for that moment), so that two gangs never wait for each other. A
process that somebody has stopped (SIGSTOP) does not compute: it is passed over in the queue, and
its cores may be taken once more.

Short jobs of one card that are there one after the other share a turn (``KeptTurn``): to hand it on
takes longer than they do.

Turns are a courtesy, and what a process really got is measured beside its figure
(``host/processor_time.py``). So where there is no such file, and where nothing has moved for hours,
a job goes on without a turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from orchestrator.core.readings import Turn
from orchestrator.worker.wake_up import WakeUp, wake
from workloads.base import Collective
from workloads.devices import host_device
from workloads.process_stat import process_stat
from workloads.util import files

#: The file of the whole host; where another user keeps it closed, one of this user's own.
PATHS = (Path("/tmp/nightgrid-turns.lock"), Path(f"/tmp/nightgrid-turns-{os.geteuid()}.lock"))

#: Names another file, for processes that take turns among themselves alone.
VARIABLE = "NIGHTGRID_TURNS"

#: Without any change in the processes ahead for so long, a job goes on without a turn. It is longer
#: than a watchdog leaves a hung job in any phase.
PATIENCE_S = 4 * 3600.0
#: Between two looks of the first in the queue, and of others: each costs a tenth of a millisecond,
#: on processors that somebody measures on.
FIRST_LOOK_S, QUEUE_LOOK_S = 0.025, 0.2
#: A process keeps its turn over short jobs that follow each other at once, up to so long after it
#: began: to hand it on costs more than such a job.
KEPT_S = 0.05
ROUND_S = 2.0  # after which the ranks of a waiting gang show that they live

#: Places of bytes: a few for each core, of which one is locked unless its holder was stopped; the
#: gate; the queue.
_LANES = 4
_GATE = 1 << 20
_QUEUE, _QUEUE_END = 1 << 32, 1 << 62
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of fcntl(2) on 64-bit Linux


class Locks:
    """Locked bytes of one file, on behalf of this process. A process opens a file once, since
    closing any handle of it would free all of its locks."""

    _opened: ClassVar[dict[Path, Locks]] = {}

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle = path, handle

    @classmethod
    def of(cls, path: Path) -> Locks:
        """The locks of a file, which is made if need be, for all users.

        Raises:
            OSError: it cannot be opened for writing, or is no ordinary file.
        """
        known = cls._opened.get(path)
        if known is None or os.fstat(known._handle).st_nlink == 0:  # somebody tidied up
            try:
                handle = files.open_to_append(path, create=False)
            except FileNotFoundError:
                handle = files.open_to_append(path)
                os.fchmod(handle, 0o666)
            known = cls._opened[path] = cls(path, handle)
        return known

    @cached_property
    def identity(self) -> str:
        """The file among those of all hosts."""
        found = os.fstat(self._handle)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {found.st_dev} {found.st_ino}"

    def lock(self, at: int) -> bool:
        """Lock a byte if no other process has."""
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
        except (BlockingIOError, PermissionError):  # as fcntl(2) has it, either
            return False
        return True

    def unlock(self, *places: int) -> None:
        """Free bytes."""
        for at in places:
            fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, at)

    def holder(self, start: int, end: int) -> tuple[int, int] | None:
        """A byte in a range that another process has locked, and the process: 0 where it cannot be
        seen from here, in another container."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
        kind, _, at, _, pid = _FLOCK.unpack(fcntl.fcntl(self._handle, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else (max(at, start), pid)

    def first_holder(self, start: int, end: int) -> int | None:
        """The first byte in a range that another process has locked."""
        first = None
        while start < end and (found := self.holder(start, end)) is not None:
            first = end = found[0]
        return first

    def awake_holder(self, start: int, end: int) -> tuple[int, int] | None:
        """The same, of processes that nobody has stopped."""
        while start < end and (found := self.holder(start, end)) is not None:
            at, pid = found
            if not _is_stopped(pid):
                return found
            if (earlier := self.awake_holder(start, at)) is not None:
                return earlier
            start = at + 1
        return None


def _is_stopped(pid: int) -> bool:
    stat = process_stat(pid) if pid > 0 else None
    return stat is not None and stat.stopped


class Place:
    """A place in the queue, and the turn that comes of it, until ``leave``."""

    def __init__(
        self,
        locks: Locks,
        cores: Sequence[int],
        threads: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._locks, self._cores, self._clock = locks, cores, clock
        self._wanted = min(threads, len(cores))
        self._taken: tuple[int, ...] = ()
        self._ahead: object = None
        self._moved_at = clock()
        self._place = _QUEUE + time.monotonic_ns() // 1000
        while not locks.lock(self._place):  # of the same microsecond
            self._place += 1
        self._wake_up: WakeUp | None = None

    def wait(self, seconds: float) -> bool:
        """Wait so long for the turn; whether it is there, or nothing has moved for too long."""
        until = self._clock() + seconds
        while not self._take():
            now = self._clock()
            if now - self._moved_at > PATIENCE_S:
                return True
            if now >= until:
                return False
            if self._wake_up is None:  # then look again: until now nobody could wake us
                self._wake_up = WakeUp(self._name(self._place))
                continue
            first = isinstance(self._ahead, list)
            self._wake_up.wait(min(until - now, FIRST_LOOK_S if first else QUEUE_LOOK_S))
        return True

    def leave(self) -> None:
        """Give everything back."""
        if self._wake_up is not None:
            self._wake_up.close()
        self._locks.unlock(self._place, *self._taken)
        self._taken = ()
        self._wake_first()

    def _wake_first(self) -> None:
        if (first := self._locks.first_holder(_QUEUE, _QUEUE_END)) is not None:
            wake(self._name(first))

    def _name(self, place: int) -> str:
        return f"{self._locks.identity} {place}"

    def _take(self) -> bool:
        """Take all cores that are wanted, or none."""
        locks = self._locks
        ahead: object = locks.awake_holder(_QUEUE, self._place)
        if ahead is None:
            if not locks.lock(_GATE):
                return False
            try:
                busy = [locks.awake_holder(*_bytes_of(core)) for core in self._cores]
                free = [c for c, held in zip(self._cores, busy, strict=True) if held is None]
                needed = min(self._wanted + host_device().spare_cores, len(busy))
                if len(free) >= needed:
                    self._taken = tuple(filter(None, map(self._lane, free[: self._wanted])))
                    locks.unlock(self._place)
                else:
                    ahead = busy
            finally:
                locks.unlock(_GATE)
            if ahead is None:
                if len(free) > needed:  # there may be room for another, whom the gate lets in now
                    self._wake_first()
                return True
        if ahead != self._ahead:
            self._ahead, self._moved_at = ahead, self._clock()
        return False

    def _lane(self, core: int) -> int | None:
        """Lock a byte of a core; None where holders that were stopped have all of them."""
        return next((at for at in range(*_bytes_of(core)) if self._locks.lock(at)), None)


def _bytes_of(core: int) -> tuple[int, int]:
    return 1 + core * _LANES, 1 + (core + 1) * _LANES


class KeptTurn:
    """The turn of a process between two jobs of one card, the second of which is there already."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._place: Place | None = None
        self._threads = 0
        self._until = 0.0

    def begin(self, place: Place, threads: int) -> None:
        """A turn has come."""
        self._place, self._threads = place, threads
        self._until = self._clock() + KEPT_S

    def holds(self, threads: int) -> bool:
        """Return whether the next job may use this turn; one that it may not use ends."""
        if self._place is not None and threads == self._threads and self._clock() < self._until:
            return True
        self.end()
        return False

    def is_of(self, place: Place | None) -> bool:
        """Return whether this is the turn."""
        return place is not None and self._place is place

    def end_unless(self, another_waits: Callable[[], bool]) -> None:
        """A job is over: end its turn unless the next job is there and there is time left."""
        if self._clock() >= self._until or not another_waits():
            self.end()

    def end(self) -> None:
        """Give the cores back, if they are kept."""
        if self._place is not None:
            self._place.leave()
            self._place = None


def _nobody() -> bool:
    return False


class _Again:
    """A turn that a job has kept for this one: short jobs notice the cost of a generator."""

    __slots__ = ("_another_waits", "_kept", "_turn")

    def __init__(self, kept: KeptTurn, had: Turn, another_waits: Callable[[], bool]) -> None:
        self._kept, self._turn, self._another_waits = kept, had, another_waits

    def __enter__(self) -> Turn:
        return self._turn

    def __exit__(self, *_: object) -> None:
        self._kept.end_unless(self._another_waits)


def turn(
    collective: Collective,
    rank: int,
    threads: int,
    cores: Sequence[int],
    *,
    paths: Sequence[Path] = (),
    kept: KeptTurn | None = None,
    another_waits: Callable[[], bool] = _nobody,
) -> AbstractContextManager[Turn | None]:
    """Wait for the turn of a job and keep it within the block; None where there are no turns.

    A gang takes its turn as one: on each host its lowest rank takes the cores of all. A gang of
    several hosts takes them in the order of their files, as every other does. One that has more
    threads than its host has cores takes all of them.

    Args:
        collective: what the ranks do together; all of them call this.
        rank: this one.
        threads: of this rank.
        cores: of this host, those that this process may use (``usable_cores``).
        paths: the file to use, the first that can be opened; by default ``own_paths``.
        kept: of a job of one card: a turn that may last for several.
        another_waits: asked at the job's end, whether the next one is there.
    """
    if kept is not None and kept.holds(threads):
        had = Turn(waited_s=0.0, oversubscribed=threads > len(cores))
        return _Again(kept, had, another_waits)
    return _new_turn(collective, rank, threads, cores, paths, kept, another_waits)


@contextlib.contextmanager
def _new_turn(
    collective: Collective,
    rank: int,
    threads: int,
    cores: Sequence[int],
    paths: Sequence[Path],
    kept: KeptTurn | None,
    another_waits: Callable[[], bool],
) -> Iterator[Turn | None]:
    began = time.monotonic()
    locks = _locks(paths or own_paths())
    own = locks.identity if locks else ""
    ranks: list[tuple[str, int]] = collective.gather((own, threads))
    wanted = sum(count for file, count in ranks if file == own)
    leads = locks is not None and rank == [file for file, _ in ranks].index(own)
    place: Place | None = None
    try:
        for file in sorted({file for file, _ in ranks} - {""}):
            if leads and locks is not None and file == own:
                place = Place(locks, cores, wanted)
            waits = place if file == own else None
            while not any(collective.gather(waits.wait(ROUND_S) if waits else False)):
                pass
        if kept is not None and place is not None:
            kept.begin(place, threads)
        waited_s, oversubscribed = time.monotonic() - began, wanted > len(cores)
        yield Turn(waited_s=waited_s, oversubscribed=oversubscribed) if locks else None
    finally:
        if kept is not None and kept.is_of(place):
            kept.end_unless(another_waits)
        elif place is not None:
            place.leave()


def own_paths() -> tuple[Path, ...]:
    """The files of this process, the first one first: the host's, unless the environment names
    another."""
    named = os.environ.get(VARIABLE)
    return (Path(named),) if named else PATHS


def _locks(paths: Sequence[Path]) -> Locks | None:
    """The locks of the first file that can be opened, on Linux."""
    if sys.platform != "linux":
        return None
    for path in paths:
        with contextlib.suppress(OSError):
            locks = Locks.of(path)
            locks.holder(0, 1)  # some file systems have no locks
            return locks
    return None
