"""The loop: events go to the schedule, its commands to the executor and the store.

Nothing is decided here. What the loop adds is order and endurance: what happened at the same time
is decided together; cards get their next work first, then rows are written, those of a moment
together, before the loop waits for events or shows anything, and within ``ROWS_WAIT_S`` while
events keep coming; timers come due as ``Tick``; a signal becomes ``StopRequested``; and an executor
or a disk that fails for a moment does not end a night's run. While a disk is full, nothing new is
started and rows wait in memory (``held.py``), with copies on another disk where there is one.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from orchestrator.domain.attempt import Attempt, Outcome
from orchestrator.domain.events import (
    AttemptEnded,
    ClockSet,
    Command,
    Event,
    RecordRow,
    RunAttempt,
    RunFinished,
    StartWorker,
    StopRequested,
    StopWorker,
    Tick,
    Wake,
    WorkerStopped,
)
from orchestrator.domain.executor import Executor
from orchestrator.domain.failure import Failure, FailureClass
from orchestrator.domain.job import State
from orchestrator.domain.measurement import Measurement
from orchestrator.errors import (
    ClusterError,
    ControlStoreLost,
    StoreError,
    StoreFull,
    StoreLocked,
)
from orchestrator.host import output
from orchestrator.host.clock import STEP_S
from orchestrator.results.fragments import MOST_TOGETHER
from orchestrator.results.notes import Note, Notes
from orchestrator.runtime.held import Held, Row
from orchestrator.runtime.status import Board, RunStatus
from orchestrator.runtime.watchdog import Watchdog
from orchestrator.watching.live import View
from orchestrator.watching.live_text import event_line, row_line, unrun_lines

STATUS_INTERVAL_S = 1.0
ROOM_INTERVAL_S = 5.0  # between looks for room on a full disk
ROWS_WAIT_S = 0.1  # for others to be written with, at most
AT_ONCE = 3  # the request that is not discussed any more
FORCE_AFTER_S = 10.0  # later the process ends, whatever it hangs in
EXIT_FORCED = 130

_Command = StartWorker | StopWorker | RunAttempt | RunFinished


class Decider(Protocol):
    """``Schedule`` as the loop sees it."""

    def handle(self, event: Event) -> list[Command]:
        """What is to be done, now that this happened."""


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

    def make_reserve(self) -> object:
        """See that there is room for more than a row; raises StoreFull if not."""

    def spill(self, measurement: Measurement) -> object | None:
        """Write a row elsewhere on this host, and say where; None if it cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveResult:
    """How the loop ended. ``finished`` is false when it was cut short by a third signal."""

    finished: bool
    reason: str


