"""Processes on cards through Ray: performs commands, reports events, decides nothing.

The schedule owns the cards; Ray owns the processes. Ray hands out the first free card indices,
which on Gaudi makes card sets that are not legal, and it lets a waiting 8-card request starve. So
for each node the executor takes all free cards at once, as one bundle of a placement group: Ray's
accounts are right, nobody else gets a card there, and which card a worker gets is ours to say. A
probe that holds the whole bundle for a moment reads which indices Ray means.

Events come from outstanding Ray calls and from a look at the node list once a second. Nothing here
waits for a single worker, so a thousand can start, run and die side by side.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.attempt import RankOutcome, WorkerInfo
from orchestrator.cluster import Card
from orchestrator.energy import Energy
from orchestrator.events import (
    AttemptEnded,
    Event,
    NodeJoined,
    NodeLeft,
    RunAttempt,
    StartWorker,
    StopWorker,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.executor import Progress
from orchestrator.failure import Failure, FailureClass
from orchestrator.job import Accelerator, State
from orchestrator.on_ray.actors import RankReply
from orchestrator.on_ray.calls import Calls, ProgressPoll
from orchestrator.on_ray.claims import Claim, Claims
from orchestrator.on_ray.failures import actor_failure
from orchestrator.on_ray.predecessors import end_predecessors
from orchestrator.on_ray.telemetry import TelemetryPoll
from orchestrator.on_ray.workers import CardHandle, Running, Worker
from orchestrator.worker.launch import launch_of
from workloads.devices.telemetry import CardTelemetry
from workloads.models import remote_code

_STOP_PATIENCE_S = 20.0  # for an actor that does not confirm a stop
_GANG_STOPPED = "another rank of the gang ended early"


class RayExecutor:
    """An ``Executor`` on the Ray cluster that this process has joined (``ray_cluster.py``).

    Args:
        run: the run's name, shown in the dashboard.
        accelerators: claim only nodes with these kinds of cards; all when None.
        log_dir: where workers log, if every node can write there; else each node's Ray session.
        factory: "module:callable" that makes the worker inside its process.
        preload: whether nodes that compute on the CPU import torch once and fork their workers.
        clock: the clock of the events, seconds since the epoch.
    """

    def __init__(
        self,
        *,
        run: str,
        accelerators: Collection[Accelerator] | None = None,
        log_dir: Path | None = None,
        factory: str = "orchestrator.worker.card_worker:CardWorker",
        preload: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run = run
        self._factory = factory
        self._clock = clock
        self._handles: dict[Card, CardHandle] = {}
        self._workers: dict[str, Worker] = {}
        self._running: dict[str, Running] = {}
        self._calls = Calls()
        self._progress = ProgressPoll(clock)
        self._telemetry = TelemetryPoll(clock)
        self._events: deque[Event] = deque()
        self._actors_made = 0
        for name in end_predecessors():
            logging.getLogger(__name__).warning("ended, of an earlier driver of the run: %s", name)
        self._claims = Claims(
            accelerators=accelerators,
            log_dir=log_dir,
            preload=preload,
            clock=clock,
            calls=self._calls,
            joined=self._node_joined,
            left=self._node_left,
        )
        self._claims.poll()

    # ------------------------------------------------------------ the protocol

    def perform(self, command: StartWorker | StopWorker | RunAttempt) -> None:
        """Carry out one command without waiting for its end."""
        if isinstance(command, StartWorker):
            self._start(command)
        elif isinstance(command, StopWorker):
            worker = self._workers.get(command.worker_id)
            if worker is not None:
                worker.asked = True
                self._stop(worker, command.reason)
        else:
            self._run_attempt(command)

    def events(self, timeout_s: float) -> list[Event]:
        """What happened since the last call; waits up to ``timeout_s`` for something.

        Raises:
            ClusterError: no node could be claimed for a minute.
        """
        deadline = time.monotonic() + timeout_s
        self._give_up_waiting()
        while True:
            self._claims.poll()
            self._progress.poll(self._busy)
            self._telemetry.poll(self._claims.joined())
            left = max(0.0, deadline - time.monotonic())
            self._calls.wait(0.0 if self._events else min(left, self._claims.poll_interval_s))
            if self._events or left == 0.0:
                break
        happened = list(self._events)
        self._events.clear()
        return happened

    def progress(self) -> Mapping[str, Progress]:
        """The busy workers, by worker id, as last heard."""
        return self._progress.known()

    def telemetry(self) -> Mapping[Card, CardTelemetry]:
        """What the cards of real nodes say of themselves, as last heard."""
        return self._telemetry.known()

    def close(self) -> None:
        """Stop every worker and release every card."""
        import ray

        self._claims.close()
        for handle in self._handles.values():
            ray.kill(handle.actor)
        self._handles.clear()
        self._workers.clear()
        self._running.clear()
        self._calls.clear()

    # ------------------------------------------------------------ workers

    def _start(self, command: StartWorker) -> None:
        claim = self._claims.of(command.card.node_id)
        if claim is None:  # it left while the command was on its way
            failure = Failure(
                failure_class=FailureClass.NODE_LOST,
                message=f"node {command.card.node_id} is not there any more",
            )
            self._events.append(
                WorkerStopped(at=self._clock(), worker_id=command.worker_id, failure=failure)
            )
            return
        handle = self._handle(command.card, claim)
        worker = Worker(worker_id=command.worker_id, card=command.card, actor=handle)
        self._workers[command.worker_id] = worker
        launch = launch_of(command, claim.node, claim.facts, self._factory, remote_code.passed_on())
        label = f"start {command.worker_id}"
        call = handle.actor.start.options(name=label).remote(launch)
        self._calls.add(call, lambda value: self._started(worker, value))

    def _handle(self, card: Card, claim: Claim) -> CardHandle:
        handle = self._handles.get(card)
        if handle is None or handle.dead:
            self._actors_made += 1
            name = f"{self._run} {claim.node.name}/{card.accelerator}{card.index}"
            handle = CardHandle(card=card, actor=claim.card_actor(f"{name} #{self._actors_made}"))
            self._handles[card] = handle
        return handle

    def _started(self, worker: Worker, value: Any) -> None:
        if isinstance(value, WorkerInfo):
            worker.info = value
            if not worker.stopping:
                self._events.append(
                    WorkerReady(at=self._clock(), worker_id=worker.worker_id, info=value)
                )
            return
        if not isinstance(value, Failure):
            self._actor_died(worker, value)
            return
        if not worker.asked:
            worker.failure = value
        self._worker_gone(worker)

    def _stop(self, worker: Worker, reason: str) -> None:
        if worker.stopping or worker.gone:
            return
        worker.stopping = True
        worker.stop_deadline = self._clock() + _STOP_PATIENCE_S
        if not worker.actor.dead:
            call = worker.actor.control("stop").remote(reason)
            self._calls.add(call, lambda value: self._stopped(worker, value))

    def _stopped(self, worker: Worker, value: Any) -> None:
        if value is None:
            self._worker_gone(worker)
        else:
            self._actor_died(worker, value)

    def _give_up_waiting(self) -> None:
        """An actor that does not confirm a stop is killed, and its process through the agent."""
        now = self._clock()
        for worker in list(self._workers.values()):
            if not worker.gone and worker.stop_deadline < now:
                worker.stop_deadline = now + _STOP_PATIENCE_S
                self._actor_died(worker, None)

    def _actor_died(self, worker: Worker, error: Any) -> None:
        """The actor is gone or does not answer; make sure that its process is gone as well."""
        import ray

        if worker.gone:
            return
        if worker.failure is None and not worker.asked:
            worker.failure = actor_failure(error, self._claims.of(worker.card.node_id) is not None)
        worker.stopping = True
        if not worker.actor.dead:
            worker.actor.dead = True
            ray.kill(worker.actor.actor)
        claim = self._claims.of(worker.card.node_id)
        if claim is None:
            self._worker_gone(worker)  # its node is gone
            return
        call = claim.agent.end.remote(worker.worker_id)
        self._calls.add(call, lambda _: self._worker_gone(worker))

    def _worker_gone(self, worker: Worker) -> None:
        """Its process is gone. The event waits for the end of its attempt on all ranks."""
        worker.gone = True
        if worker.attempt_id is not None:
            return
        if self._workers.pop(worker.worker_id, None) is not None:
            failure = None if worker.asked else worker.failure
            self._events.append(
                WorkerStopped(at=self._clock(), worker_id=worker.worker_id, failure=failure)
            )

    # ------------------------------------------------------------ attempts

    def _run_attempt(self, command: RunAttempt) -> None:
        attempt = command.attempt
        running = Running(attempt=attempt, worker_ids=command.worker_ids, started_at=self._clock())
        self._running[attempt.attempt_id] = running
        workers = [self._workers.get(worker_id) for worker_id in command.worker_ids]
        for worker in workers:
            if worker is not None:
                worker.attempt_id = attempt.attempt_id
        rendezvous = None
        first = workers[0]
        if len(workers) > 1 and first is not None:
            # The other ranks get the reference: Ray hands them the value once rank 0 has it.
            claim = self._claims.of(first.card.node_id)
            address = claim.facts.address if claim else "127.0.0.1"
            rendezvous = first.actor.actor.listen.remote(address)
        for rank, worker in enumerate(workers):
            if worker is None or worker.actor.dead:
                self._rank_lost(running, rank, worker, "the worker was gone before it could start")
                continue
            name = attempt.job.label if len(workers) == 1 else f"{attempt.job.label} rank {rank}"
            run = worker.actor.actor.run.options(name=name)
            call = run.remote(attempt, rank, rendezvous)
            self._calls.add(call, self._then_rank_ended(running, rank, worker))

    def _then_rank_ended(
        self, running: Running, rank: int, worker: Worker
    ) -> Callable[[Any], None]:
        def then(value: Any) -> None:
            self._progress.forget(worker.worker_id)
            if not isinstance(value, RankReply):
                self._actor_died(worker, value)
                failure = worker.failure
                if failure is None:  # asked for
                    failure = actor_failure(value, True)
                self._rank_ended(running, rank, self._lost(running, rank, worker, failure))
                return
            outcome = value.outcome
            if value.process_gone:
                if worker.failure is None:
                    worker.failure = outcome.failure
                if not worker.stopping:
                    self._worker_gone(worker)
            self._with_energy(outcome, worker, lambda told: self._rank_ended(running, rank, told))

        return then

    def _with_energy(
        self, outcome: RankOutcome, worker: Worker, then: Callable[[RankOutcome], None]
    ) -> None:
        """Ask the node what the card took while the rank was timed, where anybody can know."""
        claim = self._claims.of(worker.card.node_id)
        if outcome.timed is None or claim is None or claim.node.emulated:
            then(outcome)
            return
        call = claim.agent.energy.remote(worker.card.index, *outcome.timed)

        def told(energy: Any) -> None:
            then(replace(outcome, energy=energy) if isinstance(energy, Energy) else outcome)

        self._calls.add(call, told)

    def _rank_lost(self, running: Running, rank: int, worker: Worker | None, message: str) -> None:
        failure = (worker.failure if worker else None) or Failure(
            failure_class=FailureClass.CRASH, message=message
        )
        self._rank_ended(running, rank, self._lost(running, rank, worker, failure))

    def _lost(
        self, running: Running, rank: int, worker: Worker | None, failure: Failure
    ) -> RankOutcome:
        return RankOutcome(
            rank=rank,
            state=State.LOST,
            started_at=running.started_at,
            ended_at=self._clock(),
            failure=failure,
            worker=worker.info if worker else None,
        )

    def _rank_ended(self, running: Running, rank: int, outcome: RankOutcome) -> None:
        """One rank is over. The first that fails ends the gang: the others would wait for it."""
        if rank in running.ended or running.attempt.attempt_id not in self._running:
            return
        running.ended[rank] = outcome
        gang = len(running.worker_ids) > 1
        if outcome.state is not State.SUCCEEDED and running.first is None:
            running.first = outcome
            if gang:
                self._stop_gang(running, rank)
        if len(running.ended) == len(running.worker_ids):
            self._attempt_ended(running)

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

    def _attempt_ended(self, running: Running) -> None:
        del self._running[running.attempt.attempt_id]
        self._events.append(AttemptEnded(at=self._clock(), outcome=running.outcome()))
        for worker_id in running.worker_ids:
            worker = self._workers.get(worker_id)
            if worker is not None and worker.attempt_id == running.attempt.attempt_id:
                worker.attempt_id = None
                if worker.gone:
                    self._worker_gone(worker)

    # ------------------------------------------------------------ nodes

    def _node_joined(self, claim: Claim) -> None:
        self._events.append(NodeJoined(at=self._clock(), node=claim.node))

    def _node_left(self, claim: Claim, reason: str) -> None:
        """Everything on the node ends: attempts first, then workers, then the node."""
        failure = Failure(
            failure_class=FailureClass.NODE_LOST,
            message=f"node {claim.node.name} was lost: {reason}",
        )
        node_id = claim.node.node_id
        lost = [worker for worker in self._workers.values() if worker.card.node_id == node_id]
        for worker in lost:
            worker.actor.dead = worker.gone = True
            if worker.failure is None:
                worker.failure = failure
        for running in list(self._running.values()):
            for rank, worker_id in enumerate(running.worker_ids):
                if any(worker.worker_id == worker_id for worker in lost):
                    worker = self._workers[worker_id]
                    self._rank_ended(running, rank, self._lost(running, rank, worker, failure))
        self._telemetry.forget(node_id)
        for worker in lost:
            self._progress.forget(worker.worker_id)
            self._worker_gone(worker)
        for card in [card for card in self._handles if card.node_id == node_id]:
            del self._handles[card]
        self._events.append(NodeLeft(at=self._clock(), node_id=node_id, reason=reason))

    def _busy(self) -> Iterator[tuple[str, Any]]:
        """The ids of busy workers, with the method that asks for their progress."""
        for worker in self._workers.values():
            if worker.attempt_id is not None and not worker.gone and not worker.actor.dead:
                yield worker.worker_id, worker.actor.control("progress")
