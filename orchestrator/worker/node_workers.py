"""The worker processes of one node, with a thread for each, and the sampler of its cards.

A stop has its own thread, so it reaches a hung process; ``Stopped`` is a worker's last response.
Ranks of a gang wait for each other, on some transports without a timeout: ``look`` finds a halted
rank by the kernel's process state, since a silent one may be compiling.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.core.events import Progress
from orchestrator.core.outcome import Failure, FailureClass
from orchestrator.core.readings import Energy, Reading, card_readings, energy_between
from orchestrator.worker import protocol
from orchestrator.worker.process import WorkerProcess
from workloads.devices.monitor.host import CardTelemetry
from workloads.util.processes import process_stat

#: Consecutive looks, one a second, after which a rank counts as halted. With the executor's 20 s
#: for an unconfirmed stop, a gang ends within 30 s.
HALTED_LOOKS = 5
_END_POLL_S = 0.5


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    process: WorkerProcess
    requests: queue.SimpleQueue[protocol.Listen | protocol.Run | None] = field(
        default_factory=queue.SimpleQueue
    )
    thread: threading.Thread = field(init=False)
    attempt_id: str = ""  # that it runs
    is_gang: bool = False  # whether that attempt has more ranks
    halted: int = 0  # looks in a row that found its process halted


class NodeWorkers:
    """Carries out requests in threads; ``respond`` gets each response, and the Run that ended."""

    def __init__(self, respond: Callable[[protocol.Response, protocol.Run | None], None]) -> None:
        self._respond = respond
        self.sampler: CardSampler | None = None  # None: the cards have no sensors
        self._workers: dict[str, _Worker] = {}
        self._lock = threading.Lock()  # a worker that is in the table takes requests

    def do(self, request: protocol.WorkerRequest) -> None:
        """Queue one request and return; each worker handles its requests in order."""
        if isinstance(request, protocol.Start):
            worker = _Worker(request.worker_id, WorkerProcess(request))
            worker.thread = threading.Thread(target=self._work, args=(worker,), daemon=True)
            with self._lock:
                self._workers[worker.name] = worker
            worker.thread.start()
        elif isinstance(request, protocol.Stop):
            threading.Thread(target=self._stop, args=(request,), daemon=True).start()
        else:
            with self._lock:
                addressee = self._workers.get(request.worker_id)
                if addressee is not None:
                    addressee.requests.put(request)
                    return
            self._refuse(request)

    def wait_for_end(self, worker_id: str, attempt_id: str) -> None:
        """Wait until a worker has ended this attempt; not at all if it does not run it."""
        while (worker := self._workers.get(worker_id)) and worker.attempt_id == attempt_id:
            time.sleep(_END_POLL_S)

    def progress(self) -> Mapping[str, Progress]:
        """Last report of each busy worker, by worker id."""
        with self._lock:
            workers = list(self._workers.values())
        reports = {worker.name: worker.process.progress for worker in workers}
        return {name: progress for name, progress in reports.items() if progress is not None}

    def look(self) -> None:
        """Report each rank of a gang whose process is halted; to be called once a second."""
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            attempt_id, pid = worker.attempt_id, worker.process.pid
            watched = worker.is_gang and attempt_id
            stat = process_stat(pid) if watched and pid is not None else None
            if stat is None or not (stat.stopped or stat.ended or stat.ending):
                worker.halted = 0
                continue
            worker.halted += 1
            if worker.halted == HALTED_LOOKS:
                state = "has been stopped by a signal" if stat.stopped else "has been ending"
                reason = f"the process {pid} of this rank {state} for {HALTED_LOOKS} s"
                self._respond(protocol.Halted(worker.name, attempt_id, reason), None)

    def close(self, reason: str) -> None:
        """Kill all worker processes; returns when they are gone."""
        with self._lock:
            stops = [protocol.Stop(name, reason) for name in self._workers]
        threads = [threading.Thread(target=self._stop, args=(stop,), daemon=True) for stop in stops]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # ------------------------------------------------------------ a worker's thread

    def _work(self, worker: _Worker) -> None:
        started = worker.process.start()
        self._respond(protocol.Started(worker.name, started), None)
        if not isinstance(started, Failure):
            while not worker.process.gone and (request := worker.requests.get()) is not None:
                if isinstance(request, protocol.Run):
                    self._run(worker, request)
                else:
                    rendezvous = worker.process.listen(request.address)
                    self._respond(
                        protocol.Listened(worker.name, request.attempt_id, rendezvous), None
                    )
        with self._lock:
            del self._workers[worker.name]
        while not worker.requests.empty():
            if (late := worker.requests.get()) is not None:
                self._refuse(late)

    def _run(self, worker: _Worker, request: protocol.Run) -> None:
        attempt, process = request.attempt, worker.process
        worker.attempt_id = attempt.attempt_id
        worker.is_gang = request.rendezvous is not None
        try:
            outcome = process.run(request)
        finally:
            worker.attempt_id = ""
        energy, readings = None, dict[str, str]()
        if self.sampler is not None and process.timed is not None:
            index = attempt.cards[request.rank].index
            energy = self.sampler.energy(index, *process.timed)
            readings |= self.sampler.readings(index, *process.timed)
        response = protocol.Ended(
            worker.name, attempt.attempt_id, outcome, process.gone, energy, readings
        )
        self._respond(response, request)

    def _refuse(self, request: protocol.Listen | protocol.Run) -> None:
        name = request.worker_id
        if isinstance(request, protocol.Run):
            self._respond(protocol.Ended(name, request.attempt.attempt_id, None, True), request)
            return
        message = "the worker was gone before it could open a rendezvous"
        failure = Failure(FailureClass.CRASH, message)
        self._respond(protocol.Listened(name, request.attempt_id, failure), None)

    # ------------------------------------------------------------ a stop's thread

    def _stop(self, request: protocol.Stop) -> None:
        with self._lock:
            worker = self._workers.get(request.worker_id)
        if worker is not None:
            worker.process.stop(request.reason)
            worker.requests.put(None)
            worker.thread.join()
        self._respond(protocol.Stopped(request.worker_id), None)


# ---------------------------------------------------------------- the sampler of this host's cards

# The interval follows the cost of a reading (a library call takes 1 ms, a vendor's tool 0.5 s): the
# host's cores belong to the benchmark.

ReadCards = Callable[[], Mapping[int, CardTelemetry]]

#: A reading may take this share of a core.
SHARE = 0.05
SHORTEST_S, LONGEST_S = 0.25, 5.0
#: Readings are kept this long, which is longer than any timed part.
KEEP_S = 2 * 3600.0
#: Age beyond which ``latest`` ignores a reading.
FRESH_S = 15.0
#: Empty readings in a row after which sampling ends.
EMPTY_READINGS = 3


class CardSampler:
    """The readings of one host. ``start`` once; the other methods from any thread."""

    def __init__(self, read: ReadCards, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._readings: deque[tuple[float, Mapping[int, CardTelemetry]]] = deque()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Read in a thread of its own until there is nothing to read."""
        threading.Thread(target=self._sample, name="card-sampler", daemon=True).start()

    def latest(self) -> Mapping[int, CardTelemetry]:
        """The newest reading by card index; empty when it is old, or there is none."""
        with self._lock:
            if self._readings and self._clock() - self._readings[-1][0] <= FRESH_S:
                return self._readings[-1][1]
        return {}

    def energy(self, index: int, start: float, end: float) -> Energy | None:
        """Energy of a card between two past moments of the monotonic clock; None where unknown.

        Takes a reading if there is none yet after ``end``.
        """
        with self._lock:
            watched = bool(self._readings)
            seen = watched and self._readings[-1][0] >= end
        if watched and not seen:
            self.take()
        return energy_between(self._of(index), start, end)

    def readings(self, index: int, start: float, end: float) -> Mapping[str, str]:
        """Readings of a card between two moments that have passed, as details of a row."""
        return card_readings(self._of(index), start, end)

    def _of(self, index: int) -> list[Reading]:
        with self._lock:
            return [(at, cards[index]) for at, cards in self._readings if index in cards]

    def take(self) -> bool:
        """Take one reading now; return False if it is empty or fails."""
        began = self._clock()
        try:
            cards = self._read()
        except Exception:  # a monitor's failure is not the run's
            return False
        if not cards:
            return False
        # The tool looked at some moment while it ran.
        at = (began + self._clock()) / 2
        with self._lock:
            if not self._readings or at >= self._readings[-1][0]:
                self._readings.append((at, cards))
            while at - self._readings[0][0] > KEEP_S:
                self._readings.popleft()
        return True

    def _sample(self) -> None:
        empty = 0
        while empty < EMPTY_READINGS:
            began = time.monotonic()
            empty = 0 if self.take() else empty + 1
            took = time.monotonic() - began
            time.sleep(min(LONGEST_S, max(SHORTEST_S, took / SHARE)))
