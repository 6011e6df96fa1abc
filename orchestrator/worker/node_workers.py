"""The worker processes of one node: carries out the driver's requests, with a thread for each.

A card's start or job keeps its own thread busy and nobody else's, and a stop has one of its own, so
that it reaches a process that hangs. ``Stopped`` is told when the worker's thread has ended, so it
is the last that is heard of a worker.

The ranks of a gang wait for one another, some transports (Gaudi's hccl) without a time limit, so a
rank that does nothing any more is found from outside: ``look`` asks the kernel for the state of its
process. Silence says nothing, since a compilation may block a rank for minutes.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator.core.events import Progress
from orchestrator.core.outcome import Failure, FailureClass
from orchestrator.core.readings import Energy
from orchestrator.worker.card_process import CardProcess, Order
from orchestrator.worker.messages import (
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
from orchestrator.worker.outcome_bytes import without_result
from workloads.process_stat import ProcessStat, process_stat

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
    process: CardProcess
    requests: queue.SimpleQueue[Listen | Run | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread = field(init=False)
    runs: str = ""  # the attempt
    awaited: threading.Event | None = None  # its end here, where somebody waits for it
    succeeded: str = ""  # its last attempt, if that did
    rank_of: str = ""  # the attempt of a gang of which it runs a rank
    halted: int = 0  # looks in a row that found its process halted


class NodeWorkers:
    """``do`` returns at once; ``tell`` gets the response to each request, from any thread."""

    def __init__(
        self,
        tell: Callable[[Response], None],
        energy: EnergyOf,
        readings: ReadingsOf = lambda *_: {},
    ) -> None:
        self._tell = tell
        self._energy, self._readings = energy, readings
        self._workers: dict[str, _Worker] = {}
        self._lock = threading.Lock()  # who finds a worker here may put requests into its queue

    def do(self, request: Request) -> None:
        """Carry out one request. Requests to one worker are done in the order of these calls."""
        if isinstance(request, Start):
            worker = _Worker(request.launch.name, CardProcess(request.launch))
            worker.thread = threading.Thread(target=self._work, args=(worker,), daemon=True)
            with self._lock:
                self._workers[worker.name] = worker
            worker.thread.start()
        elif isinstance(request, Stop):
            threading.Thread(target=self._stop, args=(request,), daemon=True).start()
        else:
            with self._lock:
                found = self._workers.get(request.worker_id)
                if found is not None:
                    found.requests.put(request)
                    return
            self._tell(_too_late(request))

    def wait_for_end(self, worker_id: str, attempt_id: str) -> None:
        """Wait until a worker has ended this attempt; not at all if it does not run it."""
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None or worker.runs != attempt_id:
                return
            ended = worker.awaited = worker.awaited or threading.Event()
        ended.wait()

    def progress(self) -> Mapping[str, Progress]:
        """Last report of each busy worker, by worker id."""
        with self._lock:
            workers = list(self._workers.values())
        heard = {worker.name: worker.process.progress() for worker in workers}
        return {name: progress for name, progress in heard.items() if progress is not None}

    def look(self) -> None:
        """Tell of each rank of a gang whose process is halted; to be called once a second."""
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            attempt_id, pid = worker.rank_of, worker.process.pid
            why = _halt(process_stat(pid)) if attempt_id and pid is not None else ""
            worker.halted = worker.halted + 1 if why else 0
            if worker.halted == HALTED_LOOKS:
                reason = f"the process {pid} of this rank {why} for {HALTED_LOOKS} s"
                self._tell(Halted(worker.name, attempt_id, reason))

    # ------------------------------------------------------------ a worker's thread

    def _work(self, worker: _Worker) -> None:
        started = worker.process.start()
        self._tell(Started(worker.name, started))
        gone = isinstance(started, Failure)
        waiting = deque[Listen | Run | None]()
        while not gone:
            if not waiting:
                waiting.append(worker.requests.get())
            _take_all(worker.requests, waiting)
            request = waiting.popleft()
            if request is None:
                break
            gone = self._respond(worker, request, waiting)
        with self._lock:
            del self._workers[worker.name]
        _take_all(worker.requests, waiting)
        for late in waiting:
            if isinstance(late, Run) and late.after:
                self._tell(_too_late(late))
            elif late is not None:
                self._respond(worker, late, deque())

    def _respond(
        self, worker: _Worker, request: Listen | Run, behind: deque[Listen | Run | None]
    ) -> bool:
        """Carry out a request and respond; return whether the process is gone. What was given ahead
        of those ``behind`` it goes to the process at once."""
        process = worker.process
        if isinstance(request, Listen):
            rendezvous = process.listen(request.address)
            self._tell(Listened(worker.name, request.attempt_id, rendezvous))
            return False
        attempt_id = request.order.attempt_id
        if request.after and request.after != worker.succeeded and not process.sent(attempt_id):
            self._tell(Ended(worker.name, attempt_id, None, process.gone))
            return process.gone
        worker.rank_of = request.order.attempt_id if request.order.rendezvous is not None else ""
        worker.runs = attempt_id
        try:
            ahead = [] if _is_sent(behind, process) else list(_given_ahead(request, behind))
            outcome = process.run(request.order, ahead, lambda: self._give_back(worker, behind))
        finally:
            worker.rank_of = ""
            with self._lock:
                worker.runs, awaited, worker.awaited = "", worker.awaited, None
            if awaited is not None:
                awaited.set()
        gone = process.gone and not process.owes  # answers of a dead process are read first
        worker.succeeded = attempt_id if process.succeeded else ""
        energy, readings = None, dict[str, str]()
        if request.card_index is not None and isinstance(outcome, bytes):
            read = without_result(outcome)
            if read.timed is not None:
                energy = self._energy(request.card_index, *read.timed)
                readings |= self._readings(request.card_index, *read.timed)
        more = not gone and (bool(behind) or not worker.requests.empty())
        self._tell(Ended(worker.name, attempt_id, outcome, gone, energy, readings, more))
        return gone

    def _give_back(self, worker: _Worker, behind: deque[Listen | Run | None]) -> None:
        """Tell that what waits behind a job that takes too long does not begin."""
        _take_all(worker.requests, behind)
        while behind and isinstance(behind[0], Run) and behind[0].after:
            given = behind.popleft()
            assert isinstance(given, Run)
            self._tell(Ended(worker.name, given.order.attempt_id, None, False))

    # ------------------------------------------------------------ a stop's thread

    def _stop(self, request: Stop) -> None:
        with self._lock:
            worker = self._workers.get(request.worker_id)
        if worker is not None:
            worker.process.stop(request.reason)
            worker.requests.put(None)
            worker.thread.join()
        self._tell(Stopped(request.worker_id))


def _take_all(
    requests: queue.SimpleQueue[Listen | Run | None], into: deque[Listen | Run | None]
) -> None:
    while not requests.empty():
        into.append(requests.get())


def _given_ahead(request: Run, behind: Iterable[Listen | Run | None]) -> Iterator[Order]:
    """The orders that follow upon a request, each if the one before it succeeds. None where the
    card is read in between."""
    if request.card_index is not None:
        return
    last = request.order
    for each in behind:
        if not isinstance(each, Run) or each.after != last.attempt_id:
            return
        last = each.order
        yield last


def _is_sent(behind: deque[Listen | Run | None], process: CardProcess) -> bool:
    """Return whether the process has all that waits, as it mostly has: it was sent in order, so
    that the last of it tells."""
    if not behind:
        return True
    last = behind[-1]
    return isinstance(last, Run) and process.sent(last.order.attempt_id)


def _halt(stat: ProcessStat | None) -> str:
    """State of a process that does nothing any more; empty for one that may go on."""
    if stat is None:
        return ""  # its end is told by the process server
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
