"""The worker processes of one node: carries out the driver's requests, with a thread for each.

A card's start or job keeps its own thread busy and no other, and a stop has one of its own, so that
it reaches a process that hangs. ``Stopped`` is reported when the worker's thread has ended, so it
is the last that is heard of a worker.

The ranks of a gang wait for one another, some transports (Gaudi's hccl) without a time limit, so a
rank that does nothing any more is found from outside: ``look`` asks the kernel for the state of its
process. Silence says nothing, since a compilation may block a rank for minutes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.core.events import Progress
from orchestrator.core.outcome import Failure, FailureClass
from orchestrator.core.readings import Energy
from orchestrator.worker.process import WorkerProcess
from orchestrator.worker.protocol import (
    Ended,
    Halted,
    Listen,
    Listened,
    Request,
    Response,
    Run,
    Start,
    Started,
    Stop,
    Stopped,
)
from workloads.util.processes import ProcessStat, process_stat

#: A rank is halted when so many looks in a row have found it so: one a second, while the agent
#: itself is not halted. With the 20 s after which an unconfirmed stop is given up, a gang ends
#: within 30 s.
HALTED_LOOKS = 5

#: Energy of the card of this index between two moments; None where it is unknown.
EnergyOf = Callable[[int, float, float], Energy | None]
#: Readings of that card meanwhile, as details of a row.
ReadingsOf = Callable[[int, float, float], Mapping[str, str]]


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    process: WorkerProcess
    requests: queue.SimpleQueue[Listen | Run | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread = field(init=False)
    attempt_id: str = ""  # that it runs
    ended: threading.Event | None = None  # the end of that attempt, where a thread waits for it
    gang_attempt_id: str = ""  # of which it runs a rank
    halted: int = 0  # looks in a row that found its process halted


class NodeWorkers:
    """``do`` returns at once; ``respond`` gets the response to each request, from any thread."""

    def __init__(
        self,
        respond: Callable[[Response], None],
        energy: EnergyOf,
        readings: ReadingsOf = lambda *_: {},
    ) -> None:
        self._respond = respond
        self._energy, self._readings = energy, readings
        self._workers: dict[str, _Worker] = {}
        self._lock = threading.Lock()  # a worker that is in the table takes requests

    def do(self, request: Request) -> None:
        """Carry out one request. Requests to one worker are done in the order of these calls."""
        if isinstance(request, Start):
            worker = _Worker(request.launch.name, WorkerProcess(request.launch))
            worker.thread = threading.Thread(target=self._work, args=(worker,), daemon=True)
            with self._lock:
                self._workers[worker.name] = worker
            worker.thread.start()
        elif isinstance(request, Stop):
            threading.Thread(target=self._stop, args=(request,), daemon=True).start()
        else:
            with self._lock:
                addressee = self._workers.get(request.worker_id)
                if addressee is not None:
                    addressee.requests.put(request)
                    return
            self._respond(_too_late(request))

    def wait_for_end(self, worker_id: str, attempt_id: str) -> None:
        """Wait until a worker has ended this attempt; not at all if it does not run it."""
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None or worker.attempt_id != attempt_id:
                return
            ended = worker.ended = worker.ended or threading.Event()
        ended.wait()

    def progress(self) -> Mapping[str, Progress]:
        """Last report of each busy worker, by worker id."""
        with self._lock:
            workers = list(self._workers.values())
        reports = {worker.name: worker.process.progress() for worker in workers}
        return {name: progress for name, progress in reports.items() if progress is not None}

    def look(self) -> None:
        """Report each rank of a gang whose process is halted; to be called once a second."""
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            attempt_id, pid = worker.gang_attempt_id, worker.process.pid
            state = _halt(process_stat(pid)) if attempt_id and pid is not None else ""
            worker.halted = worker.halted + 1 if state else 0
            if worker.halted == HALTED_LOOKS:
                reason = f"the process {pid} of this rank {state} for {HALTED_LOOKS} s"
                self._respond(Halted(worker.name, attempt_id, reason))

    def close(self, reason: str) -> None:
        """Kill all worker processes; returns when they are gone."""
        with self._lock:
            stops = [Stop(name, reason) for name in self._workers]
        threads = [threading.Thread(target=self._stop, args=(stop,), daemon=True) for stop in stops]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # ------------------------------------------------------------ a worker's thread

    def _work(self, worker: _Worker) -> None:
        started = worker.process.start()
        self._respond(Started(worker.name, started))
        if not isinstance(started, Failure):
            while not worker.process.gone and (request := worker.requests.get()) is not None:
                self._carry_out(worker, request)
        with self._lock:
            del self._workers[worker.name]
        while not worker.requests.empty():
            if (late := worker.requests.get()) is not None:
                self._respond(_too_late(late))

    def _carry_out(self, worker: _Worker, request: Listen | Run) -> None:
        process = worker.process
        if isinstance(request, Listen):
            rendezvous = process.listen(request.address)
            self._respond(Listened(worker.name, request.attempt_id, rendezvous))
            return
        order = request.order
        worker.attempt_id = order.attempt_id
        worker.gang_attempt_id = order.attempt_id if order.rendezvous is not None else ""
        try:
            outcome = process.run(order)
        finally:
            worker.gang_attempt_id = ""
            with self._lock:
                worker.attempt_id, ended, worker.ended = "", worker.ended, None
            if ended is not None:
                ended.set()
        energy, readings = None, dict[str, str]()
        if request.card_index is not None and process.timed is not None:
            energy = self._energy(request.card_index, *process.timed)
            readings |= self._readings(request.card_index, *process.timed)
        gone = process.gone
        self._respond(Ended(worker.name, order.attempt_id, outcome, gone, energy, readings))

    # ------------------------------------------------------------ a stop's thread

    def _stop(self, request: Stop) -> None:
        with self._lock:
            worker = self._workers.get(request.worker_id)
        if worker is not None:
            worker.process.stop(request.reason)
            worker.requests.put(None)
            worker.thread.join()
        self._respond(Stopped(request.worker_id))


def _halt(stat: ProcessStat | None) -> str:
    """State of a process that does nothing any more; empty for one that may go on."""
    if stat is None:
        return ""  # its end is reported by the spawner
    if stat.stopped:
        return "has been stopped by a signal"
    if stat.ended or stat.ending:
        return "has been ending"
    return ""


def _too_late(request: Listen | Run) -> Response:
    """The response to a request for a worker that is not there any more."""
    if isinstance(request, Run):
        return Ended(request.worker_id, request.order.attempt_id, None, True)
    message = "the worker was gone before it could open a rendezvous"
    failure = Failure(failure_class=FailureClass.CRASH, message=message)
    return Listened(request.worker_id, request.attempt_id, failure)
