"""Writes rows durably: those of a moment together, again after a failure, later if a disk is full.

With a thread for it, rows are written beside the loop (``write_soon``), one record after the other:
half of a busy driver's time went into waiting for the disk. Until a record is written, its rows
count as unwritten. Every few seconds the rows that are safe become a Parquet file, which any reader
opens, in the same thread.

While no room is left, nothing new is started: rows wait here (``held.py``), each with a copy on
another disk where there is one, and with them the commands that would start something.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Threads
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeVar

from orchestrator.domain.events import (
    RecordRow,
    RunAttempt,
    RunFinished,
)
from orchestrator.domain.measurement import Measurement
from orchestrator.errors import ControlStoreLost, StoreError, StoreFull, StoreLocked
from orchestrator.host import output
from orchestrator.results import paths
from orchestrator.results.fragments import MOST_TOGETHER
from orchestrator.results.notes import Note, Notes
from orchestrator.runtime.board import Board
from orchestrator.runtime.held import Delayed, Held, Row
from orchestrator.runtime.stop_signal import AT_ONCE, StopSignal
from orchestrator.watching.live import View
from orchestrator.watching.live_text import row_line, unrun_lines

T = TypeVar("T")

_LOG = logging.getLogger("nightgrid.store")

ROOM_INTERVAL_S = 5.0  # between looks for room on a full disk
ROWS_WAIT_S = 0.1  # for others to be written with, at most
PARQUET_INTERVAL_S = 5.0  # between two files for readers that know nothing of our log


def row_thread() -> Threads:
    """A thread for ``RowWriter``: one, so that a record is safe before the next is begun. It
    imports first what writing needs, while the cluster still starts: the first row would wait."""
    threads = ThreadPoolExecutor(1, thread_name_prefix="rows")
    threads.submit(importlib.import_module, "pyarrow.parquet")
    return threads


class RowStore(Protocol):
    """``Store`` as the loop sees it."""

    def begin(self, *notes: Note) -> object:
        """Note that attempts start, so that they have rows should this process die.

        Raises:
            StoreLocked: another driver has taken the run.
        """

    def append(self, *measurements: Measurement) -> object:
        """Write rows, all or none; they are durable on return.

        Raises:
            StoreFull: no space is left.
            StoreLocked: another driver has taken the run.
        """

    def to_parquet(self) -> object:
        """Put the rows that were appended where any reader finds them.

        Raises:
            StoreError: it cannot be done now; they are as safe as before.
        """

    def make_reserve(self) -> object:
        """See that there is room for more than a row; raises StoreFull if not."""

    def write_file(self, name: str, content: bytes) -> object:
        """Write a file beside the rows.

        Raises:
            StoreError: it cannot be written.
        """

    def spill(self, measurement: Measurement) -> object | None:
        """Write a row elsewhere on this host, and say where; None if it cannot be."""


@dataclass(slots=True, kw_only=True)
class Patience:
    """Tries again what may fail for a moment, up to a limit."""

    view: View
    stop: StopSignal
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    limit_s: float = 120.0

    def act(self, what: str, attempt: Callable[[], T], last: type[Exception]) -> T:
        """Do something that may fail for a moment.

        Raises:
            last: it kept failing for ``limit_s``, or the run is to end at once.
            StoreLocked, StoreFull, ControlStoreLost: at once, since waiting does not help.
        """
        began, pause = self.clock(), 0.5
        while True:
            try:
                return attempt()
            except (StoreLocked, StoreFull, ControlStoreLost):
                raise  # another driver took the run; or there is no room, and more to do than wait
            except Exception as error:
                if self.clock() - began >= self.limit_s or self.stop.requests >= AT_ONCE:
                    raise last(f"{what} keeps failing: {error}") from error
                self.view.line(f"{what} failed, trying again in {pause:g} s: {error!r}")
            self.sleep(pause)
            pause = min(2 * pause, 15.0)


@dataclass(slots=True, kw_only=True)
class RowWriter:
    """The rows of one run on their way to the disk."""

    store: RowStore
    to_measurement: Callable[[RecordRow], Measurement]
    notes: Notes
    board: Board
    view: View
    patience: Patience
    clock: Callable[[], float]
    wall: Callable[[], float]  # the time of day, for notes
    logged: Callable[[Measurement], object] = lambda _: None  # to whoever follows experiments
    thread: Threads | None = None  # one that writes files beside the loop; None: the loop does
    held: Held | None = None  # while there is no room for results
    _unwritten: list[Row] = field(default_factory=list)
    _writing: Future[object] | None = None  # the record that the thread is writing, and
    _in_it: int = 0  # how many of the unwritten rows are in it, the first ones
    _tried: int = 0  # how many are in a record that failed, and may stand nevertheless
    _write_by: float = 0.0  # when the oldest of the others must be written
    _look_at: float = 0.0  # for room
    _only_logged: bool = False  # there are rows that are safe, and not in Parquet
    _parquet_at: float = 0.0  # when they may become so, at the earliest
    _to_parquet: Future[object] | None = None  # what the thread does to that end
    _no_parquet: str = ""  # why the last try failed, as it was said

    # ------------------------------------------------------------ rows in

    def take(self, command: RecordRow) -> None:
        """Make a row that is written a moment later."""
        if not self.waiting:
            self._write_by = self.clock() + ROWS_WAIT_S
        self._unwritten.append((command, self.to_measurement(command)))

    @property
    def waiting(self) -> bool:
        """Return whether there are rows to write, beside those that are being written."""
        return len(self._unwritten) > self._in_it

    @property
    def writing(self) -> bool:
        """Return whether the thread is at work beside the loop."""
        return self._writing is not None or self._to_parquet is not None

    @property
    def due(self) -> bool:
        """Return whether the oldest row has waited long enough for company."""
        return self.clock() >= self._write_by

    def begin(self, commands: Sequence[RunAttempt]) -> None:
        """Note that attempts start. Where the notes find no room, the attempts wait for it; one
        that cannot be made for another reason is missed only if we die."""
        if not commands:
            return
        now = self.wall()
        notes = [
            self.notes.of(
                each.attempt,
                now,
                self.board.nodes_of(each.attempt.cards),
                ahead=each.after != "",
            )
            for each in commands
        ]
        try:
            self.store.begin(*notes)
        except StoreLocked:
            raise  # another driver has the run, and perhaps these cards
        except StoreFull as full:  # else a successor might give the same number to another attempt
            self._pause(full)
        except (OSError, StoreError):
            pass

    # ------------------------------------------------------------ rows out

    def write(self) -> None:
        """Make safe what waits to be written, and what is being written."""
        unrun = [row for row, _ in self._unwritten if row.attempt is None]
        while self._unwritten:
            self._write_next()
        self._tell_unrun(unrun)

    def write_soon(self) -> None:
        """Begin to write what waits, when what is being written is safe; without a thread, or while
        rows are held, do all of it now. Now and then, make Parquet of what is safe."""
        if self.thread is None or self.held is not None:
            self.write()
            if self._parquet_is_due():
                self._end_of_parquet()
                self._make_parquet()
            return
        if self._to_parquet is not None:
            if not self._to_parquet.done():
                return
            self._end_of_parquet()
        if self._writing is not None:
            if not self._writing.done():
                return
            self._finish_record()
        if self._parquet_is_due():
            self._to_parquet = self.thread.submit(self._make_parquet)
        elif self._unwritten and self.held is None:
            rows = self._unwritten[:MOST_TOGETHER]
            measurements = [measurement for _, measurement in rows]
            self._writing = self.thread.submit(self.store.append, *measurements)
            self._in_it = len(rows)

    def _parquet_is_due(self) -> bool:
        """Return whether there are rows for a Parquet file, and it is time for one; then it is not
        for a while."""
        now = self.clock()
        if not self._only_logged or now < self._parquet_at:
            return False
        self._only_logged, self._parquet_at = False, now + PARQUET_INTERVAL_S
        return True

    def _make_parquet(self) -> None:
        try:
            self.store.to_parquet()
            self._no_parquet = ""
        except Exception as error:  # a convenience; whoever appends hears of a full disk
            self._only_logged = True
            if not isinstance(error, OSError | StoreError) and self._no_parquet != repr(error):
                self._no_parquet = repr(error)
                _LOG.warning("rows are safe, but not in Parquet yet: %s", self._no_parquet)

    def _end_of_parquet(self) -> None:
        """Wait for the thread to have made its file."""
        making, self._to_parquet = self._to_parquet, None
        if making is not None:
            making.result()

    def _finish_record(self) -> None:
        """Make the rows safe that are being written."""
        unrun = [row for row, _ in self._unwritten[: self._in_it] if row.attempt is None]
        self._write_next()
        self._tell_unrun(unrun)

    def _write_next(self) -> None:
        """Make the next rows safe: those that are being written, if any are."""
        rows, safe = self._unwritten[: self._in_it or self._tried or MOST_TOGETHER], False
        self._tried = len(rows)  # with others it would be another record, and these rows two
        if self._writing is not None or self.held is None:
            safe = self._append([measurement for _, measurement in rows])
        del self._unwritten[: len(rows)]
        self._tried = 0
        for command, measurement in rows:
            if safe:
                self._recorded(command, measurement)
            elif self.held is not None:
                self.held.add_row(command, measurement)
                self.store.spill(measurement)  # safe from this process's death, if it can be

    def _append(self, measurements: Sequence[Measurement]) -> bool:
        """Write rows, or wait until the thread has; return whether they are safe. From the first
        that find no room, ``held`` is there for them."""

        def attempt() -> None:
            begun, self._writing, self._in_it = self._writing, None, 0
            if begun is not None:
                begun.result()
            else:
                self.store.append(*measurements)

        try:
            self.patience.act("the store", attempt, StoreError)
        except StoreFull as full:
            held = self.held or self._pause(full)
            if not held.rows:
                held.together = len(measurements)
            return False
        return True

    def _tell_unrun(self, rows: Sequence[RecordRow]) -> None:
        for text in unrun_lines(rows, self.board):
            self.view.line(text)

    def _recorded(self, command: RecordRow, measurement: Measurement) -> None:
        """A row is safe."""
        now = self.clock()
        self._only_logged = True
        self._keep_trace(command)
        self.board.did(command, now)
        self.board.measured(command, measurement, now)
        self.logged(measurement)
        if command.attempt is not None:  # the others are many at a time: see ``unrun_lines``
            self.view.line(row_line(command, measurement, self.board))

    def _keep_trace(self, command: RecordRow) -> None:
        """Write the trace of a profile beside the rows; a row is worth more than its trace."""
        ranks = command.outcome.ranks if command.outcome is not None else ()
        for result in (rank.result for rank in ranks):
            if result is not None and result.trace is not None and command.attempt is not None:
                name = paths.trace_of(command.attempt.attempt_id)
                try:
                    self.store.write_file(name, result.trace)
                except (OSError, StoreError) as error:
                    self.view.line(f"{name} is not kept: {error}")

    # ------------------------------------------------------------ a full disk

    def _pause(self, full: StoreFull) -> Held:
        held = self.held = Held(since=self.clock())
        self._look_at = self.clock() + ROOM_INTERVAL_S
        self.board.paused = f"no room for results: {full}"
        self.view.line(
            f"PAUSED: {full}. Nothing new is started; what runs goes on, its rows are kept "
            f"until there is room"
        )
        return held

    def look_for_room(self) -> list[Delayed]:
        """Write the rows that wait; once all are, return the commands that waited behind them.

        All that is left of a run whose end waits, too, is to end without its rows: when somebody
        asked for the end, or room does not come for ``patience.limit_s``.
        """
        if self._writing is not None:
            self._finish_record()
        held, now = self.held, self.clock()
        if held is None or now < self._look_at:
            return []
        self._look_at = now + ROOM_INTERVAL_S
        count = len(held.rows)
        try:
            self.patience.act("the store", lambda: self._make_room(held), StoreError)
        except StoreFull:
            hopeless = self.patience.stop.requests or now - held.since >= self.patience.limit_s
            if held.finished and hopeless:
                return [each for each in held.commands if isinstance(each, RunFinished)]
            return []
        self.held, self.board.paused = None, ""
        paused = now - held.since
        self.view.line(f"there is room again after {paused:,.0f} s: {count} rows written, going on")
        return list(held.commands)

    def _make_room(self, held: Held) -> None:
        self._write_held(held)
        if not held.finished:
            self.store.make_reserve()

    def _write_held(self, held: Held) -> None:
        while held.rows:
            rows = list(islice(held.rows, held.together))
            self.store.append(*(measurement for _, measurement in rows))
            held.together = 1
            for command, measurement in rows:
                held.rows.popleft()
                self._recorded(command, measurement)

    # ------------------------------------------------------------ the end

    def save(self) -> None:
        """The loop ends: write what is not written yet, and have all of it in Parquet. What cannot
        be is put on another disk, or printed; a run that another driver has taken gets nothing more
        from this one."""
        self._save()
        self._end_of_parquet()
        if self._only_logged:
            self._make_parquet()

    def _save(self) -> None:
        if not self._unwritten and self.held is None:
            return
        self.patience.limit_s = 0.0  # the store has had it, or somebody has none
        why: Exception | None = None
        try:
            self.write()
            if self.held is not None:
                self._write_held(self.held)
        except Exception as error:
            why = error
        left = [*(self.held.rows if self.held is not None else ()), *self._unwritten]
        places: set[str] = set()
        for _, measurement in left:
            place = None
            if not isinstance(why, StoreLocked):
                with contextlib.suppress(Exception):
                    place = self.store.spill(measurement)
            if isinstance(place, os.PathLike):
                places.add(os.path.dirname(place))
            else:
                output.say_aside(f"row without a place: {measurement!r}")
        where = "they are printed above"
        if places:
            where = f"kept in {', '.join(sorted(places))}, from where the next `nightgrid run "
            where += "--resume` on this host moves them back"
        if left:
            self.view.line(f"rows that are not written, {why}: {len(left)}; {where}")
