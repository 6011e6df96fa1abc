"""The edge that owns processes on cards, as the driver sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from orchestrator.domain.events import Event, RunAttempt, StartWorker, StopWorker
from orchestrator.domain.topology import Card
from workloads.devices.monitoring.telemetry import CardTelemetry


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

    def close(self) -> None:
        """Stop every worker and release every card."""
