"""The loop: events go to the schedule, its commands to the executor and the store.

The loop decides nothing. Simultaneous events are handled together; cards get their next work first,
then rows are written, before the loop waits or shows anything. Transient failures of executor or
disk are retried. While a disk is full, nothing new starts and rows wait in memory (``rows.py``).
"""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from orchestrator.core.card_check import FIGURES, CardCheck, slow_cards
from orchestrator.core.errors import ClusterError, StoreError
from orchestrator.core.events import (
    ClockSet,
    Event,
    Executor,
    RecordRow,
    RunAttempt,
    RunFinished,
    StartWorker,
    StopRequested,
    StopWorker,
    Tick,
    Wake,
    WorkerQueued,
)
from orchestrator.core.measurement import Measurement
from orchestrator.core.outcome import Failure, FailureClass
from orchestrator.core.status import RunStatus
from orchestrator.driver.board import Board
from orchestrator.driver.rows import Delayed, Patience, RowWriter, not_started
from orchestrator.driver.supervisor import AT_ONCE, StopSignal
from orchestrator.scheduler.scheduler import Schedule
from orchestrator.store import files as run_files
from orchestrator.store.history import earlier_card_checks, read_card_checks, table_of
from orchestrator.store.store import Store
from orchestrator.util.host import STEP_S
from orchestrator.watch.live import View, event_line


class CardChecks:
    """Collects and writes the card checks of a run, those of its earlier drivers included."""

    def __init__(self, store: Store, wall: Callable[[], float]) -> None:
        self._store, self._wall = store, wall
        self._now = list(read_card_checks(store.path))
        self._before = earlier_card_checks(store.path)
        #: Sentences about the slow cards, the slowest first.
        self.slow: tuple[str, ...] = ()

    def saw(self, record: RecordRow) -> tuple[str, ...]:
        """Collect the checks of an ended attempt; returns newly slow cards."""
        checks = list(self._checks(record))
        if not checks:
            return ()
        self._now += checks
        # Checks are optional: on a full disk they are written with the next one.
        with contextlib.suppress(OSError, StoreError):
            self._store.write_file(run_files.CARD_CHECKS, table_of(CardCheck, self._now))
        known, self.slow = self.slow, tuple(map(str, slow_cards(self._now, self._before)))
        return tuple(slow for slow in self.slow if slow not in known)

    def _checks(self, record: RecordRow) -> Iterator[CardCheck]:
        if record.attempt is None or record.outcome is None:
            return
        for rank in record.outcome.ranks:
            if not rank.card_check or rank.worker is None:
                continue
            card = record.attempt.cards[rank.rank]
            threads = rank.card_check.get("threads")
            yield CardCheck(
                run=self._store.run,
                taken_at=self._wall(),
                node=rank.worker.node_name,
                card_index=card.index,
                accelerator=str(card.accelerator),
                device_name=rank.worker.device_name,
                emulated=rank.worker.emulated,
                threads=None if threads is None else int(threads),
                **{name: rank.card_check.get(name) for name in FIGURES},
            )


STATUS_INTERVAL_S = 1.0
WAITING_INTERVAL_S = 60.0  # between two lines that say whom the run waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveResult:
    """End of the loop. ``finished`` is false when a third signal cut it short."""

    finished: bool
    reason: str


