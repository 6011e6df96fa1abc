"""Workers in this very process, one at a time: for tests, documentation and debuggers.

Breakpoints in workloads work, but nothing is isolated: a job that hangs or kills its process does
so to the run. There are no gangs. The protocol is the real one, and commands that no schedule
should give raise ``ProtocolViolation``.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

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
_NO_GANGS = "a gang is several processes; this executor has one"


class ProtocolViolation(Exception):
    """A command that a correct schedule never gives."""


def _must(holds: bool, violation: str) -> None:
    if not holds:
        raise ProtocolViolation(violation)


class InProcessExecutor:
    """An ``Executor`` with one background thread that carries out commands in order; ``preload``
    modules are imported first, so they do not count against a card's memory limit."""

    def __init__(self, nodes: Sequence[Node], *, preload: Sequence[str] = ()) -> None:
        self._nodes = {node.node_id: node for node in nodes}
        self._workers: dict[str, CardWorker] = {}
        self._cards: dict[Card, str] = {}  # held by which worker
        self._ready: set[str] = set()
        self._busy: dict[str, str] = {}  # worker id -> attempt id
        self._stopping: set[str] = set()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tasks: list[Callable[[], None]] = []  # queued
        at = time.monotonic()
        self._events: deque[Event] = deque(NodeJoined(at=at, node=node) for node in nodes)
        self._changed = threading.Condition()  # guards everything above
        arguments = (tuple(preload),)
        self._thread = threading.Thread(
            target=self._work_off, args=arguments, name="cards", daemon=True
        )
        self._thread.start()

    def perform(self, command: StartWorker | StopWorker | RunAttempt) -> None:
        """Queue one command; raises ProtocolViolation if it contradicts earlier ones."""
        with self._changed:
            if isinstance(command, StartWorker):
                self._start(command)
            elif isinstance(command, RunAttempt):
                self._run(command)
            else:
                self._stop(command)

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

    # ``_start``, ``_run``, ``_stop``: lock held. ``_work_off`` and ``_do_*`` run on the thread.

    def _start(self, command: StartWorker) -> None:
        node, holder = self._nodes.get(command.card.node_id), self._cards.get(command.card)
        if node is None or command.card not in node.cards:
            raise ProtocolViolation(f"there is no card {command.card}")
        _must(command.worker_id not in self._workers, f"{command.worker_id} was started before")
        _must(holder is None, f"{command.card} is held by {holder}")
        _must(command.world_size == 1, _NO_GANGS)
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
        self._cards[command.card] = command.worker_id
        self._tasks.append(lambda: self._do_start(command.worker_id, worker))

    def _run(self, command: RunAttempt) -> None:
        _must(len(command.worker_ids) == 1, _NO_GANGS)
        (worker_id,) = command.worker_ids
        busy = self._busy.get(worker_id)
        _must(worker_id in self._ready, f"worker {worker_id} is not ready")
        _must(busy is None, f"worker {worker_id} runs {busy}")
        card = next(card for card, holder in self._cards.items() if holder == worker_id)
        own = command.attempt.cards == (card,)
        _must(own, f"worker {worker_id} holds {card}, not the attempt's cards")
        self._busy[worker_id] = command.attempt.attempt_id
        self._tasks.append(lambda: self._do_run(command))

    def _stop(self, command: StopWorker) -> None:
        worker_id = command.worker_id
        _must(worker_id in self._workers, f"there is no worker {worker_id}")
        _must(worker_id not in self._stopping, f"worker {worker_id} was stopped before")
        self._stopping.add(worker_id)
        self._ready.discard(worker_id)
        self._tasks.append(lambda: self._do_stop(worker_id))

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
                self._forget(worker_id)
                failure = worker.failure(error)
                at = time.monotonic()
                self._report(WorkerStopped(at=at, worker_id=worker_id, failure=failure))
            return
        with self._changed:
            if worker_id not in self._stopping:
                self._ready.add(worker_id)
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
            self._busy.pop(worker_id, None)
            self._report(AttemptEnded(at=time.monotonic(), outcome=outcome))

    def _do_stop(self, worker_id: str) -> None:
        with self._changed:
            if worker_id in self._workers:  # else it never came up, and that was said
                self._forget(worker_id)
                self._report(WorkerStopped(at=time.monotonic(), worker_id=worker_id))

    def _forget(self, worker_id: str) -> None:
        del self._workers[worker_id]
        self._ready.discard(worker_id)
        self._cards = {card: own for card, own in self._cards.items() if own != worker_id}

    def _report(self, event: Event) -> None:
        self._events.append(event)
        self._changed.notify_all()
