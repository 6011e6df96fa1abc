"""The workers on claimed nodes and the attempts that they run, by the responses of the agents.

Nothing here waits for a single worker, so a thousand can start, run and die side by side.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from orchestrator.domain.attempt import Outcome, RankOutcome, WorkerInfo
from orchestrator.domain.events import (
    AttemptEnded,
    Event,
    RunAttempt,
    StartWorker,
    StopWorker,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.domain.executor import Progress
from orchestrator.domain.failure import Failure, FailureClass
from orchestrator.domain.job import Job, State
from orchestrator.host.clock import Interval
from orchestrator.on_ray.claim import Claim
from orchestrator.on_ray.workers import Running, Worker
from orchestrator.worker.card_process import Order
from orchestrator.worker.launch import launch_of
from orchestrator.worker.messages import (
    Ended,
    Halted,
    Listen,
    Listened,
    ResponseBatch,
    Run,
    Start,
    Started,
    Stop,
)
from orchestrator.worker.outcome_bytes import unpacked, without_result
from workloads.models import protection, remote_code

STOP_PATIENCE_S = 20.0  # for a stop to be confirmed
#: Jobs that are over sooner are not shown among Ray's tasks: the call would cost more than they do,
#: and nobody could see them there.
SHOWN_AFTER_S = 1.0
_GONE = "the worker was gone before it could start"
_GANG_STOPPED = "another rank of the gang ended early"


class WorkerPool:
    """Carries out commands on claimed nodes and tells, as events, what becomes of them.

    Args:
        claim_of: the claim on a node that has joined and not left.
        factory: "module:callable" that makes the worker inside its process.
        tell: called with each event.
        label: of a job in Ray's list of tasks.
    """

    def __init__(
        self,
        *,
        claim_of: Callable[[str], Claim | None],
        factory: str,
        clock: Callable[[], float],
        tell: Callable[[Event], None],
        label: Callable[[Job], str],
    ) -> None:
        self.progress: dict[str, Progress] = {}  # of the busy workers, by worker id
        self._claim_of = claim_of
        self._factory = factory
        self._clock = clock
        self._tell = tell
        self._label = label
        self._not_shown: deque[tuple[float, str]] = deque()  # when each began, attempt id
        self._workers: dict[str, Worker] = {}
        self._running: dict[str, Running] = {}

    @property
    def busy(self) -> bool:
        """Return whether an attempt is in progress."""
        return bool(self._running)

    def perform(self, command: StartWorker | StopWorker | RunAttempt) -> None:
        """Carry out one command without waiting for its end."""
        if isinstance(command, StartWorker):
            self._start(command)
        elif isinstance(command, RunAttempt):
            self._run_attempt(command)
        elif (worker := self._workers.get(command.worker_id)) is not None:
            worker.asked = True
            self._stop(worker, command.reason)

    def handle(self, batch: ResponseBatch) -> None:
        """Handle the responses of a node."""
        for response in batch.responses:
            if isinstance(response, Ended):
                self._ended(response)
            elif isinstance(response, Started):
                self._started(response)
            elif isinstance(response, Listened):
                self._listened(response)
            elif isinstance(response, Halted):
                self._halted(response)
            elif (worker := self._workers.get(response.worker_id)) is not None:
                # Stopped: a rank that has not ended by now is lost.
                self._end_rank_of(worker, "the worker was stopped before it could start")
                self._worker_gone(worker)
        for worker_id, progress in (batch.progress or {}).items():
            worker = self._workers.get(worker_id)
            # An attempt that has ended meanwhile is not what the worker does.
            if worker is not None and worker.attempt_id == progress.attempt_id:
                self.progress[worker_id] = progress

    def lose(self, node_id: str, failure: Failure) -> None:
        """End everything on a node that is gone: attempts first, then workers."""
        lost = [worker for worker in self._workers.values() if worker.card.node_id == node_id]
        for worker in lost:
            worker.gone = True
            if worker.failure is None:
                worker.failure = failure
        for worker in lost:
            self._end_rank_of(worker, failure.message)
        for worker in lost:
            self.progress.pop(worker.worker_id, None)
            self._worker_gone(worker)

    # ------------------------------------------------------------ workers

    def _start(self, command: StartWorker) -> None:
        claim = self._claim_of(command.card.node_id)
        if claim is None:  # it left while the command was on its way
            failure = Failure(
                failure_class=FailureClass.NODE_LOST,
                message=f"node {command.card.node_id} is not there any more",
            )
            self._worker_stopped(command.worker_id, failure)
            return
        self._workers[command.worker_id] = Worker(worker_id=command.worker_id, card=command.card)
        passed_on = {**remote_code.passed_on(), **protection.passed_on()}
        launch = launch_of(command, claim.node, claim.facts, self._factory, passed_on)
        claim.channel.put(Start(launch))

    def _started(self, response: Started) -> None:
        worker, value = self._workers.get(response.worker_id), response.value
        if worker is None:
            return
        if isinstance(value, WorkerInfo):
            worker.info = value
            if not worker.stopping:
                self._tell(WorkerReady(at=self._clock(), worker_id=worker.worker_id, info=value))
            return
        if not worker.asked:
            worker.failure = value
        if not worker.stopping:
            self._worker_gone(worker)

    def _stop(self, worker: Worker, reason: str) -> None:
        claim = self._claim_of(worker.card.node_id)
        if worker.stopping or worker.gone or claim is None:
            return
        worker.stopping = True
        worker.stop_deadline = self._clock() + STOP_PATIENCE_S
        claim.channel.put(Stop(worker.worker_id, reason))

    def give_up_stops(self, lose_if_silent: Callable[[Claim, float], bool]) -> None:
        """Deal with stops that are not confirmed. A silent agent is given up, with its node; where
        the agent responds, the process does not end, and costs its card until it does."""
        now = self._clock()
        for worker in list(self._workers.values()):
            if worker.gone or worker.stop_deadline >= now:
                continue
            worker.stop_deadline = float("inf")
            claim = self._claim_of(worker.card.node_id)
            if claim is not None and lose_if_silent(claim, STOP_PATIENCE_S):
                continue
            if worker.failure is None:
                message = f"the worker has not ended {STOP_PATIENCE_S:.0f} s after it was killed"
                worker.failure = Failure(failure_class=FailureClass.HANG, message=message)
            self._end_rank_of(worker, worker.failure.message)

    def _end_rank_of(self, worker: Worker, message: str) -> None:
        """Lose the worker's rank, if it has one."""
        running = self._running.get(worker.attempt_id or "")
        if running is not None:
            rank = running.worker_ids.index(worker.worker_id)
            self._rank_lost(running, rank, worker, message)

    def _worker_gone(self, worker: Worker) -> None:
        """Note that its process is gone. The event waits until its attempt ends on all ranks."""
        worker.gone = True
        if worker.attempt_id is None and self._workers.pop(worker.worker_id, None) is not None:
            self._worker_stopped(worker.worker_id, None if worker.asked else worker.failure)

    def _worker_stopped(self, worker_id: str, failure: Failure | None) -> None:
        self._tell(WorkerStopped(at=self._clock(), worker_id=worker_id, failure=failure))

    # ------------------------------------------------------------ attempts

    def _run_attempt(self, command: RunAttempt) -> None:
        attempt = command.attempt
        workers = [self._workers.get(worker_id) for worker_id in command.worker_ids]
        first = workers[0]
        if command.after and not (first is not None and first.may_go_on(command.after)):
            return  # it never begins, and what the schedule is about to hear says so
        running = Running(
            attempt=attempt, worker_ids=command.worker_ids, given_ahead=command.after != ""
        )
        self._running[attempt.attempt_id] = running
        for worker in workers:
            if worker is not None and worker.attempt_id is not None:
                worker.ahead.append(attempt.attempt_id)
            elif worker is not None:
                worker.attempt_id = attempt.attempt_id
        claim = self._claim_of(first.card.node_id) if first is not None else None
        if len(workers) == 1 or first is None or claim is None:
            self._tell_ranks(running, None, command.after)
            return
        running.waiting = True
        address = claim.facts.address
        claim.channel.put(Listen(first.worker_id, attempt.attempt_id, address))

    def _listened(self, response: Listened) -> None:
        running = self._running.get(response.attempt_id)
        if running is not None and running.waiting:
            self._tell_ranks(running, response.rendezvous)

    def _tell_ranks(self, running: Running, rendezvous: Any, after: str = "") -> None:
        """Have every rank run. ``rendezvous`` may be the Failure to open one: they end with it."""
        running.waiting = False
        attempt = running.attempt
        for rank, worker_id in enumerate(running.worker_ids):
            worker = self._workers.get(worker_id)
            claim = self._claim_of(worker.card.node_id) if worker is not None else None
            if worker is None or claim is None or worker.stopping or worker.gone:
                own = rendezvous if isinstance(rendezvous, Failure) else None
                self._rank_lost(running, rank, worker, _GONE, own)
                continue
            order = Order(
                attempt_id=attempt.attempt_id,
                label=attempt.job.label,
                kind=attempt.job.process_kind,
                rank=rank,
                attempt=attempt.to_json(),
                rendezvous=rendezvous,
            )
            metered = None if claim.node.emulated else worker.card.index
            claim.channel.put(Run(worker_id, order, metered, after))
        first = self._workers.get(running.worker_ids[0])
        if first is not None and first.attempt_id == attempt.attempt_id:  # else it waits there
            self._not_shown.append((self._clock(), attempt.attempt_id))

    def show_jobs(self) -> None:
        """Have Ray list the jobs that have been running for a while (``SHOWN_AFTER_S``)."""
        since = self._clock() - SHOWN_AFTER_S
        while self._not_shown and self._not_shown[0][0] <= since:
            running = self._running.get(self._not_shown.popleft()[1])
            worker = self._workers.get(running.worker_ids[0]) if running is not None else None
            claim = self._claim_of(worker.card.node_id) if worker is not None else None
            if running is not None and worker is not None and claim is not None:
                label = self._label(running.attempt.job)
                claim.channel.show_job(label, worker.worker_id, running.attempt.attempt_id)

    def _ended(self, response: Ended) -> None:
        heard = self.progress.get(response.worker_id)
        if heard is not None and heard.attempt_id == response.attempt_id:
            del self.progress[response.worker_id]
        worker = self._workers.get(response.worker_id)
        running = self._running.get(response.attempt_id)
        outcome = _outcome_of(response, worker)
        if worker is not None and response.process_gone:
            if worker.failure is None and isinstance(outcome, RankOutcome):
                worker.failure = outcome.failure
            if not worker.stopping:
                self._worker_gone(worker)
        if running is None:
            return
        if running.given_ahead and response.outcome is None and not response.process_gone:
            self._attempt_ended(running, Outcome.of_unbegun(response.attempt_id))
            return
        rank = running.worker_ids.index(response.worker_id)
        if isinstance(outcome, RankOutcome):
            self._rank_ended(running, rank, outcome)
        else:
            self._rank_lost(running, rank, worker, outcome)

    def _halted(self, response: Halted) -> None:
        """End a rank that does nothing any more, and with it its gang, which waits for it."""
        worker = self._workers.get(response.worker_id)
        if worker is None or worker.attempt_id != response.attempt_id:
            return  # the attempt has ended meanwhile
        if worker.failure is None:
            worker.failure = Failure(failure_class=FailureClass.HANG, message=response.reason)
        self._stop(worker, response.reason)

    def _rank_lost(
        self,
        running: Running,
        rank: int,
        worker: Worker | None,
        message: str,
        failure: Failure | None = None,
    ) -> None:
        """Lose a rank that sends nothing more; ``message`` is the reason unless a better one is
        known."""
        failure = failure or (worker.failure if worker else None)
        if failure is None and running.given_ahead and message == _GONE:  # nobody's fault
            failure = Failure(failure_class=FailureClass.NODE_LOST, message=message)
        outcome = RankOutcome(
            rank=rank,
            state=State.LOST,
            started_at=running.lasted.started_at,
            ended_at=running.lasted.until_now(),
            failure=failure or Failure(failure_class=FailureClass.CRASH, message=message),
            worker=worker.known if worker else None,
        )
        self._rank_ended(running, rank, outcome)

    def _rank_ended(self, running: Running, rank: int, outcome: RankOutcome) -> None:
        """End one rank. The first that fails ends the gang: the others would wait for it."""
        if rank in running.ended or running.attempt.attempt_id not in self._running:
            return
        running.ended[rank] = outcome
        gang = len(running.worker_ids) > 1
        if outcome.state is not State.SUCCEEDED and running.first is None:
            running.first = outcome
            if gang:
                self._stop_gang(running, rank)
        done = len(running.ended) == len(running.worker_ids)
        if done and running.attempt.attempt_id in self._running:
            self._attempt_ended(running, running.outcome())

    def _stop_gang(self, running: Running, failed_rank: int) -> None:
        for rank, worker_id in enumerate(running.worker_ids):
            worker = self._workers.get(worker_id)
            if worker is None or worker.gone:
                continue
            if worker.failure is None:
                own = running.ended[rank].failure if rank == failed_rank else None
                worker.failure = own or Failure(
                    failure_class=FailureClass.COLLECTIVE, message=_GANG_STOPPED
                )
            self._stop(worker, _GANG_STOPPED)
        if running.waiting:  # nobody was told to run, so nobody will say that it has ended
            running.waiting = False
            for rank, worker_id in enumerate(running.worker_ids):
                self._rank_lost(running, rank, self._workers.get(worker_id), _GANG_STOPPED)

    def _attempt_ended(self, running: Running, outcome: Outcome) -> None:
        attempt_id = outcome.attempt_id
        del self._running[attempt_id]
        self._tell(AttemptEnded(at=self._clock(), outcome=outcome))
        for worker_id in running.worker_ids:
            worker = self._workers.get(worker_id)
            if worker is None:
                continue
            before = worker.attempt_id
            for unbegun in worker.ended(attempt_id, succeeded=outcome.state is State.SUCCEEDED):
                del self._running[unbegun]
            begun = self._running.get(worker.attempt_id or "")
            if begun is not None and worker.attempt_id != before:
                begun.lasted = Interval()
                self._not_shown.append((self._clock(), begun.attempt.attempt_id))
            elif begun is None and worker.gone:
                self._worker_gone(worker)


def _outcome_of(response: Ended, worker: Worker | None) -> RankOutcome | str:
    """The outcome of a rank with what its card took and said, or why there is none."""
    outcome = response.outcome
    if outcome is None:
        return _GONE
    if isinstance(outcome, bytes):
        data, known = outcome, worker.known if worker is not None else None
        try:
            outcome = unpacked(data, known)
        except Exception as error:  # of another version, or with a workload's own class in it
            if worker is not None:
                with contextlib.suppress(Exception):  # its process says only once what it is
                    worker.heard = without_result(data, known).worker
            return f"the outcome of the rank cannot be read: {error!r}"
        if worker is not None:
            worker.heard = outcome.worker
    assert isinstance(outcome, RankOutcome)
    if response.readings and outcome.result is not None:
        details = {**outcome.result.details, **response.readings}
        outcome = replace(outcome, result=replace(outcome.result, details=details))
    return replace(outcome, energy=response.energy) if response.energy is not None else outcome
