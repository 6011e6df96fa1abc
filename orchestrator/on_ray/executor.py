"""Executor on Ray: performs the schedule's commands and reports events.

Ray hands out the first free card indices, which can be an illegal set on Gaudi, and lets a waiting
8-card request starve. So one agent per node takes all free cards (``claims.py``), and the schedule
assigns them. ``WorkerPool`` keeps workers and attempts without Ray, and never waits for one worker.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.core.events import (
    AttemptEnded,
    Event,
    NodeLeft,
    Progress,
    RunAttempt,
    StartWorker,
    StopWorker,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.outcome import (
    Attempt,
    Failure,
    FailureClass,
    Outcome,
    RankOutcome,
    WorkerInfo,
)
from orchestrator.core.topology import Card
from orchestrator.on_ray.agent import end_stale_actors
from orchestrator.on_ray.channel import Calls
from orchestrator.on_ray.claims import Claim, Claims, node_lost
from orchestrator.on_ray.gcs import Gcs
from orchestrator.on_ray.job_tasks import task_on_cards
from orchestrator.on_ray.run_queue import RunQueue
from orchestrator.util.host import Interval
from orchestrator.worker import protocol
from orchestrator.worker.environment import start_request
from orchestrator.worker.spawn import PRELOAD, SharedSpawner
from workloads.bench.collective import Rendezvous
from workloads.devices.monitor.host import CardTelemetry
from workloads.models import encryption, loading

STOP_PATIENCE_S = 20.0  # for a stop to be confirmed
#: Shorter jobs are no tasks in Ray.
SHOWN_AFTER_S = 1.0
_IDLE_S = 60.0  # that a run with cards has nothing to do on them before it counts as waiting
_GONE = "the worker was gone before it could start"
_CANCELLED = "its task was cancelled in Ray"
_GANG_STOPPED = "another rank of the gang ended early"


# ---------------------------------------------------------------- workers and attempts


@dataclass(slots=True)
class Worker:
    """State of one started worker."""

    worker_id: str
    card: Card
    info: WorkerInfo | None = None  # the latest word on the process
    attempt_id: str | None = None
    stopping: bool = False  # a stop is on its way, or done but not yet reported
    stop_requested: bool = False  # by the schedule, so its end is no failure
    failure: Failure | None = None  # why it ends
    gone: bool = False  # its process is, and its card is free
    stop_deadline: float = float("inf")


@dataclass(slots=True)
class RunningAttempt:
    """An attempt in progress: its workers by rank, and the outcomes so far."""

    attempt: Attempt
    worker_ids: tuple[str, ...]
    lasted: Interval = field(default_factory=Interval)
    needs_rendezvous: bool = False  # of a gang; no rank was sent its order yet
    ended: dict[int, RankOutcome] = field(default_factory=dict)
    first_failure: RankOutcome | None = None

    def outcome(self) -> Outcome:
        """All ranks together, once all have ended; the cause is the rank that failed first on its
        own: others' collective errors may arrive earlier."""
        cause = self.first_failure
        if cause is not None and _is_collective(cause):
            own = [
                outcome
                for outcome in self.ended.values()
                if outcome.state not in (State.SUCCEEDED, State.LOST)
                and not _is_collective(outcome)
            ]
            cause = min(own, key=lambda outcome: outcome.ended_at, default=cause)
        return Outcome(
            attempt_id=self.attempt.attempt_id,
            state=cause.state if cause else State.SUCCEEDED,
            ranks=tuple(self.ended[rank] for rank in sorted(self.ended)),
            failure=cause.failure if cause else None,
        )


def _is_collective(outcome: RankOutcome) -> bool:
    failure = outcome.failure
    return failure is not None and failure.failure_class is FailureClass.COLLECTIVE


