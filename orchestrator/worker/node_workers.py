"""The worker processes of one node: does what the driver's letters say, with a thread for each.

A card's start or job keeps its own thread busy and nobody else's, and a stop has one of its own, so
that it reaches a process that hangs. ``Stopped`` is told when the worker's thread has ended, so it
is the last that is heard of a worker.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.domain.attempt import RankOutcome
from orchestrator.domain.energy import Energy
from orchestrator.domain.executor import Progress
from orchestrator.domain.failure import Failure, FailureClass
from orchestrator.worker.card_process import CardProcess
from orchestrator.worker.letters import (
    Answer,
    Ended,
    Letter,
    Listen,
    Listened,
    Run,
    Start,
    Started,
    Stop,
    Stopped,
)
from orchestrator.worker.wire import unpacked

#: What the card of this index took between two moments; None where nobody knows.
EnergyOf = Callable[[int, float, float], Energy | None]
#: What it said meanwhile, as details of a row.
ReadingsOf = Callable[[int, float, float], Mapping[str, str]]


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    process: CardProcess
    letters: queue.SimpleQueue[Listen | Run | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread = field(init=False)


class NodeWorkers:
    """``do`` returns at once; what becomes of a letter is told to ``tell``, from any thread."""

    def __init__(
        self,
        tell: Callable[[Answer], None],
        energy: EnergyOf,
        readings: ReadingsOf = lambda *_: {},
    ) -> None:
        self._tell = tell
        self._energy, self._readings = energy, readings
        self._workers: dict[str, _Worker] = {}
        self._lock = threading.Lock()  # who finds a worker here may put letters into its queue

    def do(self, letter: Letter) -> None:
        """Carry out one letter. Letters to one worker are done in the order of these calls."""
        if isinstance(letter, Start):
            worker = _Worker(letter.launch.name, CardProcess(letter.launch))
            worker.thread = threading.Thread(target=self._work, args=(worker,), daemon=True)
            with self._lock:
                self._workers[worker.name] = worker
            worker.thread.start()
        elif isinstance(letter, Stop):
            threading.Thread(target=self._stop, args=(letter,), daemon=True).start()
        else:
            with self._lock:
                found = self._workers.get(letter.worker_id)
                if found is not None:
                    found.letters.put(letter)
                    return
            self._tell(_too_late(letter))

    def progress(self) -> Mapping[str, Progress]:
        """Last report of each busy worker, by worker id."""
        with self._lock:
            workers = list(self._workers.values())
        heard = {worker.name: worker.process.progress() for worker in workers}
        return {name: progress for name, progress in heard.items() if progress is not None}

    # ------------------------------------------------------------ a worker's thread

    def _work(self, worker: _Worker) -> None:
        started = worker.process.start()
        self._tell(Started(worker.name, started))
        gone = isinstance(started, Failure)
        while not gone and (letter := worker.letters.get()) is not None:
            gone = self._answer(worker, letter)
        with self._lock:
            del self._workers[worker.name]
        while not worker.letters.empty():
            if (late := worker.letters.get()) is not None:
                self._answer(worker, late)

    def _answer(self, worker: _Worker, letter: Listen | Run) -> bool:
        """Do and tell it; whether the process is told to be gone."""
        process = worker.process
        if isinstance(letter, Listen):
            rendezvous = process.listen(letter.address)
            self._tell(Listened(worker.name, letter.attempt_id, rendezvous))
            return False
        outcome = process.run(letter.order)
        gone = process.gone
        energy, readings = None, dict[str, str]()
        if letter.card_index is not None and isinstance(outcome, bytes):
            read: RankOutcome = unpacked(outcome)
            if read.timed is not None:
                energy = self._energy(letter.card_index, *read.timed)
                readings |= self._readings(letter.card_index, *read.timed)
        self._tell(Ended(worker.name, letter.order.attempt_id, outcome, gone, energy, readings))
        return gone

    # ------------------------------------------------------------ a stop's thread

    def _stop(self, letter: Stop) -> None:
        with self._lock:
            worker = self._workers.get(letter.worker_id)
        if worker is not None:
            worker.process.stop(letter.reason)
            worker.letters.put(None)
            worker.thread.join()
        self._tell(Stopped(letter.worker_id))


def _too_late(letter: Listen | Run) -> Answer:
    """The answer to a letter for a worker that is not there any more."""
    if isinstance(letter, Run):
        return Ended(letter.worker_id, letter.order.attempt_id, None, True)
    message = "the worker was gone before it could open a rendezvous"
    failure = Failure(failure_class=FailureClass.CRASH, message=message)
    return Listened(letter.worker_id, letter.attempt_id, failure)