class StopSignal:
    """Requests to end. The first lets what runs end and starts nothing more, the second stops
    what runs, both with a row for every job; the third leaves the loop as it is."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def request(self, reason: str) -> None:
        """Ask for an end; safe in a signal handler and from another thread."""
        self._reasons.append(reason)

    @property
    def requests(self) -> int:
        """How often an end was asked for."""
        return len(self._reasons)

    @property
    def reason(self) -> str:
        """Why, in the words of the last request."""
        return self._reasons[-1] if self._reasons else ""

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[StopSignal]:
        """Let SIGINT and SIGTERM request an end while the block runs (main thread only)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def handler(number: int, _frame: FrameType | None) -> None:
            self.request(f"{signal.Signals(number).name} received")
            if self.requests == AT_ONCE:
                # A call into a dead cluster can hang beyond the reach of any exception.
                force = threading.Timer(FORCE_AFTER_S, os._exit, [EXIT_FORCED])
                force.daemon = True
                force.start()

        before = {
            number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield self
        finally:
            for number, old in before.items():
                signal.signal(number, old)


@dataclass(slots=True, kw_only=True)
class Driver:
    """One run of the loop; see ``drive``."""

    schedule: Decider
    executor: Executor
    store: RowStore
    to_measurement: Callable[[RecordRow], Measurement]
    notes: Notes
    board: Board
    view: View
    write_status: Callable[[str], object] = lambda _: None  # replaces status.json
    publish: Callable[[RunStatus], object] = lambda _: None  # to whoever monitors the cluster
    trouble: Callable[[], str] = lambda: ""  # what is wrong with the cluster, while work goes on
    watchdog: Watchdog | None = None  # None: the executor cannot end what hangs
    stop: StopSignal = field(default_factory=StopSignal)
    clock: Callable[[], float] = time.monotonic  # of events and of every duration
    wall: Callable[[], float] = time.time  # the time of day, for people, notes and the deadline
    sleep: Callable[[float], None] = time.sleep
    poll_s: float = 0.5  # longest wait for an event, so that signals and timers are seen
    patience_s: float = 120.0  # with an executor or a disk that keeps failing
    _wakes: list[float] = field(default_factory=list)
    _stops_seen: int = 0
    _late: list[Event] = field(default_factory=list)  # what came up while showing
    _refused_stops: list[StopWorker] = field(default_factory=list)  # to be tried again
    _next_status_at: float = 0.0
    _ahead_s: float | None = None  # of the time of day, as the schedule was told
    _finished: RunFinished | None = None
    _unwritten: list[Row] = field(default_factory=list)
    _write_by: float = 0.0  # when the oldest of them must be written
    _held: Held | None = None  # while there is no room for results
    _look_for_room_at: float = 0.0

    def drive(self) -> DriveResult:
        """Run the plan to its end. The executor is left open; closing it is the caller's.

        Raises:
            ClusterError: the executor failed for longer than ``patience_s``; at once if the
                cluster's control store is lost, which does not come back to this process.
            StoreError: a row could not be written for longer than ``patience_s``, for another
                reason than a full disk; at once if another driver took the run.
        """
        try:
            return self._drive()
        finally:
            self._save_rows()

    def _drive(self) -> DriveResult:
        # The first tick gets the rows of jobs that will not run, cluster or no cluster.
        events: Sequence[Event] = [*self._clock_set(), Tick(at=self.clock())]
        while True:
            self._feed(events)
            if self._finished is not None:
                self._show(force=True)
                return DriveResult(finished=True, reason=self._finished.reason)
            self._show()
            if self.stop.requests >= AT_ONCE:
                return DriveResult(finished=False, reason=self.stop.reason)
            events = self._next_events()

    # ------------------------------------------------------------ events in

    def _next_events(self) -> list[Event]:
        events, self._late = self._late, []
        due = self.clock() >= self._write_by
        if self._unwritten and not due:
            events += self._look()
        if due or not events:
            self._write_rows()
        if not events:
            events += self._patiently("the executor", self._poll, ClusterError)
        if self._held is not None:
            self._look_for_room()
        events = [*self._clock_set(), *events]  # first: they may be too late by it
        now = self.clock()
        if self._wakes and self._wakes[0] <= now:
            while self._wakes and self._wakes[0] <= now:
                heapq.heappop(self._wakes)
            events.append(Tick(at=now))
        while self._stops_seen < self.stop.requests:
            self._stops_seen += 1
            events.append(StopRequested(at=now, reason=self.stop.reason))
            if self._held is not None:
                events += self._held.give_up_starts(now)
        return events

    def _clock_set(self) -> list[Event]:
        """What to tell the schedule of the time of day: how far ahead it is, and again if set."""
        now = self.clock()
        ahead_s, known = self.wall() - now, self._ahead_s
        if known is not None and abs(ahead_s - known) < STEP_S:
            return []
        self._ahead_s = ahead_s
        by_s = 0.0 if known is None else ahead_s - known
        return [ClockSet(at=now, ahead_s=ahead_s, by_s=by_s)]

    def _look(self) -> list[Event]:
        """What has happened already; an executor that fails has its say later (``_poll``)."""
        try:
            return self.executor.events(0.0)
        except Exception as error:
            self.view.line(f"the executor failed: {error!r}")
            return []

    def _poll(self) -> list[Event]:
        wait = self.poll_s
        if self._wakes:
            wait = min(wait, max(0.0, self._wakes[0] - self.clock()))
        refused, self._refused_stops = self._refused_stops, []
        for command in refused:
            self._perform(command)
        return self.executor.events(wait)

    def _feed(self, events: Sequence[Event]) -> None:
        """Give the schedule what happened and carry out what it answers, in its order, but for
        rows, which wait to be written.

        A command that cannot even be handed over is an event too, which comes next.
        """
        while events and self._finished is None:
            ended: set[str] = set()
            others: list[_Command] = []
            for event in events:
                self.board.saw(event)
                if text := event_line(event, self.board):
                    self.view.line(text)
                for command in self.schedule.handle(event):
                    if isinstance(command, RecordRow):
                        self._take(command)
                        if command.attempt is not None:
                            ended.add(command.attempt.attempt_id)
                    elif isinstance(command, Wake):
                        heapq.heappush(self._wakes, command.at)
                    else:
                        others.append(command)
            if self._held is not None:  # an attempt that waits and has ended must not be started
                self._write_rows()
            # Of an attempt that is left out, the node went at the moment when it was to start.
            events = self._carry_out(
                each
                for each in others
                if not (isinstance(each, RunAttempt) and each.attempt.attempt_id in ended)
            )

    # ------------------------------------------------------------ commands out

    def _carry_out(self, commands: Iterable[_Command]) -> list[Event]:
        commands, happened = list(commands), []
        if self._held is None:
            self._begin([each.attempt for each in commands if isinstance(each, RunAttempt)])
        for command in commands:
            happened += self._carry_out_one(command)
        return happened

    def _carry_out_one(self, command: _Command) -> list[Event]:
        if isinstance(command, RunFinished):
            self._write_rows()
        if self._held is not None:
            return self._hold(self._held, command)
        self.board.did(command, self.clock())
        if isinstance(command, RunFinished):
            self._finished = command
            return []
        if self.watchdog is not None:
            self.watchdog.did(command)
        return self._perform(command)

    def _perform(self, command: StartWorker | StopWorker | RunAttempt) -> list[Event]:
        try:
            self.executor.perform(command)
        except Exception as error:
            self.view.line(f"the executor refused {type(command).__name__}: {error!r}")
            if isinstance(command, StopWorker):  # its process lives on, and has its card
                self._refused_stops.append(command)
                return []
            return [_refusal(command, error, self.clock())]
        return []

    def _begin(self, attempts: Sequence[Attempt]) -> None:
        """Note that attempts start. Where the notes find no room, the attempts wait for it; one
        that cannot be made for another reason is missed only if we die."""
        if not attempts:
            return
        now = self.wall()
        notes = [self.notes.of(each, now, self.board.nodes_of(each.cards)) for each in attempts]
        try:
            self.store.begin(*notes)
        except StoreLocked:
            raise  # another driver has the run, and perhaps these cards
        except StoreFull as full:  # else a successor might give the same number to another attempt
            self._pause(full)
        except (OSError, StoreError):
            pass

    def _take(self, command: RecordRow) -> None:
        """Make a row that is written a moment later."""
        if not self._unwritten:
            self._write_by = self.clock() + ROWS_WAIT_S
        self._unwritten.append((command, self.to_measurement(command)))

    def _write_rows(self) -> None:
        """Make safe what waits to be written."""
        unrun = [row for row, _ in self._unwritten if row.attempt is None]
        while self._unwritten:
            rows = self._unwritten[:MOST_TOGETHER]
            if self._held is None:
                self._append(rows)
            del self._unwritten[: len(rows)]
            for command, measurement in rows:
                if self._held is None:
                    self._recorded(command, measurement)
                else:
                    self._held.add_row(command, measurement)
                    self.store.spill(measurement)  # safe from this process's death, if it can be
        for text in unrun_lines(unrun, self.board):
            self.view.line(text)

    def _append(self, rows: Sequence[Row]) -> None:
        """Write rows. From the first that find no room, ``_held`` is there for them."""
        measurements = [measurement for _, measurement in rows]
        try:
            self._patiently("the store", lambda: self.store.append(*measurements), StoreError)
        except StoreFull as full:
            self._pause(full)

    def _pause(self, full: StoreFull) -> None:
        self._held = Held(since=self.clock())
        self._look_for_room_at = self.clock() + ROOM_INTERVAL_S
        self.board.paused = f"no room for results: {full}"
        self.view.line(
            f"PAUSED: {full}. Nothing new is started; what runs goes on, its rows are kept "
            f"until there is room"
        )

    def _recorded(self, command: RecordRow, measurement: Measurement) -> None:
        """A row is safe."""
        now = self.clock()
        self.board.did(command, now)
        self.board.measured(command, measurement, now)
        if command.attempt is not None:  # the others are many at a time: see ``unrun_lines``
            self.view.line(row_line(command, measurement, self.board))

    # ------------------------------------------------------------ a full disk

    def _hold(self, held: Held, command: _Command) -> list[Event]:
        """What starts something waits for room; what stops something does not."""
        if not isinstance(command, StopWorker):
            held.commands.append(command)
            return []
        happened, exists = held.stop(command, self.clock())
        if exists:
            self.board.did(command, self.clock())
            happened += self._perform(command)
        return happened

    def _look_for_room(self) -> None:
        """Write the rows that wait; once all are, do what waits behind them."""
        held, now = self._held, self.clock()
        if held is None or now < self._look_for_room_at:
            return
        self._look_for_room_at = now + ROOM_INTERVAL_S
        count = len(held.rows)
        try:
            self._patiently("the store", lambda: self._make_room(held), StoreError)
        except StoreFull:
            if held.finished and (self.stop.requests or now - held.since >= self.patience_s):
                self._end_without_room(held)
            return
        self._held, self.board.paused = None, ""
        paused = now - held.since
        self.view.line(f"there is room again after {paused:,.0f} s: {count} rows written, going on")
        self._late += self._carry_out(held.commands)

    def _make_room(self, held: Held) -> None:
        self._write_held_rows(held)
        if not held.finished:
            self.store.make_reserve()

    def _write_held_rows(self, held: Held) -> None:
        while held.rows:
            command, measurement = held.rows[0]
            self.store.append(measurement)
            held.rows.popleft()
            self._recorded(command, measurement)

    def _end_without_room(self, held: Held) -> None:
        """All is done but the rows: they are as safe elsewhere as this process can make them."""
        (self._finished,) = [each for each in held.commands if isinstance(each, RunFinished)]
        self.board.did(self._finished, self.clock())

    def _save_rows(self) -> None:
        """The loop ends: write what is not written yet. What cannot be is put on another disk, or
        printed; a run that another driver has taken gets nothing more from this one."""
        if not self._unwritten and self._held is None:
            return
        self.patience_s = 0.0  # the store has had it, or somebody has none
        why: Exception | None = None
        try:
            self._write_rows()
            if self._held is not None:
                self._write_held_rows(self._held)
        except Exception as error:
            why = error
        left = [*(self._held.rows if self._held is not None else ()), *self._unwritten]
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
            where += "--resume` on this host brings them home"
        if left:
            self.view.line(f"rows that are not written, {why}: {len(left)}; {where}")

    def _patiently(self, what: str, act: Callable[[], list[Event] | object], last: type) -> list:
        """Do something that may fail for a moment; raise ``last`` when it keeps failing."""
        began, pause = self.clock(), 0.5
        while True:
            try:
                result = act()
                return result if isinstance(result, list) else []
            except (StoreLocked, StoreFull, ControlStoreLost):
                raise  # another driver took the run; or there is no room, and more to do than wait
            except Exception as error:
                if self.clock() - began >= self.patience_s or self.stop.requests >= AT_ONCE:
                    raise last(f"{what} keeps failing: {error}") from error
                self.view.line(f"{what} failed, trying again in {pause:g} s: {error!r}")
            self.sleep(pause)
            pause = min(2 * pause, 15.0)

    # ------------------------------------------------------------ showing

    def _show(self, *, force: bool = False) -> None:
        now = self.clock()
        if now < self._next_status_at and not force:
            return
        self._next_status_at = now + STATUS_INTERVAL_S
        self._write_rows()  # a terminal or a file system may take its time
        self._tell_trouble()
        progress, telemetry = {}, {}
        with contextlib.suppress(Exception):  # for the eyes only; events tell what matters
            progress = dict(self.executor.progress())
            telemetry = dict(self.executor.telemetry())
        status = self.board.status(now, progress, telemetry, at=self.wall())
        self.view.show(status)
        if self.watchdog is not None:
            for overdue in self.watchdog.overdue(status.cards, now):
                self.view.line(f"worker {overdue.worker_id} {overdue.reason}")
                self._late.append(overdue)
        with contextlib.suppress(OSError, StoreError):  # rows matter, this does not
            self.write_status(status.to_json())
        with contextlib.suppress(Exception):
            self.publish(status)

    def _tell_trouble(self) -> None:
        """Say when trouble with the cluster begins and ends; what runs goes on meanwhile."""
        before, self.board.trouble = self.board.trouble, self.trouble()
        if self.board.trouble and not before:
            self.view.line(f"TROUBLE: {self.board.trouble}; what runs goes on")
        elif before and not self.board.trouble:
            self.view.line(f"no more: {before}")


def _refusal(command: StartWorker | RunAttempt, error: Exception, at: float) -> Event:
    """The event that stands for a command which the executor did not take."""
    failure = Failure(
        failure_class=FailureClass.CRASH,
        message=f"the executor refused {type(command).__name__}: {error!r}",
    )
    if isinstance(command, RunAttempt):
        outcome = Outcome(
            attempt_id=command.attempt.attempt_id, state=State.LOST, ranks=(), failure=failure
        )
        return AttemptEnded(at=at, outcome=outcome)
    return WorkerStopped(at=at, worker_id=command.worker_id, failure=failure)