class WorkerPool:
    """Performs commands on claimed nodes and reports events."""

    def __init__(
        self,
        *,
        claim_of: Callable[[str], Claim | None],  # on a joined node, by id
        factory: str,  # "module:callable" that makes the worker inside its process
        clock: Callable[[], float],
        label: Callable[[Job], str],  # in Ray's list of tasks
    ) -> None:
        self._claim_of, self._factory, self._label = claim_of, factory, label
        self._clock = clock
        self._events: deque[Event] = deque()
        self._progress: dict[str, Progress] = {}  # of the busy workers, by worker id
        self._without_task: deque[tuple[float, str]] = deque()  # since when, attempt id
        self._workers: dict[str, Worker] = {}
        self._running: dict[str, RunningAttempt] = {}
        self._kept_on: dict[str, set[str]] = {}  # ids of the nodes that keep an attempt's outcome

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    def progress(self) -> Mapping[str, Progress]:
        """The busy workers, by worker id, as last heard."""
        return dict(self._progress)

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
            worker.stop_requested = True
            self._stop(worker, command.reason)

    def handle(self, batch: protocol.ResponseBatch) -> None:
        """Handle the responses of a node."""
        for response in batch.responses:
            worker = self._workers.get(response.worker_id)
            if isinstance(response, protocol.Ended):
                self._ended(response, worker)
            elif isinstance(response, protocol.Listened):
                running = self._running.get(response.attempt_id)
                if running is not None and running.needs_rendezvous:
                    self._send_orders(running, response.rendezvous)
            elif worker is None:
                continue
            elif isinstance(response, protocol.Started):
                self._started(worker, response.value)
            elif isinstance(response, protocol.Stopped):  # a rank that has not ended yet is lost
                self._end_rank_of(worker, "the worker was stopped before it could start")
                self._worker_gone(worker)
            elif worker.attempt_id == response.attempt_id:  # halted, and not ended meanwhile
                worker.failure = worker.failure or Failure(FailureClass.HANG, response.reason)
                self._stop(worker, response.reason)
        for worker_id, progress in (batch.progress or {}).items():
            worker = self._workers.get(worker_id)
            # An attempt that has ended meanwhile is not what the worker does.
            if worker is not None and worker.attempt_id == progress.attempt_id:
                self._progress[worker_id] = progress

    def durable(self, attempt_ids: Sequence[str]) -> None:
        """Report to the nodes of these attempts that their rows are synced."""
        by_node: defaultdict[str, list[str]] = defaultdict(list)
        for attempt_id in attempt_ids:
            for node_id in self._kept_on.pop(attempt_id, ()):
                by_node[node_id].append(attempt_id)
        for node_id, ids in by_node.items():
            if (claim := self._claim_of(node_id)) is not None:
                claim.channel.put(protocol.Durable(tuple(ids)))

    def lose(self, node_id: str, failure: Failure) -> None:
        """End everything on a node that is gone: attempts first, then workers."""
        lost = [worker for worker in self._workers.values() if worker.card.node_id == node_id]
        for worker in lost:
            worker.gone = True
            worker.failure = worker.failure or failure
        for worker in lost:
            self._end_rank_of(worker, failure.message)
        for worker in lost:
            self._progress.pop(worker.worker_id, None)
            self._worker_gone(worker)

    # ------------------------------------------------------------ workers

    def _start(self, command: StartWorker) -> None:
        claim = self._claim_of(command.card.node_id)
        if claim is None:  # it left while the command was on its way
            failure = Failure(
                FailureClass.NODE_LOST, f"node {command.card.node_id} is not there any more"
            )
            self._worker_stopped(command.worker_id, failure)
            return
        self._workers[command.worker_id] = Worker(worker_id=command.worker_id, card=command.card)
        passed_on = {**loading.passed_on(), **encryption.passed_on()}
        claim.channel.put(start_request(command, claim.node, claim.facts, self._factory, passed_on))

    def _started(self, worker: Worker, value: WorkerInfo | Failure) -> None:
        if isinstance(value, WorkerInfo):
            worker.info = value
            if not worker.stopping:
                self._events.append(
                    WorkerReady(at=self._clock(), worker_id=worker.worker_id, info=value)
                )
            return
        if not worker.stop_requested:
            worker.failure = value
        if not worker.stopping:
            self._worker_gone(worker)

    def _stop(self, worker: Worker, reason: str) -> None:
        claim = self._claim_of(worker.card.node_id)
        if worker.stopping or worker.gone or claim is None:
            return
        worker.stopping = True
        worker.stop_deadline = self._clock() + STOP_PATIENCE_S
        claim.channel.put(protocol.Stop(worker.worker_id, reason))

    def give_up_stops(self, lose_if_silent: Callable[[Claim, float], bool]) -> None:
        """Give up overdue stops: lose a silent node, else end the rank; its card stays blocked."""
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
                worker.failure = Failure(FailureClass.HANG, message)
            self._end_rank_of(worker, worker.failure.message)

    def _worker_gone(self, worker: Worker) -> None:
        """Note that its process is gone. The event waits until its attempt ends on all ranks."""
        worker.gone = True
        if worker.attempt_id is None and self._workers.pop(worker.worker_id, None) is not None:
            failure = None if worker.stop_requested else worker.failure
            self._worker_stopped(worker.worker_id, failure)

    def _worker_stopped(self, worker_id: str, failure: Failure | None) -> None:
        self._events.append(WorkerStopped(at=self._clock(), worker_id=worker_id, failure=failure))

    # ------------------------------------------------------------ attempts

    def _run_attempt(self, command: RunAttempt) -> None:
        attempt = command.attempt
        running = RunningAttempt(attempt=attempt, worker_ids=command.worker_ids)
        self._running[attempt.attempt_id] = running
        self._kept_on[attempt.attempt_id] = {card.node_id for card in attempt.cards}
        workers = [self._workers.get(worker_id) for worker_id in command.worker_ids]
        for worker in workers:
            if worker is not None:
                worker.attempt_id = attempt.attempt_id
        first = workers[0]
        claim = self._claim_of(first.card.node_id) if first is not None else None
        if len(workers) == 1 or first is None or claim is None:
            self._send_orders(running, None)
            return
        running.needs_rendezvous = True
        claim.channel.put(protocol.Listen(first.worker_id, attempt.attempt_id, claim.address))

    def _send_orders(self, running: RunningAttempt, rendezvous: Any) -> None:
        """Have every rank run; a Failure as ``rendezvous`` ends them."""
        running.needs_rendezvous = False
        attempt = running.attempt
        for rank, worker_id in enumerate(running.worker_ids):
            worker = self._workers.get(worker_id)
            claim = self._claim_of(worker.card.node_id) if worker is not None else None
            if worker is None or claim is None or worker.stopping or worker.gone:
                failure = rendezvous if isinstance(rendezvous, Failure) else None
                self._rank_lost(running, rank, _GONE, failure)
                continue
            here = rendezvous
            if isinstance(rendezvous, Rendezvous):
                here = replace(rendezvous, own_address=claim.address)
            claim.channel.put(protocol.Run(worker_id, attempt, rank, here))
        self.wants_task(attempt.attempt_id)

    def due_for_tasks(self) -> list[RunningAttempt]:
        """Attempts that have been running for ``SHOWN_AFTER_S``, once each."""
        since, due = self._clock() - SHOWN_AFTER_S, []
        while self._without_task and self._without_task[0][0] <= since:
            running = self._running.get(self._without_task.popleft()[1])
            if running is None:
                continue
            reports = [self._progress.get(worker_id) for worker_id in running.worker_ids]
            if all(report is not None and report.phase != "queued" for report in reports):
                due.append(running)
            else:  # no word yet, or it waits for cores of its host
                self.wants_task(running.attempt.attempt_id)
        return due

    def wants_task(self, attempt_id: str) -> None:
        """Have ``due_for_tasks`` return an attempt, if it runs ``SHOWN_AFTER_S`` from now."""
        self._without_task.append((self._clock(), attempt_id))

    def cancel(self, attempt_id: str) -> None:
        """End an attempt whose task was cancelled in Ray."""
        running = self._running.get(attempt_id)
        for worker_id in running.worker_ids if running is not None else ():
            worker = self._workers.get(worker_id)
            if worker is not None:
                worker.failure = worker.failure or Failure(FailureClass.CANCELLED, _CANCELLED)
                self._stop(worker, _CANCELLED)

    def _ended(self, response: protocol.Ended, worker: Worker | None) -> None:
        progress = self._progress.get(response.worker_id)
        if progress is not None and progress.attempt_id == response.attempt_id:
            del self._progress[response.worker_id]
        running = self._running.get(response.attempt_id)
        outcome = outcome_of(response, worker)
        if isinstance(outcome, RankOutcome) and outcome.state is State.LOST and worker is not None:
            cause = worker.failure
            if cause is not None and cause.failure_class is FailureClass.CANCELLED:
                outcome = replace(outcome, failure=cause)
        if worker is not None and response.process_gone:
            if worker.failure is None and isinstance(outcome, RankOutcome):
                worker.failure = outcome.failure
            if not worker.stopping:
                self._worker_gone(worker)
        if running is None:
            return
        rank = running.worker_ids.index(response.worker_id)
        if isinstance(outcome, RankOutcome):
            self._rank_ended(running, rank, outcome)
        else:
            self._rank_lost(running, rank, outcome)

    def _end_rank_of(self, worker: Worker, message: str) -> None:
        running = self._running.get(worker.attempt_id or "")
        if running is not None:
            rank = running.worker_ids.index(worker.worker_id)
            self._rank_lost(running, rank, message)

    def _rank_lost(
        self, running: RunningAttempt, rank: int, message: str, failure: Failure | None = None
    ) -> None:
        """Lose a rank; ``message`` is the reason unless a failure is known."""
        worker = self._workers.get(running.worker_ids[rank])
        failure = failure or (worker.failure if worker else None)
        outcome = RankOutcome(
            rank=rank,
            state=State.LOST,
            started_at=running.lasted.started_at,
            ended_at=running.lasted.until_now(),
            failure=failure or Failure(FailureClass.CRASH, message),
            worker=worker.info if worker else None,
        )
        self._rank_ended(running, rank, outcome)

    def _rank_ended(self, running: RunningAttempt, rank: int, outcome: RankOutcome) -> None:
        """End one rank; the first failure ends the gang, which would wait for it."""
        if rank in running.ended or running.attempt.attempt_id not in self._running:
            return
        running.ended[rank] = outcome
        if outcome.state is not State.SUCCEEDED and running.first_failure is None:
            running.first_failure = outcome
            if len(running.worker_ids) > 1:
                self._stop_gang(running, rank)
        attempt_id = running.attempt.attempt_id
        if len(running.ended) < len(running.worker_ids) or attempt_id not in self._running:
            return
        del self._running[attempt_id]
        self._events.append(AttemptEnded(at=self._clock(), outcome=running.outcome()))
        for worker_id in running.worker_ids:
            worker = self._workers.get(worker_id)
            if worker is None:
                continue
            if worker.attempt_id == attempt_id:
                worker.attempt_id = None
            if worker.gone:
                self._worker_gone(worker)

    def _stop_gang(self, running: RunningAttempt, failed_rank: int) -> None:
        for rank, worker_id in enumerate(running.worker_ids):
            worker = self._workers.get(worker_id)
            if worker is None or worker.gone:
                continue
            if worker.failure is None:
                own = running.ended[rank].failure if rank == failed_rank else None
                worker.failure = own or Failure(FailureClass.COLLECTIVE, _GANG_STOPPED)
            self._stop(worker, _GANG_STOPPED)
        if running.needs_rendezvous:  # no rank has its order, so none will say that it has ended
            running.needs_rendezvous = False
            for rank in range(len(running.worker_ids)):
                self._rank_lost(running, rank, _GANG_STOPPED)


