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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

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


class InProcessExecutor:
    """An ``Executor`` with one background thread that carries out commands in order; ``preload``
    modules are imported first, so they do not count against a card's memory limit."""

    def __init__(self, nodes: Sequence[Node], *, preload: Sequence[str] = ()) -> None:
        self._nodes = {node.node_id: node for node in nodes}
        self._workers: dict[str, CardWorker] = {}
        self._busy: set[str] = set()  # worker ids
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tasks: list[Callable[[], None]] = []  # queued
        at = time.monotonic()
        self._events: deque[Event] = deque(NodeJoined(at=at, node=node) for node in nodes)
        self._changed = threading.Condition()  # guards everything above
        work_off = partial(self._work_off, tuple(preload))
        self._thread = threading.Thread(target=work_off, name="cards", daemon=True)
        self._thread.start()

    def perform(self, command: StartWorker | StopWorker | RunAttempt) -> None:
        """Queue one command."""
        with self._changed:
            if isinstance(command, StartWorker):
                self._start(command)
            elif isinstance(command, RunAttempt):
                self._busy.update(command.worker_ids)
                self._tasks.append(lambda: self._do_run(command))
            else:
                self._tasks.append(lambda: self._do_stop(command.worker_id))

    def events(self, timeout_s: float) -> list[Event]:
        """Events since the last call, waiting up to ``timeout_s`` for one. Jobs begin only in a
        call that may wait: all rows are written by then, and a job can kill this process."""
        with self._changed:
            if timeout_s > 0:
                for task in self._tasks:
                    self._work.put(task)
                self._tasks.clear()
            if not self._events:
                self._changed.wait(timeout_s)
            happened = list(self._events)
            self._events.clear()
        return happened

    def progress(self) -> Mapping[str, Progress]:
        """The busy worker, if any."""
        with self._changed:
            workers = [self._workers[busy] for busy in self._busy if busy in self._workers]
        heard = [worker.progress() for worker in workers]
        return {progress.worker_id: progress for progress in heard if progress is not None}

    def telemetry(self) -> Mapping[Card, CardTelemetry]:
        """Return nothing: emulated cards have no sensors."""
        return {}

    def durable(self, attempt_ids: Sequence[str]) -> None:
        """Do nothing: outcomes are kept in this process alone."""

    def close(self) -> None:
        """Drop queued commands and all workers; a running attempt ends with the program."""
        with self._changed:
            self._tasks.clear()
            while not self._work.empty():
                self._work.get_nowait()
            self._work.put(None)
        self._thread.join(_CLOSE_PATIENCE_S)

    def _start(self, command: StartWorker) -> None:
        node = self._nodes[command.card.node_id]
        worker = CardWorker(
            WorkerConfig(
                worker_id=command.worker_id,
                card=command.card,
                node_name=node.name,
                emulated=node.emulated,
                memory_bytes=node.memory_bytes_per_card,
                threads=1,
                passport=command.passport,
            )
        )
        self._workers[command.worker_id] = worker
        self._tasks.append(lambda: self._do_start(command.worker_id, worker))

    # ------------------------------------------------------------ on the thread

    def _work_off(self, preload: Sequence[str]) -> None:
        for name in preload:
            with contextlib.suppress(Exception):  # one that is broken is the first job's to report
                importlib.import_module(name)
        while (task := self._work.get()) is not None:
            task()

    def _do_start(self, worker_id: str, worker: CardWorker) -> None:
        try:
            info = worker.start()
        except Exception as error:
            with self._changed:
                del self._workers[worker_id]
                failure = worker.failure(error)
                at = time.monotonic()
                self._report(WorkerStopped(at=at, worker_id=worker_id, failure=failure))
            return
        with self._changed:
            self._report(WorkerReady(at=time.monotonic(), worker_id=worker_id, info=info))

    def _do_run(self, command: RunAttempt) -> None:
        (worker_id,) = command.worker_ids
        rank = self._workers[worker_id].run(command.attempt)
        outcome = Outcome(
            attempt_id=command.attempt.attempt_id,
            state=rank.state,
            ranks=(rank,),
            failure=rank.failure,
        )
        with self._changed:
            self._busy.discard(worker_id)
            self._report(AttemptEnded(at=time.monotonic(), outcome=outcome))

    def _do_stop(self, worker_id: str) -> None:
        with self._changed:
            if worker_id in self._workers:  # else it never came up, and that was said
                del self._workers[worker_id]
                self._report(WorkerStopped(at=time.monotonic(), worker_id=worker_id))

    def _report(self, event: Event) -> None:
        self._events.append(event)
        self._changed.notify_all()
