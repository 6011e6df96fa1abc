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
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Threads
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from orchestrator.core.errors import StoreError, StoreFull, StoreLocked
from orchestrator.core.events import RecordRow, RunAttempt, RunFinished
from orchestrator.core.measurement import Measurement
from orchestrator.driver.board import Board
from orchestrator.driver.stop_signal import Patience
from orchestrator.results.fragments import MOST_TOGETHER
from orchestrator.results.notes import Notes
from orchestrator.runtime.held import Delayed, Held, Row
from orchestrator.runtime.parquet_turns import ParquetTurns
from orchestrator.runtime.row_store import RowStore
from orchestrator.runtime.traces import keep_trace
from orchestrator.util import output
from orchestrator.watch.live import View, row_line, unrun_lines

ROOM_INTERVAL_S = 5.0  # between looks for room on a full disk
ROWS_WAIT_S = 0.1  # for others to be written with, at most
#: Modules that writing needs and that are not imported with this one.
_OF_WRITING = (
    "pyarrow.parquet",
    "pyarrow.compute",
    "orchestrator.results.record",
    "orchestrator.results.compaction",
)


def row_thread() -> Threads:
    """A thread for ``RowWriter``: one, so that a record is safe before the next is begun. It
    imports first what writing needs, while the cluster still starts: the first row would wait."""
    threads = ThreadPoolExecutor(1, thread_name_prefix="rows")
    for name in _OF_WRITING:
        threads.submit(importlib.import_module, name)
    threads.submit(_first_array)
    return threads


def _first_array() -> None:
    """Make an array of a list: with the first one, pyarrow imports pandas where there is one."""
    import pyarrow as pa

    pa.array([0])


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
    _parquet: ParquetTurns = field(init=False)

    def __post_init__(self) -> None:
        self._parquet = ParquetTurns(
            make=lambda: self.store.to_parquet(), clock=self.clock, thread=self.thread
        )

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
        return self._writing is not None or self._parquet.making

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
        notes = []
        for each in commands:
            nodes = self.board.nodes_of(each.attempt.cards)
            notes.append(self.notes.of(each.attempt, now, nodes))
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
            if self._parquet.ended():
                self._parquet.begin()
            return
        if not self._parquet.ended():
            return
        if self._writing is not None:
            if not self._writing.done():
                return
            self._finish_record()
        if self._parquet.begin():
            return
        if self._unwritten and self.held is None:
            rows = self._unwritten[:MOST_TOGETHER]
            measurements = [measurement for _, measurement in rows]
            self._writing = self.thread.submit(self.store.append, *measurements)
            self._in_it = len(rows)

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
        self._parquet.rows_came()
        keep_trace(self.store, command, self.view.line)
        self.board.did(command, now)
        self.board.measured(command, measurement, now)
        self.logged(measurement)
        if command.attempt is not None:  # the others are many at a time: see ``unrun_lines``
            self.view.line(row_line(command, measurement, self.board))

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
        self._parquet.make_last()

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
