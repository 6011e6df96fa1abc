"""Durable writing of rows, in batches, and delayed while the disk is full.

While rows do not fit on the disk, commands that start something wait behind them, in order: nothing
starts whose result could not be written. Attempts go on, and stops are carried out at once. The
agent of a row's node keeps the outcome until the row is safe (``durable``).
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TypeVar

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.errors import ControlStoreLost, StoreError, StoreFull, StoreLocked
from orchestrator.core.events import (
    AttemptEnded,
    Event,
    RecordRow,
    RunAttempt,
    RunFinished,
    StartWorker,
    StopWorker,
    WorkerStopped,
)
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.outcome import Failure, FailureClass, Outcome, RankOutcome
from orchestrator.core.plan import PastRow
from orchestrator.core.topology import Node
from orchestrator.driver.board import Board
from orchestrator.driver.supervisor import AT_ONCE, StopSignal
from orchestrator.store.files import requests_of, trace_of
from orchestrator.store.store import Store
from orchestrator.util import output
from orchestrator.util.redaction import redact
from orchestrator.watch.live import View, row_line, unrun_lines
from orchestrator.worker.environment import provenance

ROOM_INTERVAL_S = 5.0  # between looks for room on a full disk
PARQUET_INTERVAL_S = 10.0  # between two files for readers that know nothing of our log
MOST_TOGETHER = 1000  # rows of one batch

_LOG = logging.getLogger("nightgrid.store")
_NO_ROOM = "not started: no room was left for its results"

T = TypeVar("T")
#: The schedule's command and its row, which is made once: written again it is the same.
Row = tuple[RecordRow, Measurement]
#: Commands that wait while there is no room.
Delayed = StartWorker | StopWorker | RunAttempt | RunFinished


@dataclass(slots=True, kw_only=True)
class DelayedCommands:
    """Commands delayed by a full disk, oldest first."""

    since: float
    commands: deque[Delayed] = field(default_factory=deque)

    @property
    def finished(self) -> bool:
        """Return whether the run is over except for pending rows."""
        return any(isinstance(command, RunFinished) for command in self.commands)

    def forget_attempt(self, row: RecordRow) -> None:
        """Drop the delayed start of the row's attempt, which ended with its node."""
        for command in list(self.commands):
            if isinstance(command, RunAttempt) and command.attempt == row.attempt:
                self.commands.remove(command)

    def take(self, command: Delayed, at: float) -> tuple[list[Event], bool]:
        """Delay a command, but let stops cancel delayed starts; returns the events of cancelled
        starts, and whether to carry the command out now."""
        if not isinstance(command, StopWorker):
            self.commands.append(command)
            return [], False
        happened: list[Event] = []
        exists = True  # the worker
        for other in list(self.commands):
            if isinstance(other, RunAttempt) and command.worker_id in other.worker_ids:
                happened.append(self._drop(other, at))
            elif isinstance(other, StartWorker) and other.worker_id == command.worker_id:
                exists = False
                happened.append(self._drop(other, at))
        return happened, exists

    def give_up_starts(self, at: float) -> list[Event]:
        """Cancel all delayed starts, since the run is to end; returns their events."""
        starts = [c for c in self.commands if isinstance(c, RunAttempt | StartWorker)]
        return [self._drop(command, at) for command in starts]

    def _drop(self, command: RunAttempt | StartWorker, at: float) -> Event:
        self.commands.remove(command)
        if isinstance(command, StartWorker):
            return WorkerStopped(at=at, worker_id=command.worker_id)
        return not_started(command, Failure(FailureClass.NODE_LOST, _NO_ROOM), at)


def not_started(command: StartWorker | RunAttempt, failure: Failure, at: float) -> Event:
    """The event of a command that was not carried out, for this reason."""
    if isinstance(command, StartWorker):
        return WorkerStopped(at=at, worker_id=command.worker_id, failure=failure)
    attempt_id = command.attempt.attempt_id
    outcome = Outcome(attempt_id=attempt_id, state=State.LOST, ranks=(), failure=failure)
    return AttemptEnded(at=at, outcome=outcome)


def clean_row(row: Measurement) -> Measurement:
    """Redact this process's secrets in a row's texts, but not in its parameters, which are the
    grid's. Workers and agents redact with their own environments."""
    reason = redact(row.reason, os.environ)
    tail = None if row.failure_tail is None else redact(row.failure_tail, os.environ)
    details = {name: redact(text, os.environ) for name, text in row.details.items()}
    return replace(row, reason=reason, failure_tail=tail, details=details)


