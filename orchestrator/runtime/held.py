"""Rows that a driver keeps while no room is left for results, and the commands behind them.

Nothing is started whose result could not be written. So from the first row that finds no room, rows
wait here and everything that starts something waits behind them, in order. What runs goes on; what
is stopped is stopped, and what has not been started for it never will be.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

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
from orchestrator.core.outcome import Failure, FailureClass, Outcome

#: The schedule's command and its row. The row is made once: when it is written again after a
#: failure, it must have the same bytes.
Row = tuple[RecordRow, Measurement]
#: Commands that wait while there is no room.
Delayed = StartWorker | StopWorker | RunAttempt | RunFinished

_NO_ROOM = "not started: no room was left for its results"


@dataclass(slots=True, kw_only=True)
class Held:
    """Rows and commands that wait for room, oldest first.

    Attributes:
        together: so many of the first rows were in the record that found no room. It may stand on
            the disk nevertheless: they are written as the same record again, which is not two.
    """

    since: float
    rows: deque[Row] = field(default_factory=deque)
    together: int = 1
    commands: deque[Delayed] = field(default_factory=deque)

    @property
    def finished(self) -> bool:
        """Return whether only rows are missing from the end of the run."""
        return any(isinstance(command, RunFinished) for command in self.commands)

    def add_row(self, command: RecordRow, measurement: Measurement) -> None:
        """A row waits. If it says how an attempt ended that waits to be started (its node went),
        that attempt is not started any more."""
        self.rows.append((command, measurement))
        for held in list(self.commands):
            if isinstance(held, RunAttempt) and held.attempt == command.attempt:
                self.commands.remove(held)

    def take(self, command: Delayed, at: float) -> tuple[list[Event], bool]:
        """Hold a command back, unless it stops a worker: the events that come of it, and whether
        it is to be carried out now."""
        if isinstance(command, StopWorker):
            return self.stop(command, at)
        self.commands.append(command)
        return [], False

    def stop(self, command: StopWorker, at: float) -> tuple[list[Event], bool]:
        """A worker is to be stopped: the events of what was to be started on it and is not, and
        whether there is a worker to stop."""
        happened: list[Event] = []
        exists = True
        for held in list(self.commands):
            if isinstance(held, RunAttempt) and command.worker_id in held.worker_ids:
                self.commands.remove(held)
                happened.append(_unstarted(held, at))
            elif isinstance(held, StartWorker) and held.worker_id == command.worker_id:
                self.commands.remove(held)
                exists = False
                happened.append(WorkerStopped(at=at, worker_id=held.worker_id))
        return happened, exists

    def give_up_starts(self, at: float) -> list[Event]:
        """The run is to end: the events of what was to be started and now is not."""
        happened: list[Event] = []
        for held in list(self.commands):
            if isinstance(held, RunAttempt):
                self.commands.remove(held)
                happened.append(_unstarted(held, at))
            elif isinstance(held, StartWorker):
                self.commands.remove(held)
                happened.append(WorkerStopped(at=at, worker_id=held.worker_id))
        return happened


def _unstarted(held: RunAttempt, at: float) -> AttemptEnded:
    failure = Failure(failure_class=FailureClass.NODE_LOST, message=_NO_ROOM)
    outcome = Outcome(
        attempt_id=held.attempt.attempt_id, state=State.LOST, ranks=(), failure=failure
    )
    return AttemptEnded(at=at, outcome=outcome)