@dataclass(slots=True, kw_only=True)
class Driver:
    """One run of the loop; see ``drive``."""

    schedule: Schedule
    executor: Executor
    store: Store
    to_measurement: Callable[[RecordRow], Measurement]
    board: Board
    view: View
    write_status: Callable[[str], object] = lambda _: None  # replaces status.json
    publish: Callable[[RunStatus], object] = lambda _: None  # to the cluster's monitoring
    logged: Callable[[Measurement], object] = lambda _: None  # each row, when it is safe
    trouble: Callable[[], str] = lambda: ""  # what is wrong with the cluster, while work goes on
    waiting: Callable[[], str] = lambda: ""  # whose cards the run waits for, while it has none
    asked_to_stop: Callable[[], tuple[int, str]] = lambda: (0, "")  # how often, and by whom
    card_checks: CardChecks | None = None  # None: cards are not checked in this run
    stop: StopSignal = field(default_factory=StopSignal)
    clock: Callable[[], float] = time.monotonic  # of events and of every duration
    wall: Callable[[], float] = time.time  # the time of day, for people, notes and the deadline
    sleep: Callable[[float], None] = time.sleep
    poll_s: float = 0.5  # longest wait for an event, so that signals and timers are seen
    patience_s: float = 120.0  # with an executor or a disk that keeps failing
    _wakes: list[float] = field(default_factory=list)
    _stops_seen: int = 0
    _asked: int = 0  # of the requests of ``asked_to_stop``, those that were passed on
    _late: list[Event] = field(default_factory=list)  # what came up while showing
    _refused_stops: list[StopWorker] = field(default_factory=list)  # to be tried again
    _next_status_at: float = 0.0
    _next_waiting_at: float = 0.0
    _ahead_s: float | None = None  # of the last ``ClockSet``
    _finished: RunFinished | None = None
    _rows: RowWriter = field(init=False)
    _patience: Patience = field(init=False)

    def __post_init__(self) -> None:
        self._patience = Patience(self.view, self.stop, self.clock, self.sleep, self.patience_s)
        self._rows = RowWriter(
            store=self.store,
            to_measurement=self.to_measurement,
            board=self.board,
            view=self.view,
            patience=self._patience,
            clock=self.clock,
            wall=self.wall,
            durable=self.executor.durable,
            logged=self.logged,
        )

    def drive(self) -> DriveResult:
        """Run the plan to its end; the caller closes the executor.

        Raises ClusterError if the executor failed for ``patience_s``, or the control store is lost;
        StoreError if a row failed for ``patience_s`` without a full disk, or the run was taken.
        """
        try:
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
        finally:
            self._rows.save()

    def _next_events(self) -> list[Event]:
        events, self._late = self._late, []
        if self._rows.waiting:  # cards get their next work before the disk is awaited
            try:
                events += self.executor.events(0.0)
            except Exception as error:
                self.view.line(f"the executor failed: {error!r}")
        self._rows.write()
        if not events:
            events += self._patience.act("the executor", self._poll, ClusterError)
        if self._rows.delayed is not None:
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
            if self._rows.delayed is not None:
                events += self._rows.delayed.give_up_starts(now)
        return events

    def _clock_set(self) -> list[Event]:
        """A ``ClockSet`` event at first, and again if the time of day was set."""
        now = self.clock()
        ahead_s, known = self.wall() - now, self._ahead_s
        if known is not None and abs(ahead_s - known) < STEP_S:
            return []
        self._ahead_s = ahead_s
        by_s = 0.0 if known is None else ahead_s - known
        return [ClockSet(at=now, ahead_s=ahead_s, by_s=by_s)]

    def _poll(self) -> list[Event]:
        wait = self.poll_s
        if self._wakes:
            wait = min(wait, max(0.0, self._wakes[0] - self.clock()))
        refused, self._refused_stops = self._refused_stops, []
        for command in refused:
            self._perform(command)
        return self.executor.events(wait)

    def _feed(self, events: Sequence[Event]) -> None:
        """Pass events to the schedule and carry out its commands in order; rows are queued, and
        a command that the executor refuses becomes the next event."""
        while events and self._finished is None:
            ended: set[str] = set()
            others: list[Delayed] = []
            for event in events:
                self.board.saw(event)
                if text := event_line(event, self.board):
                    self.view.line(text)
                for command in self.schedule.handle(event):
                    if isinstance(command, RecordRow):
                        self._rows.take(command)
                        for slow in self.card_checks.saw(command) if self.card_checks else ():
                            self.view.line(f"SLOW card {slow}")
                        if command.attempt is not None:
                            ended.add(command.attempt.attempt_id)
                    elif isinstance(command, Wake):
                        heapq.heappush(self._wakes, command.at)
                    else:
                        others.append(command)
            if self.card_checks is not None:
                self.board.slow_cards = self.card_checks.slow
            # Skip attempts whose node was lost in this batch; they already have a row.
            lost = [
                c for c in others if isinstance(c, RunAttempt) and c.attempt.attempt_id in ended
            ]
            events = self._carry_out([command for command in others if command not in lost])

    def _carry_out(self, commands: Sequence[Delayed]) -> list[Event]:
        """Carry commands out and return immediate events; a full disk delays starts."""
        if self._rows.delayed is None:
            self._rows.begin([one for one in commands if isinstance(one, RunAttempt)])
        happened: list[Event] = []
        for command in commands:
            if isinstance(command, RunFinished):
                self._rows.write()
            if self._rows.delayed is not None:
                events, at_once = self._rows.delayed.take(command, self.clock())
                happened += events
                if not at_once:
                    continue
            self.board.did(command, self.clock())
            if isinstance(command, RunFinished):
                self._finished = command
            else:
                happened += self._perform(command)
        return happened

    def _perform(self, command: StartWorker | StopWorker | RunAttempt) -> list[Event]:
        try:
            self.executor.perform(command)
        except Exception as error:
            self.view.line(f"the executor refused {type(command).__name__}: {error!r}")
            happened = refusal(command, error, self.clock())
            if isinstance(command, StopWorker) and not happened:
                self._refused_stops.append(command)
            return happened
        return []

    def _look_for_room(self) -> None:
        """Carry out delayed commands once there is room, or the end of the run without it."""
        commands = self._rows.look_for_room()
        if self._rows.delayed is None:
            self._late += self._carry_out(commands)
            return
        for command in commands:
            if isinstance(command, RunFinished):  # its rows stay pending
                self._finished = command
                self.board.did(command, self.clock())

    def _show(self, *, force: bool = False) -> None:
        now = self.clock()
        if now < self._next_status_at and not force:
            return
        self._next_status_at = now + STATUS_INTERVAL_S
        self._rows.write()  # a terminal or a file system may take its time
        self._tell_trouble(now)
        count, by = self.asked_to_stop()
        while self._asked < count:
            self._asked += 1
            if self.stop.requests < count:  # a third would end the loop as it is
                self.stop.request(f"asked to stop by {by}")
        progress, telemetry = {}, {}
        with contextlib.suppress(Exception):  # for the eyes only; events tell what matters
            progress = dict(self.executor.progress())
            telemetry = dict(self.executor.telemetry())
        status = self.board.status(now, progress, telemetry, at=self.wall())
        self.view.show(status)
        if status.stopping:
            queued = [card.worker_id for card in status.cards if card.phase == "queued"]
            self._late += [WorkerQueued(at=now, worker_id=worker_id) for worker_id in queued]
        for overdue in self.board.overdue(now):
            self.view.line(f"worker {overdue.worker_id} {overdue.reason}")
            self._late.append(overdue)
        with contextlib.suppress(OSError, StoreError):  # rows matter, this does not
            self.write_status(status.to_json())
        with contextlib.suppress(Exception):
            self.publish(status)

    def _tell_trouble(self, now: float) -> None:
        """Print what is wrong, and whom the run waits for, on each change and every minute."""
        before, self.board.trouble = self.board.trouble, self.trouble()
        if self.board.trouble and not before:
            self.view.line(f"TROUBLE: {self.board.trouble}; what runs goes on")
        elif before and not self.board.trouble:
            self.view.line(f"no more: {before}")
        before, self.board.waiting = self.board.waiting, self.waiting()
        if self.board.waiting and (self.board.waiting != before or now >= self._next_waiting_at):
            self._next_waiting_at = now + WAITING_INTERVAL_S
            self.view.line(f"WAITING: {self.board.waiting}")


def refusal(
    command: StartWorker | StopWorker | RunAttempt, error: Exception, at: float
) -> list[Event]:
    """Event for a command that the executor refused; none for a stop, which is to be repeated
    since the process still has its card."""
    if isinstance(command, StopWorker):
        return []
    why = f"the executor refused {type(command).__name__}: {error!r}"
    return [not_started(command, Failure(FailureClass.CRASH, why), at)]