def row_maker(
    store: Store,
    invocation_id: str,
    history: Iterable[PastRow],
    nodes: Callable[[], Iterable[Node]],
    wall: Callable[[], float] = time.time,
) -> Callable[[RecordRow], Measurement]:
    """Maker of a driver's rows, each recorded later than the run's earlier ones (``history``): a
    job's newest row counts, and the time of day may have been set back since that was written."""
    newest = max((row.recorded_at for row in history), default=0.0)
    origin = provenance()

    def made(record: RecordRow) -> Measurement:
        nonlocal newest
        newest = max(wall(), newest + 2e-6)  # stored in microseconds
        row = measurement_of(
            record,
            run=store.run,
            invocation_id=invocation_id,
            recorded_at=newest,
            provenance=origin,
            nodes=nodes(),
        )
        return clean_row(row)

    return made


def journal_row(
    command: RunAttempt, at: float, to_measurement: Callable[[RecordRow], Measurement]
) -> Measurement:
    """Row of an attempt that began ``at`` (epoch seconds) if the driver dies: LOST, not final."""
    message = f"its driver, process {os.getpid()} on {socket.gethostname()}, died while it ran"
    failure = Failure(FailureClass.NODE_LOST, message)
    rank = RankOutcome(rank=0, state=State.LOST, started_at=at, ended_at=at, failure=failure)
    attempt = command.attempt
    outcome = Outcome.of_rank(attempt.attempt_id, rank)
    return to_measurement(
        RecordRow(
            job=attempt.job,
            state=State.LOST,
            reason=message,
            final=False,
            attempt=attempt,
            outcome=outcome,
        )
    )


@dataclass(slots=True)
class Patience:
    """Retries for transient failures of an executor or a disk."""

    view: View
    stop: StopSignal
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    limit_s: float = 120.0

    def act(self, what: str, attempt: Callable[[], T], last: type[Exception]) -> T:
        """Call ``attempt``, with retries; raises ``last`` if it fails for ``limit_s`` or the
        run is to end at once. StoreLocked, StoreFull and ControlStoreLost are never retried."""
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


