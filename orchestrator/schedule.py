"""The schedule: a state machine that turns events into commands, without I/O or clock.

It owns the cards. Each card has at most one worker, and each worker at most one attempt. Jobs
go longest first to the workers that hold their model; gangs get a legal card set drained for them
(``scheduling/assignment.py``). What a failure means is looked up in ``retry.py``. Rows come before
the commands that give their cards away, and every job gets exactly one final row, whatever breaks.
The same object runs the night (``driver.py``) and the simulation (``simulate.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from orchestrator.attempt import Attempt, Outcome, RankOutcome
from orchestrator.batch_search import largest_fit, next_probe
from orchestrator.events import (
    AttemptEnded,
    Command,
    Event,
    NodeJoined,
    NodeLeft,
    RecordRow,
    RunAttempt,
    RunFinished,
    StopRequested,
    Wake,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.failure import Failure, FailureClass
from orchestrator.job import MAX, Accelerator, Job, State
from orchestrator.plan import Action, PlannedJob
from orchestrator.retry import POLICIES, failure_class_of, judge
from orchestrator.scheduling.breaker import Breaker
from orchestrator.scheduling.cards import Slot, Worker, WorkerState
from orchestrator.scheduling.leases import Lease
from orchestrator.scheduling.pool import Pool, blamed_cards
from orchestrator.scheduling.record import (
    Estimates,
    JobRecord,
    Phase,
    ScheduleSettings,
    configuration_of,
)

__all__ = ["Schedule", "ScheduleSettings"]


class Schedule:
    """Give it events in the order they happen, and carry out its commands in order.

    ``attempts_before`` says how many attempts of a job earlier invocations of the same run have
    recorded, so that attempt ids stay unique. A job id that is planned twice runs once.
    """

    def __init__(
        self,
        jobs: Sequence[PlannedJob],
        settings: ScheduleSettings,
        estimates: Estimates,
        *,
        attempts_before: Mapping[str, int] | None = None,
    ) -> None:
        before = attempts_before or {}
        self.settings = settings
        self.finished = False
        self._now = 0.0
        self._begun = False
        self._stopping = ""  # why
        self._tripped: str | None = None  # why, by the circuit breaker
        self._commands: list[Command] = []
        self._records: dict[str, JobRecord] = {}
        self._unsupported: list[PlannedJob] = []
        self._tally: Counter[State] = Counter()
        self._issued: dict[str, Attempt] = {}  # every attempt that ever ran
        self._backoff: list[tuple[float, int, JobRecord]] = []
        self._resting: list[tuple[float, int, Pool, Slot]] = []
        self._next_look: float | None = None
        self._breaker = Breaker(settings.breaker_failures, settings.breaker_within_s)
        self._configurations: dict[Job, list[JobRecord]] = {}
        by_kind: dict[Accelerator, list[JobRecord]] = {}
        seen: set[str] = set()
        for planned in jobs:
            job_id = planned.job.job_id
            if job_id in seen or planned.action in (Action.REUSE, Action.SKIP):
                continue
            seen.add(job_id)
            if planned.action is Action.UNSUPPORTED:
                self._unsupported.append(planned)
                continue
            record = JobRecord(
                job=planned.job,
                job_id=job_id,
                order=len(self._records),
                estimate=estimates.estimate(planned.job),
                number=before.get(job_id, 0),
            )
            self._records[job_id] = record
            by_kind.setdefault(planned.job.accelerator, []).append(record)
            if planned.job.batch_size != MAX:
                self._configurations.setdefault(configuration_of(planned.job), []).append(record)
        self._unfinished = len(self._records)
        self._total = len(seen)
        self._pools = {
            kind: Pool(kind, records, settings, self._commands) for kind, records in by_kind.items()
        }

    # ------------------------------------------------------------ seen from outside

    def handle(self, event: Event) -> list[Command]:
        """What is to be done about ``event``, in this order. Empty after ``RunFinished``."""
        if self.finished:
            return []
        self._now = max(self._now, event.at)
        if not self._begun:
            self._begin()
        if isinstance(event, AttemptEnded):
            self._attempt_ended(event.outcome)
        elif isinstance(event, WorkerReady):
            self._worker_ready(event.worker_id)
        elif isinstance(event, WorkerStopped):
            self._worker_stopped(event.worker_id, event.failure)
        elif isinstance(event, NodeJoined):
            self._node_joined(event)
        elif isinstance(event, NodeLeft):
            self._node_left(event.node_id, event.reason)
        elif isinstance(event, StopRequested):
            self._stop(event.reason, abort=not self.settings.finish_running or self._stopping != "")
        if self._tripped:
            self._stop(self._tripped, abort=False)
        self._release_due()
        if not isinstance(event, NodeJoined):
            self._assign()
        self._give_up_hopeless()
        self._finish_if_done()
        commands = self._commands[:]
        self._commands.clear()
        for command in commands:
            if isinstance(command, RunAttempt):
                self._issued[command.attempt.attempt_id] = command.attempt
        return commands

    def counts(self) -> dict[State, int]:
        """How many jobs of this run are in each state; all states are there."""
        running = sum(
            lease.running for pool in self._pools.values() for lease in pool.leases.current.values()
        )
        counts = {state: self._tally[state] for state in State}
        counts[State.RUNNING] = running
        counts[State.PENDING] = self._total - sum(self._tally.values()) - running
        return counts

    def remaining_s(self) -> float:
        """Estimated seconds until the end, from the work that is left, spread evenly."""
        return max(
            (pool.assigner.remaining_s(self._now) for pool in self._pools.values()), default=0.0
        )

    # ------------------------------------------------------------ events

    def _begin(self) -> None:
        self._begun = True
        for planned in self._unsupported:
            self._tally[State.UNSUPPORTED] += 1
            self._commands.append(
                RecordRow(
                    job=planned.job, state=State.UNSUPPORTED, reason=planned.reason, final=True
                )
            )
        for pool in self._pools.values():
            pool.cards.changed = True

    def _node_joined(self, event: NodeJoined) -> None:
        pool = self._pools.get(event.node.accelerator)
        if pool is None:
            return
        for lease in pool.join(event.node):
            self._lose(pool, lease, "its node came back as a new one")
        # Others may join at the same time; deciding after them spreads the work over all.
        self._commands.append(Wake(at=self._now))

    def _node_left(self, node_id: str, reason: str) -> None:
        for pool in self._pools.values():
            if node_id in pool.cards.servers:
                for lease in pool.leave(node_id):
                    self._lose(pool, lease, f"node {node_id} is gone: {reason}")

    def _worker_ready(self, worker_id: str) -> None:
        for pool in self._pools.values():
            worker = pool.leases.workers.get(worker_id)
            if worker is not None:
                pool.leases.ready(worker, self._now)

    def _worker_stopped(self, worker_id: str, failure: Failure | None) -> None:
        for pool in self._pools.values():
            worker = pool.leases.workers.get(worker_id)
            if worker is None:
                continue
            lease, was = worker.slot.lease, worker.state
            pool.leases.died(worker)
            if lease is not None and lease.running:  # its end was not reported
                asked = was is WorkerState.STOPPING
                kind = FailureClass.NODE_LOST if asked else FailureClass.CRASH
                failure = failure or Failure(failure_class=kind, message="its worker stopped")
                self._conclude(pool, lease, _made_up(lease, State.LOST, failure, self._now))
            elif was is WorkerState.STARTING or (lease is not None and was is WorkerState.BUSY):
                self._start_failed(pool, worker, lease, failure)
            elif was is WorkerState.IDLE and failure is not None:
                pool.strike(worker.slot.card, f"its idle worker died: {failure.message}")
            pool.leases.gone(worker, self._now)

    def _attempt_ended(self, outcome: Outcome) -> None:
        for pool in self._pools.values():
            lease = pool.leases.current.get(outcome.attempt_id)
            if lease is not None and lease.running:
                self._conclude(pool, lease, outcome)
                return
        self._record_late(outcome)

    def _record_late(self, outcome: Outcome) -> None:
        """An attempt that is no longer current (its node was given up, say) has ended after all:
        kept as what it is, counted for nothing. That it was lost is known already."""
        attempt = self._issued.get(outcome.attempt_id)
        if attempt is None or outcome.state is State.LOST:
            return
        self._commands.append(
            RecordRow(
                job=self._records[attempt.job_id].job,
                state=outcome.state,
                reason="came after the attempt was given up or had ended; not counted",
                final=False,
                attempt=attempt,
                outcome=outcome,
            )
        )

    # ------------------------------------------------------------ ends of attempts

    def _conclude(self, pool: Pool, lease: Lease, outcome: Outcome) -> None:
        """Write the row of a current attempt, then decide about its job, workers and cards."""
        record = lease.record
        pool.leases.close(lease)
        workers = [slot.worker for slot in lease.slots if slot.worker is not None]
        succeeded = outcome.state is State.SUCCEEDED
        failure_class = None if succeeded else failure_class_of(outcome)
        self._tell_breaker(record, outcome, failure_class)
        probed = succeeded and lease.attempt.purpose == "probe"
        searching = record.search is not None and (
            probed or failure_class is FailureClass.OUT_OF_MEMORY
        )
        if searching:
            self._note_probe(lease, outcome, fits=succeeded)
        elif failure_class is None:
            self._finish(pool, record, State.SUCCEEDED, "measured", lease.attempt, outcome)
        else:
            self._fail(pool, lease, outcome, failure_class)
        if succeeded:
            pool.trust(lease)
        for worker in workers:
            reason = self._why_replace(worker, lease, failure_class, searching=searching)
            if reason:
                pool.leases.stop(worker, reason)
        if searching:
            self._continue_search(pool, record, workers)

    def _fail(
        self, pool: Pool, lease: Lease, outcome: Outcome, failure_class: FailureClass
    ) -> None:
        """An attempt failed: its job is retried or ends, and its cards may have to answer."""
        record, policy = lease.record, POLICIES[failure_class]
        record.failures[failure_class] = record.failures.get(failure_class, 0) + 1
        verdict = judge(
            failure_class,
            failures=record.failures[failure_class],
            attempts=sum(record.failures.values()),
            max_attempts=self.settings.max_attempts,
        )
        detail = f": {outcome.failure.message}" if outcome.failure is not None else ""
        retry = verdict.retry and not self._stopping
        if retry:
            self._row(record, outcome.state, verdict.reason + detail, lease.attempt, outcome)
        else:
            stopped = f"; not retried: {self._stopping}" if verdict.retry else ""
            reason = verdict.reason + detail + stopped
            self._finish(pool, record, verdict.state, reason, lease.attempt, outcome)
        blamed = blamed_cards(lease, outcome, failure_class)
        if policy.blame_card == "at_once":
            for card in blamed:
                pool.strike(card, f"{failure_class}{detail}", at_once=True)
        elif policy.blame_card == "if_it_works_elsewhere":
            record.suspects.update(blamed)
        if retry:
            record.send_elsewhere(policy.elsewhere, blamed)
            self._retry(pool, record, verdict.delay_s)
        elif verdict.state is State.OUT_OF_MEMORY:
            self._prune(pool, lease)

    def _start_failed(
        self, pool: Pool, worker: Worker, lease: Lease | None, failure: Failure | None
    ) -> None:
        """A worker did not come up: the card's fault, unless it happens to the job again and
        again. A gang that it was meant for is given up and tried elsewhere."""
        slot = worker.slot
        failure = failure or Failure(
            failure_class=FailureClass.CRASH, message="the worker stopped while it was starting"
        )
        why = f"its worker did not start ({failure.failure_class}: {failure.message})"
        if lease is not None:
            record = lease.record
            record.start_failures += 1
            outcome = _made_up(lease, State.FAILED, failure, self._now, lease.slots.index(slot))
            given_up = record.start_failures >= self.settings.max_start_failures
            if given_up:
                reason = f"{record.start_failures} workers for it did not start; the last: {why}"
                state = POLICIES[failure.failure_class].state
                self._finish(pool, record, state, reason, lease.attempt, outcome)
            else:
                self._row(record, State.FAILED, f"{slot.card}: {why}", lease.attempt, outcome)
            pool.leases.cancel(lease, f"another worker of {lease.attempt.attempt_id} did not start")
            if not given_up:
                record.send_elsewhere("card", [slot.card])
                self._retry(pool, record, POLICIES[failure.failure_class].backoff_s)
        pool.strike(slot.card, why)
        if slot.usable:
            pool.rest(slot)
            due = self._now + self.settings.card_rest_s
            heappush(self._resting, (due, slot.order, pool, slot))
            self._commands.append(Wake(at=due))
        self._tripped = self._tripped or self._breaker.failure(
            failure.failure_class, str(slot.card), 0.0, failure.message
        )

    def _lose(self, pool: Pool, lease: Lease, reason: str) -> None:
        """A lease has lost cards with their node."""
        if lease.running:
            failure = Failure(failure_class=FailureClass.NODE_LOST, message=reason)
            self._conclude(pool, lease, _made_up(lease, State.LOST, failure, self._now))
        else:
            pool.leases.cancel(lease, reason)
            pool.enqueue(lease.record)

    def _tell_breaker(
        self, record: JobRecord, outcome: Outcome, failure_class: FailureClass | None
    ) -> None:
        if failure_class is None:
            self._breaker.success()
            return
        took_s = max((rank.ended_at - rank.started_at for rank in outcome.ranks), default=0.0)
        message = outcome.failure.message if outcome.failure is not None else outcome.state
        tripped = self._breaker.failure(failure_class, record.job_id, took_s, message)
        self._tripped = self._tripped or tripped

    def _why_replace(
        self,
        worker: Worker,
        lease: Lease,
        failure_class: FailureClass | None,
        *,
        searching: bool,
    ) -> str:
        """Why a worker may not be used again after an attempt; empty when it may."""
        record = lease.record
        if self._stopping:
            return self._stopping
        if len(lease.slots) > 1:
            return "the processes of a gang are not used again"
        if not record.warm:
            return "isolation: process"
        if searching:
            worker.spoiled = worker.spoiled or failure_class is not None
            return ""
        if failure_class is not None and POLICIES[failure_class].replace_worker:
            return f"not trusted after {failure_class}"
        return "not trusted after an out-of-memory" if worker.spoiled else ""

    # ------------------------------------------------------------ batch_size: max

    def _note_probe(self, lease: Lease, outcome: Outcome, *, fits: bool) -> None:
        record = lease.record
        assert record.search is not None
        record.search[record.batch_size] = fits
        reason = f"batch size {record.batch_size} {'fits' if fits else 'does not fit'}"
        self._row(record, outcome.state, reason, lease.attempt, outcome)

    def _continue_search(self, pool: Pool, record: JobRecord, workers: list[Worker]) -> None:
        """Probe on, on the same worker while it is there; then measure, in a clean process."""
        assert record.search is not None
        worker = next((worker for worker in workers if worker.state is WorkerState.IDLE), None)
        size = next_probe(record.search, self.settings.max_batch_size)
        record.purpose = "measure" if size is None else "probe"
        size = largest_fit(record.search) if size is None else size
        if self._stopping:
            self._finish(pool, record, State.NOT_STARTED, self._stopping)
        elif size is None:
            reason = "not even batch size 1 fits"
            self._finish(pool, record, State.OUT_OF_MEMORY, reason)
        else:
            record.batch_size = size
            if worker is not None and record.purpose == "measure" and worker.spoiled:
                pool.leases.lease_fresh(record, (worker.slot,), self._now)
            elif worker is not None:
                pool.leases.lease_warm(record, worker, self._now)
            else:
                pool.enqueue(record)
            return
        if worker is not None and worker.spoiled:
            pool.leases.stop(worker, "not trusted after an out-of-memory")

    # ------------------------------------------------------------ rows

    def _row(
        self, record: JobRecord, state: State, reason: str, attempt: Attempt, outcome: Outcome
    ) -> None:
        """A row that is not the job's last."""
        self._commands.append(
            RecordRow(
                job=record.job,
                state=state,
                reason=reason,
                final=False,
                attempt=attempt,
                outcome=outcome,
            )
        )

    def _finish(
        self,
        pool: Pool,
        record: JobRecord,
        state: State,
        reason: str,
        attempt: Attempt | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """The one final row of a job that waits nowhere any more."""
        if record.phase is Phase.DONE:
            raise AssertionError(f"{record.job_id} has its final row already")
        record.phase, record.state = Phase.DONE, state
        self._tally[state] += 1
        self._unfinished -= 1
        pool.unfinished[record.width] -= 1
        self._commands.append(
            RecordRow(
                job=record.job,
                state=state,
                reason=reason,
                final=True,
                attempt=attempt,
                outcome=outcome,
            )
        )

    def _end_unrun(self, pool: Pool, record: JobRecord, state: State, reason: str) -> None:
        """End a job that has no running attempt."""
        pool.withdraw(record, reason)
        self._finish(pool, record, state, reason)

    def _prune(self, pool: Pool, lease: Lease) -> None:
        """Larger batches of a configuration that has just run out of memory will too."""
        job, attempt_id = lease.record.job, lease.attempt.attempt_id
        for other in self._configurations.get(configuration_of(job), ()):
            if other.batch_size <= lease.record.batch_size or other.phase is Phase.DONE:
                continue
            held = pool.lease_of(other)
            if held is None or not held.running:
                reason = (
                    f"batch size {job.batch_size} of the same configuration ran out of memory "
                    f"(attempt {attempt_id})"
                )
                self._end_unrun(pool, other, State.PRUNED, reason)

    # ------------------------------------------------------------ time, and the end

    def _retry(self, pool: Pool, record: JobRecord, delay_s: float) -> None:
        if delay_s <= 0:
            pool.enqueue(record)
            return
        record.phase = Phase.BACKOFF
        due = self._now + delay_s
        heappush(self._backoff, (due, record.order, record))
        self._commands.append(Wake(at=due))

    def _release_due(self) -> None:
        while self._backoff and self._backoff[0][0] <= self._now:
            record = heappop(self._backoff)[2]
            if record.phase is Phase.BACKOFF:
                self._pools[record.job.accelerator].enqueue(record)
        while self._resting and self._resting[0][0] <= self._now:
            _, _, pool, slot = heappop(self._resting)
            pool.rested(slot)

    def _assign(self) -> None:
        if self._stopping:
            return
        for pool in self._pools.values():
            look = pool.assigner.assign(self._now)
            if look is not None and (self._next_look is None or self._next_look <= self._now):
                self._next_look = look
                self._commands.append(Wake(at=look))

    def _give_up_hopeless(self) -> None:
        """Jobs that no card set is left for end, after a while in which nodes may join."""
        for kind, pool in self._pools.items():
            for width in pool.newly_hopeless(self._now):
                self._commands.append(Wake(at=pool.hopeless_at[width]))
            for width, at in pool.hopeless_at.items():
                if self._now < at or not pool.waiting(width):
                    continue
                reason = (
                    f"no {width} {kind} cards that it could run on are left "
                    f"({len(pool.cards.servers)} nodes, {pool.cards.usable_cards} usable cards)"
                )
                for record in pool.records:
                    if record.width == width and record.phase in (Phase.WAITING, Phase.BACKOFF):
                        self._end_unrun(pool, record, State.LOST, reason)

    def _stop(self, reason: str, *, abort: bool) -> None:
        """Start nothing more; with ``abort`` stop what runs, too."""
        if not self._stopping:
            self._stopping = reason
            for pool in self._pools.values():
                for record in pool.records:
                    held = pool.lease_of(record)
                    if record.phase is not Phase.DONE and (held is None or not held.running):
                        self._end_unrun(pool, record, State.NOT_STARTED, reason)
        for pool in self._pools.values():
            for worker in list(pool.leases.workers.values()):
                if abort or worker.slot.lease is None:
                    pool.leases.stop(worker, reason)

    def _finish_if_done(self) -> None:
        if self._unfinished:
            return
        for pool in self._pools.values():
            for worker in list(pool.leases.workers.values()):
                pool.leases.stop(worker, "all jobs are done")
        if not any(pool.leases.workers for pool in self._pools.values()):
            self.finished = True
            self._commands.append(RunFinished(reason=self._stopping or "every job has ended"))


def _made_up(lease: Lease, state: State, failure: Failure, now: float, rank: int = 0) -> Outcome:
    """The outcome of an attempt of which no worker is left to tell."""
    ended = RankOutcome(rank=rank, state=state, started_at=now, ended_at=now, failure=failure)
    return Outcome(
        attempt_id=lease.attempt.attempt_id, state=state, ranks=(ended,), failure=failure
    )
