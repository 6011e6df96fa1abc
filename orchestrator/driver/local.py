"""Workers in this very process, one at a time: for tests, documentation and debuggers.

Breakpoints in workloads work, but nothing is isolated: a job that hangs or kills its process does
so to the run. There are no gangs, since its nodes have one card. The protocol is the real one.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence

from orchestrator.core.events import (
    AttemptEnded,
    Event,
    NodeJoined,
    Progress,
    RunAttempt,
    StartWorker,
    StopWorker,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.core.outcome import Outcome
from orchestrator.core.topology import Card, Node
from orchestrator.worker.protocol import WorkerConfig
from orchestrator.worker.worker import CardWorker
from workloads.devices.monitor.host import CardTelemetry

_CLOSE_PATIENCE_S = 5.0

Command = StartWorker | StopWorker | RunAttempt


class InProcessExecutor:
    """An ``Executor`` with one background thread that carries out commands in order; ``preload``
    modules are imported first, so they do not count against a card's memory limit."""

    def __init__(self, nodes: Sequence[Node], *, preload: Sequence[str] = ()) -> None:
        self._nodes = {node.node_id: node for node in nodes}
        self._workers: dict[str, CardWorker] = {}
        self._commands: list[Command] = []  # that have not begun
        self._work: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        for node in nodes:
            self._events.put(NodeJoined(at=time.monotonic(), node=node))
        self._thread = threading.Thread(
            target=self._work_off, args=(tuple(preload),), name="cards", daemon=True
        )
        self._thread.start()

    def perform(self, command: Command) -> None:
        """Queue one command."""
        self._commands.append(command)

    def events(self, timeout_s: float) -> list[Event]:
        """Events since the last call, waiting up to ``timeout_s`` for one. Jobs begin only in a
        call that may wait: all rows are written by then, and a job can kill this process."""
        if timeout_s > 0:
            for command in self._commands:
                self._work.put(command)
            self._commands.clear()
        happened: list[Event] = []
        with contextlib.suppress(queue.Empty):
            happened.append(self._events.get(timeout_s > 0, timeout_s))
            while True:
                happened.append(self._events.get_nowait())
        return happened

    def progress(self) -> Mapping[str, Progress]:
        """The busy worker, if any."""
        heard = [worker.progress() for worker in list(self._workers.values())]
        return {progress.worker_id: progress for progress in heard if progress is not None}

    def telemetry(self) -> Mapping[Card, CardTelemetry]:
        """Return nothing: emulated cards have no sensors."""
        return {}

    def durable(self, attempt_ids: Sequence[str]) -> None:
        """Do nothing: outcomes are kept in this process alone."""

    def close(self) -> None:
        """Drop queued commands and all workers; a running attempt ends with the program."""
        self._commands.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._work.get_nowait()
        self._work.put(None)
        self._thread.join(_CLOSE_PATIENCE_S)

    # ------------------------------------------------------------ on the thread

    def _work_off(self, preload: Sequence[str]) -> None:
        for name in preload:
            with contextlib.suppress(Exception):  # one that is broken is the first job's to report
                importlib.import_module(name)
        while (command := self._work.get()) is not None:
            if isinstance(command, StartWorker):
                self._events.put(self._start(command))
            elif isinstance(command, RunAttempt):
                (worker_id,) = command.worker_ids
                rank = self._workers[worker_id].run(command.attempt)
                outcome = Outcome.of_rank(command.attempt.attempt_id, rank)
                self._events.put(AttemptEnded(at=time.monotonic(), outcome=outcome))
            elif self._workers.pop(command.worker_id, None):  # else it never came up
                stopped = WorkerStopped(at=time.monotonic(), worker_id=command.worker_id)
                self._events.put(stopped)

    def _start(self, command: StartWorker) -> Event:
        node, worker_id = self._nodes[command.card.node_id], command.worker_id
        worker = CardWorker(
            WorkerConfig(
                worker_id=worker_id,
                card=command.card,
                node_name=node.name,
                emulated=node.emulated,
                memory_bytes=node.memory_bytes_per_card,
                threads=1,
                check_card=command.check_card,
            )
        )
        try:
            info = worker.start()
        except Exception as error:
            failure = worker.failure(error)
            return WorkerStopped(at=time.monotonic(), worker_id=worker_id, failure=failure)
        self._workers[worker_id] = worker
        return WorkerReady(at=time.monotonic(), worker_id=worker_id, info=info)