def with_room(
    write: Callable[[], object],
    say: Callable[[str], None],
    give_up: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write what must be safe before a driver's loop, waiting for room; StoreFull if it is to
    ``give_up``."""
    paused = False
    while True:
        try:
            write()
        except StoreFull as full:
            if give_up():
                raise
            if not paused:
                say(f"PAUSED: {full}. Nothing is started until there is room")
            paused = True
            sleep(ROOM_INTERVAL_S)
        else:
            if paused:
                say("there is room again, going on")
            return


@dataclass(slots=True, kw_only=True)
class RowWriter:
    """Writes the rows of one run."""

    store: Store
    to_measurement: Callable[[RecordRow], Measurement]  # makes a row of the schedule's command
    board: Board
    view: View
    patience: Patience
    clock: Callable[[], float]
    wall: Callable[[], float]  # the time of day, for the journal
    durable: Callable[[Sequence[str]], object] = lambda _: None  # attempts whose rows are synced
    logged: Callable[[Measurement], object] = lambda _: None  # each synced row, for trackers
    delayed: DelayedCommands | None = None  # what waits while there is no room for rows
    _pending: deque[Row] = field(default_factory=deque)
    _look_at: float = 0.0  # for room
    _parquet_wanted: bool = False  # there are rows that are safe, and not in Parquet
    _parquet_at: float = 0.0  # when they may become so, at the earliest
    _parquet_troubles: set[str] = field(default_factory=set)  # said, since a file was made

    def take(self, command: RecordRow) -> None:
        """Queue a row to be written soon."""
        self._pending.append((command, self.to_measurement(command)))
        if self.delayed is not None:
            self.delayed.forget_attempt(command)

    @property
    def waiting(self) -> bool:
        """Return whether there are rows to be written."""
        return self.delayed is None and bool(self._pending)

    def begin(self, commands: Sequence[RunAttempt]) -> None:
        """Journal the start of attempts; a full disk delays them, other errors are ignored, since
        an entry is needed only if the driver dies."""
        if not commands:
            return
        now = self.wall()
        try:
            self.store.begin(*(journal_row(one, now, self.to_measurement) for one in commands))
        except StoreLocked:
            raise  # another driver has the run, and perhaps these cards
        except StoreFull as full:  # else a successor might give the same number to another attempt
            self._pause(full)
        except (OSError, StoreError):
            pass

    def write(self) -> None:
        """Write and sync the pending rows, unless there is no room, and a Parquet file if due."""
        while self.waiting:
            rows = list(islice(self._pending, MOST_TOGETHER))
            append = partial(self.store.append, *(measurement for _, measurement in rows))
            try:
                self.patience.act("the store", append, StoreError)
            except StoreFull as full:
                self._pause(full)
            else:
                self._recorded(rows)
        if self._parquet_wanted and self.clock() >= self._parquet_at:
            self._make_parquet()

    def _recorded(self, rows: Sequence[Row]) -> None:
        """Remove synced rows from the pending ones, and announce them."""
        now = self.clock()
        for _ in rows:
            self._pending.popleft()
        self._parquet_wanted = True
        self.durable([row.attempt_id for command, row in rows if command.attempt is not None])
        for command, measurement in rows:
            self._keep_files(command)
            self.board.did(command, now)
            self.board.measured(command, measurement, now)
            self.logged(measurement)
            if command.attempt is not None:
                self.view.line(row_line(command, measurement, self.board))
        for text in unrun_lines([row for row, _ in rows if row.attempt is None], self.board):
            self.view.line(text)  # of many at a time

    def _keep_files(self, command: RecordRow) -> None:
        """Write what an attempt made beside its row."""
        ranks = command.outcome.ranks if command.outcome is not None else ()
        for result in (rank.result for rank in ranks):
            if result is None or command.attempt is None:
                continue
            attempt_id = command.attempt.attempt_id
            files = {trace_of(attempt_id): result.trace, requests_of(attempt_id): result.requests}
            for name, content in files.items():
                try:
                    if content is not None:
                        self.store.write_file(name, content)
                except (OSError, StoreError) as error:
                    self.view.line(f"{name} is not kept: {error}")

    def _make_parquet(self) -> None:
        """Write a Parquet file; a failure is reported once and otherwise ignored."""
        self._parquet_wanted, self._parquet_at = False, self.clock() + PARQUET_INTERVAL_S
        try:
            self.store.to_parquet()
            self._parquet_troubles.clear()
        except StoreLocked:  # the run is another driver's, and so are its rows
            pass
        except Exception as error:
            self._parquet_wanted = True
            cause = error.__cause__ or error
            number = getattr(cause, "errno", None)  # names of files differ with each try
            key = f"{type(cause).__name__} {error if number is None else number}"
            if key not in self._parquet_troubles:
                self._parquet_troubles.add(key)
                _LOG.warning("rows are safe, but not in Parquet yet: %s", str(error) or repr(error))

    def _pause(self, full: StoreFull) -> None:
        self.delayed = DelayedCommands(since=self.clock())
        self._look_at = self.clock() + ROOM_INTERVAL_S
        self.board.paused = f"no room for results: {full}"
        self.view.line(
            f"PAUSED: {full}. Nothing new is started; what runs goes on, its rows are kept "
            f"until there is room"
        )

    def look_for_room(self) -> list[Delayed]:
        """Write the pending rows and, once all are synced, return the delayed commands; a finished
        run ends without its rows after a stop request or ``patience.limit_s``."""
        delayed, now = self.delayed, self.clock()
        if delayed is None or now < self._look_at:
            return []
        self._look_at = now + ROOM_INTERVAL_S
        count = len(self._pending)
        try:
            self.patience.act("the store", lambda: self._write_pending(delayed), StoreError)
        except StoreFull:
            hopeless = self.patience.stop.requests or now - delayed.since >= self.patience.limit_s
            if delayed.finished and hopeless:
                return [one for one in delayed.commands if isinstance(one, RunFinished)]
            return []
        self.delayed, self.board.paused = None, ""
        paused = f"there is room again after {now - delayed.since:,.0f} s"
        self.view.line(f"{paused}: {count} rows written, going on")
        return list(delayed.commands)

    def _write_pending(self, delayed: DelayedCommands) -> None:
        while self._pending:
            row = self._pending[0]
            self.store.append(row[1])
            self._recorded([row])
        if not delayed.finished:
            self.store.make_reserve()

    def save(self) -> None:
        """Write all rows, also as Parquet, at the end of the loop. Rows that cannot be written are
        printed; nothing is written if another driver took the run."""
        self.patience.limit_s = 0.0  # the end waits no longer
        why: Exception | None = None
        try:
            self.write()
            if self.delayed is not None:
                self._write_pending(self.delayed)
        except Exception as error:
            why = error
        for _, measurement in self._pending:
            output.say_aside(f"row without a place: {measurement!r}")
        if self._pending:
            count = len(self._pending)
            self.view.line(f"rows that are not written, {why}: {count}; they are printed above")
        if self._parquet_wanted:
            self._make_parquet()