# ---------------------------------------------------------------- on Ray


class RayExecutor(WorkerPool):
    """An ``Executor`` on the joined Ray cluster (``cluster.py``)."""

    def __init__(
        self,
        *,
        run: str,  # its name, for the dashboard
        accelerators: Collection[Accelerator] | None = None,  # whose nodes to claim; None: all
        log_dir: Path | None = None,  # where every node can write; None: each node's Ray session
        factory: str = "orchestrator.worker.worker:CardWorker",
        preload: Sequence[str] = PRELOAD,  # what CPU nodes import once before forking
        clock: Callable[[], float] = time.monotonic,
        queue: RunQueue | None = None,  # None: the cluster is exclusive
        shared: SharedSpawner | None = None,  # of this host, for nodes that compute on it
        label: Callable[[Job], str] = lambda job: job.label,
    ) -> None:
        """Start claiming nodes; ControlStoreLost if the GCS is lost meanwhile."""
        super().__init__(
            claim_of=lambda node_id: self.claims.of(node_id),
            factory=factory,
            clock=clock,
            label=label,
        )
        self._busy_at = clock()  # when something ran, the last time
        self._telemetry: dict[str, Mapping[Card, CardTelemetry]] = {}  # by node id
        self._calls, self._gcs = Calls(), Gcs()
        self._tasks, self._tasks_at = Calls(), 0.0  # of jobs, and when to look at them
        for name in end_stale_actors():
            logging.getLogger(__name__).warning("ended, of an earlier driver of the run: %s", name)
        self.claims = Claims(
            run=run,
            accelerators=accelerators,
            log_dir=log_dir,
            preload=preload,
            clock=clock,
            calls=self._calls,
            gcs=self._gcs,
            report=self._events.append,
            arrived=self._responded,
            left=self._node_left,
            queue=queue,
            shared=shared,
        )
        self.claims.poll()

    def events(self, timeout_s: float) -> list[Event]:
        """Events since the last call; waits up to ``timeout_s`` for one.

        Raises ControlStoreLost if the GCS and all nodes are lost, ClusterError if no node could be
        claimed for a minute.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.claims.poll()
            for claim in self.claims.joined():
                claim.channel.send()
            left_s = max(0.0, deadline - time.monotonic())
            store_or_agents = self._calls or self._gcs  # before there is any agent, the GCS
            store_or_agents.wait(0.0 if self._events else min(left_s, self.claims.poll_interval_s))
            self._gcs.collect()
            self.give_up_stops(self.claims.lose_if_silent)
            self._look_at_tasks()
            if self._events or left_s == 0.0:
                return self.take_events()

    def telemetry(self) -> Mapping[Card, CardTelemetry]:
        """Latest telemetry of the cards of real nodes."""
        return {card: read for cards in self._telemetry.values() for card, read in cards.items()}

    @property
    def trouble(self) -> str:
        """Describe a fault of the cluster while work goes on; empty if there is none."""
        return self._gcs.trouble

    @property
    def waiting(self) -> str:
        """Holders of the cards that the run waits for; empty while it has work."""
        if self.busy:
            self._busy_at = self._clock()
        if self.claims.joined() and self._clock() - self._busy_at < _IDLE_S:
            return ""
        return self.claims.waits_for

    def close(self) -> None:
        """Stop every worker and release every card."""
        for claim in self.claims.joined():  # the last rows are durable
            claim.channel.send()
        self.claims.close()
        self._calls.clear()

    def _look_at_tasks(self) -> None:
        """Start a task for each node of each attempt that is due for one, and handle those that
        have ended, at most once a second: a wait for a thousand takes milliseconds."""
        now = self._clock()
        if now < self._tasks_at:
            return
        self._tasks_at = now + SHOWN_AFTER_S
        for running in self.due_for_tasks():
            attempt, by_node = running.attempt, defaultdict[str, list[str]](list)
            for card, worker_id in zip(attempt.cards, running.worker_ids, strict=True):
                by_node[card.node_id].append(worker_id)
            for node_id, worker_ids in by_node.items():
                claim = self.claims.of(node_id)
                if claim is None or claim.placed is None:
                    continue
                task = task_on_cards(
                    *(claim.placed.group, claim.node.accelerator.spec, len(worker_ids)),
                    *(self._label(attempt.job), claim.placed.agent),
                    *(worker_ids[0], attempt.attempt_id),
                )
                self._tasks.add(task, partial(self._task_ended, attempt.attempt_id))
        self._tasks.wait(0.0)

    def _task_ended(self, attempt_id: str, value: Any) -> None:
        """End the attempt of a cancelled task, and replace one that died while it may be running; a
        lost node or agent is noticed elsewhere."""
        from ray.exceptions import OutOfMemoryError, TaskCancelledError, WorkerCrashedError

        if isinstance(value, TaskCancelledError):
            self.cancel(attempt_id)
        elif isinstance(value, WorkerCrashedError | OutOfMemoryError):
            self.wants_task(attempt_id)

    def _node_left(self, claim: Claim, failure: Failure) -> None:
        """Everything on the node ends, then the node."""
        reason, node_id = failure.message, claim.node.node_id
        message = f"node {claim.node.name} was lost: {reason}"
        self.lose(node_id, replace(failure, message=message))
        self._telemetry.pop(node_id, None)
        self._events.append(NodeLeft(at=self._clock(), node_id=node_id, reason=reason))

    def _responded(self, claim: Claim, batch: protocol.ResponseBatch) -> None:
        self.handle(batch)
        if batch.telemetry is not None:
            self._telemetry[claim.node.node_id] = {
                card: batch.telemetry[card.index]
                for card in claim.node.cards
                if card.index in batch.telemetry
            }
        if batch.server_gone:
            self.claims.lose(claim, node_lost("its spawner died"))


def outcome_of(response: protocol.Ended, worker: Worker | None) -> RankOutcome | str:
    """A rank's outcome with its card's energy and readings, or the reason why there is none."""
    outcome = response.outcome
    if outcome is None:
        return _GONE
    if isinstance(outcome, bytes):
        try:
            outcome = protocol.unpickled(outcome)
        except Exception as error:  # of another version, or with a workload's own class in it
            return f"the outcome of the rank cannot be read: {error!r}"
        if worker is not None:
            worker.info = outcome.worker
    if response.readings and outcome.result is not None:
        details = {**outcome.result.details, **response.readings}
        outcome = replace(outcome, result=replace(outcome.result, details=details))
    return replace(outcome, energy=response.energy) if response.energy is not None else outcome
