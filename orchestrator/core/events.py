"""Events and commands that the schedule, the driver, the executor and the simulator share.

``Schedule`` turns events (what happened, and when it was seen) into commands, and does nothing
else (``scheduler/scheduler.py``). Their times are seconds of a monotonic clock (``host.py``); rows
hold the time of day, and ``ClockSet`` relates the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.core.job import Accelerator, Job, State
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
class MoreCards(Event):
    """Kinds of card of which more may come: others use some now, or the cluster does not say which
    nodes it has."""

    kinds: frozenset[Accelerator]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady(Event):
    """A worker has started and can take an attempt."""

    worker_id: str
    info: WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped(Event):
    """A worker's process is gone and its card free; ``failure`` is None if it was stopped. If it
    dies during an attempt, ``AttemptEnded`` comes first."""

    worker_id: str
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOverdue(Event):
    """A worker made no progress within its limit: it hangs, or does not come up."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerQueued(Event):
    """A worker's attempt still waits for a CPU slot, although the run is stopping."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(Event):
    """An attempt is over on all its ranks."""

    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time has passed; a timer set with ``Wake`` may be due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Event):
    """Request of the user or the cluster to end in order: start nothing more."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSet(Event):
    """Time of day minus the clock of events, ``ahead_s``: first event of a run, and again when
    the time of day was set by ``by_s`` seconds."""

    ahead_s: float
    by_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start a process that owns ``card``; collective libraries read its rank at import."""

    worker_id: str
    card: Card
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    gang: tuple[int, ...] = ()  # cards of its gang on this node, by local rank
    kind: str = ""  # of process: ``Job.process_kind`` of the first job it is to run
    check_card: bool = False  # whether its first attempt begins with a check of the card


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
    """Write a row durably, without letting a card wait for the disk.

    ``final`` marks the job's one terminal row; rows of probes and of attempts to be retried are
    not final. ``attempt`` and ``outcome`` are None for a job that never ran. A row of a repeat
    (``scheduler/repeats.py``) is final only if it replaces the one before it.
    """

    job: Job
    state: State
    reason: str
    final: bool
    attempt: Attempt | None = None
    outcome: Outcome | None = None
    repeat: int = 0  # number of this further measurement of its job; 0: the first


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

    Every consequence of a command is an event: a worker that cannot start is ``WorkerStopped`` with
    a failure, an attempt whose process dies is ``AttemptEnded`` with state LOST or FAILED. Nodes
    present at the start are ``NodeJoined`` events.
    """

    def perform(self, command: StartWorker | StopWorker | RunAttempt) -> None:
        """Start one command and return; it may begin only at the next call of ``events``."""

    def events(self, timeout_s: float) -> list[Event]:
        """Events since the last call, waiting up to ``timeout_s`` for one; with 0 it only looks and
        starts nothing, since rows may not be written yet."""

    def progress(self) -> Mapping[str, Progress]:
        """Last report of each busy worker, by worker id."""

    def telemetry(self) -> Mapping[Card, CardTelemetry]:
        """Latest readings of the cards, taken outside their workers; cards may be missing."""

    def durable(self, attempt_ids: Sequence[str]) -> None:
        """Drop the stored outcomes of these attempts: their rows are synced."""

    def close(self) -> None:
        """Stop every worker and release every card."""
