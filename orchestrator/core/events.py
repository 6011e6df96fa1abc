"""The words that the schedule, the driver, the executor and the simulator share.

Events are what happened, with the time it was seen; commands are what is to be done. ``Schedule``
turns the one into the other and touches nothing else (``scheduler/scheduler.py``).

The times of events and commands are seconds of a clock that only goes forward (``host.py``). What
people read and what rows hold is the time of day; ``ClockSet`` says how the two are related.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.core.job import Job, State
from orchestrator.core.outcome import Attempt, Failure, Outcome, WorkerInfo
from orchestrator.core.topology import Card, Node
from workloads.devices.monitor.host import CardTelemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, and when it was seen."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined(Event):
    """A node with free cards is there."""

    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft(Event):
    """A node is gone, with every worker on it."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CardsInUse(Event):
    """Nodes that are there and have no card for this run, since somebody else has them: all of
    them, none once they are ours or gone."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSilent(Event):
    """Nobody can say which nodes there are (``silent``), or somebody can again."""

    silent: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady(Event):
    """A worker has started and can take an attempt."""

    worker_id: str
    info: WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped(Event):
    """A worker's process is gone and its card free: asked for, failed to start, or died idle.

    ``failure`` is None when it was asked for. A worker that dies during an attempt gives
    ``AttemptEnded`` first, then this.
    """

    worker_id: str
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOverdue(Event):
    """A worker has done nothing new for longer than it may: it hangs, or does not come up."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(Event):
    """An attempt is over on all its ranks."""

    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time has passed; a timer asked for with ``Wake`` may be due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Event):
    """The user or the cluster asks for an orderly end: start nothing more."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSet(Event):
    """The time of day is ``ahead_s`` seconds more than the clock of the events: said first of all
    in a run, and again when the time of day was set, by ``by_s`` seconds."""

    ahead_s: float
    by_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start a process that owns ``card``. Gang workers know their rank from the start, since
    collective libraries read it when they are imported."""

    worker_id: str
    card: Card
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    gang: tuple[int, ...] = ()  # cards of its gang on this node, by local rank
    kind: str = ""  # of process: ``Job.process_kind`` of the first job it is to run
    passport: bool = False  # whether its first attempt begins with the card's passport


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorker:
    """Stop a worker; ``WorkerStopped`` says when its card is free."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAttempt:
    """Run an attempt on these ready workers, one per rank in rank order."""

    attempt: Attempt
    worker_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRow:
    """Write a row, durably and at once, but without letting a card wait for the disk.

    ``final`` marks the job's one terminal row; rows of attempts that will be retried, and of
    probes, are not final. ``attempt`` and ``outcome`` are None for a job that ends without
    running (UNSUPPORTED, PRUNED, NOT_STARTED).
    """

    job: Job
    state: State
    reason: str
    final: bool
    attempt: Attempt | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Send a ``Tick`` at this time (the clock of the events)."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """Every job is terminal and every worker stopped."""

    reason: str


Command = StartWorker | StopWorker | RunAttempt | RecordRow | Wake | RunFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Current activity of a busy worker, for the live view and the watchdog."""

    worker_id: str
    attempt_id: str
    phase: str


class Executor(Protocol):
    """Performs commands and reports events; decides nothing.

    ``perform`` returns at once; what it was asked for may wait until ``events`` is entered next.
    Whatever becomes of a command is an event: a worker that cannot start is ``WorkerStopped`` with
    a failure, an attempt whose process dies is ``AttemptEnded`` with state LOST or FAILED. The
    nodes there at the start are ``NodeJoined`` events.
    """

    def perform(self, command: StartWorker | StopWorker | RunAttempt) -> None:
        """Carry out one command without waiting for its end."""

    def events(self, timeout_s: float) -> list[Event]:
        """Events since the last call; waits up to ``timeout_s`` for one. With 0 it looks only: rows
        may not be written yet."""

    def progress(self) -> Mapping[str, Progress]:
        """The busy workers, by worker id, as last heard."""

    def telemetry(self) -> Mapping[Card, CardTelemetry]:
        """Latest readings of the cards from outside their workers; cards without any are not in
        it."""

    def durable(self, attempt_ids: Sequence[str]) -> None:
        """The rows of these attempts are synced: their outcomes need not be kept any longer."""

    def close(self) -> None:
        """Stop every worker and release every card."""
