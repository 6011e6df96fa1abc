"""Consequences of an ended attempt, of a worker that did not start, and of a stop.

The row comes first; then the job (ended, retried, or its search goes on), its workers (kept warm or
replaced) and its cards (trusted or blamed). A process that does not end only blocks its card.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from math import inf

from orchestrator.core.events import Command, RunAttempt, RunFinished, StartWorker, StopWorker
from orchestrator.core.job import Accelerator, State
from orchestrator.core.outcome import Failure, FailureClass, Outcome, RankOutcome
from orchestrator.core.topology import Node
from orchestrator.scheduler.batch_size import (
    MemoryBook,
    Trial,
    answer,
    next_size,
    purpose_of,
    rate_of,
    unit_of,
    why,
)
from orchestrator.scheduler.leases import Lease
from orchestrator.scheduler.ledger import Ledger
from orchestrator.scheduler.pool import Pool, blamed_cards
from orchestrator.scheduler.retry import POLICIES, Breaker, Verdict, failure_class_of, judge
from orchestrator.scheduler.state import JobState, Phase, Worker, WorkerState
from orchestrator.util.format import listed
from workloads.util.statistics import Interval


class Searches:
    """Batch size searches of a run."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._memory = MemoryBook()

    def learn(self, lease: Lease, outcome: Outcome) -> None:
        """Record the memory that an attempt of any job used."""
        if outcome.state is State.SUCCEEDED:
            self._memory.learn(lease.attempt.job, outcome)

    def note(self, lease: Lease, outcome: Outcome, *, fits: bool) -> Iterator[Command]:
        """Record a trial that has ended."""
        record, rate = lease.record, None
        assert record.search is not None
        reason = f"batch size {record.batch_size} {'fits' if fits else 'does not fit'}"
        if fits and lease.attempt.purpose != "probe":
            rate = rate_of(lease.attempt.job, outcome) or Interval(mean=0.0, low=0.0, high=0.0)
            reason = f"batch size {record.batch_size} gives {rate.mean:.4g} {unit_of(record.job)}"
        record.search[record.batch_size] = Trial(fits=fits, rate=rate)
        yield self.ledger.row(record, outcome.state, reason, lease.attempt, outcome)

    def proceed(self, pool: Pool, record: JobState, workers: list[Worker]) -> Iterator[Command]:
        """Try the next size on the same worker if it is there; in the end measure."""
        assert record.search is not None and record.wish is not None
        worker = next((worker for worker in workers if worker.state is WorkerState.IDLE), None)
        size = next_size(record.search, record.wish, self._memory.line(record.job))
        record.purpose = purpose_of(record.wish.goal) if size is not None else "measure"
        size = answer(record.search, record.wish) if size is None else size
        if self.ledger.stopping:
            yield from self.ledger.finish(pool, record, State.NOT_STARTED, self.ledger.stopping)
        elif size is not None and self.ledger.now + record.next_s > self.ledger.work_until:
            reason = f"its search got to batch size {size}, too late to measure before the deadline"
            yield from self.ledger.finish(pool, record, State.NOT_STARTED, reason)
        elif size is None:
            reason = why(record.search, record.wish)
            yield from self.ledger.finish(pool, record, State.OUT_OF_MEMORY, reason)
        else:
            record.batch_size = size
            if worker is not None and record.purpose != "probe" and worker.spoiled:
                yield from pool.leases.lease_fresh(record, (worker.slot,), self.ledger.now)
            elif worker is not None:
                yield from pool.leases.lease_warm(record, worker, self.ledger.now)
            else:
                pool.enqueue(record)
            return
        if worker is not None and worker.spoiled:
            yield from pool.leases.stop(worker, "not trusted after an out-of-memory")


class OutcomeJudge:
    """Decides what follows from outcomes."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.settings = ledger.settings
        limits = (self.settings.breaker_failures, self.settings.breaker_within_s)
        self._attempts = Breaker("attempts", *limits)
        self.starts = Breaker("workers", *limits)
        if self.settings.succeeded_before:
            self._attempts.success()
            self.starts.success()
        self._cards: dict[str, str] = {}  # of workers that were started
        self._searches = Searches(ledger)

    @property
    def tripped(self) -> str:
        """Reason of a tripped breaker to stop the run, or empty."""
        return self._attempts.tripped or self.starts.tripped

    def begun(self, command: Command) -> None:
        """Note the start of a worker or attempt, or the stop of a worker."""
        if isinstance(command, StartWorker):
            self.starts.begun(str(command.card))
            self._cards[command.worker_id] = str(command.card)
        elif isinstance(command, StopWorker):  # a gang's, say, of which another did not start
            self.starts.withdrawn(self._cards.pop(command.worker_id, ""))
        elif isinstance(command, RunAttempt):
            self._attempts.begun(command.attempt.job_id)

    def node_gone(self, node: Node) -> None:
        """Forget the workers that were starting on a lost node."""
        for card in node.cards:
            self.starts.withdrawn(str(card))

    def conclude(self, pool: Pool, lease: Lease, outcome: Outcome) -> Iterator[Command]:
        """Write the row of a current attempt, then decide about its job, workers and cards."""
        record = lease.record
        succeeded = outcome.state is State.SUCCEEDED
        pool.leases.close(lease)
        workers = [slot.worker for slot in lease.slots if slot.worker is not None]
        failure_class = None if succeeded else failure_class_of(outcome)
        self._tell_breaker(record, outcome, failure_class)
        tried = succeeded and lease.attempt.purpose != "measure"
        searching = record.search is not None and (
            tried or (failure_class is FailureClass.OUT_OF_MEMORY and not record.repeating)
        )
        self._searches.learn(lease, outcome)
        verdict: Verdict | None = None
        if searching:
            yield from self._searches.note(lease, outcome, fits=succeeded)
        elif failure_class is None:
            reason = "measured"
            if suspects := record.suspects - set(lease.attempt.cards):
                slots = map(pool.cards.slot, sorted(suspects))
                names = listed([slot.name for slot in slots if slot is not None])
                reason += f"; it failed on {names}" if names else ""
            if record.search is not None and record.wish is not None:
                reason = f"measured; {why(record.search, record.wish)}"
            yield from self.ledger.finish(
                pool, record, State.SUCCEEDED, reason, lease.attempt, outcome
            )
        else:
            verdict = yield from self._record_failure(pool, lease, outcome, failure_class)
        if succeeded:
            yield from pool.count_success(lease)
        elif verdict is not None and failure_class is not None:
            yield from self._follow_up(pool, lease, outcome, failure_class, verdict)
        for worker in workers:
            reason = self._why_replace(worker, lease, failure_class, searching=searching)
            if reason:
                yield from pool.leases.stop(worker, reason)
        if searching:
            yield from self._searches.proceed(pool, record, workers)

    def _record_failure(
        self, pool: Pool, lease: Lease, outcome: Outcome, failure_class: FailureClass
    ) -> Generator[Command, None, Verdict]:
        record = lease.record
        record.failures[failure_class] = record.failures.get(failure_class, 0) + 1
        message = outcome.message
        verdict = judge(
            failure_class,
            message,
            failures=record.failures[failure_class],
            attempts=sum(record.failures.values()),
            max_attempts=self.settings.max_attempts,
        )
        if record.repeating:  # the row that it has stands
            verdict = replace(verdict, retry=False)
        if lease.queued and outcome.state is State.LOST:  # nothing of it ran
            attempt_id = lease.attempt.attempt_id
            outcome = Outcome(attempt_id=attempt_id, state=State.NOT_STARTED, ranks=())
            yield from self.ledger.finish(
                pool, record, State.NOT_STARTED, self.ledger.stopping, lease.attempt, outcome
            )
        elif verdict.retry and not self.ledger.stopping:
            yield self.ledger.row(record, outcome.state, verdict.reason, lease.attempt, outcome)
        else:
            state, reason = verdict.state, verdict.reason
            if self.ledger.stopping and outcome.state is State.LOST:  # taken away from it
                why = self.ledger.stopping
                # The message may be that very reason.
                more = f": {message}" if message and why not in message else ""
                state, reason = State.LOST, f"cut short: {why}{more}"
            elif verdict.retry:  # the end of the run came first, so the job is still open
                state, reason = State.LOST, f"{reason}; not retried: {self.ledger.stopping}"
            yield from self.ledger.finish(pool, record, state, reason, lease.attempt, outcome)
        return verdict

    def _follow_up(
        self,
        pool: Pool,
        lease: Lease,
        outcome: Outcome,
        failure_class: FailureClass,
        verdict: Verdict,
    ) -> Iterator[Command]:
        """Retry or end a failed job, and blame its cards if the policy says so."""
        record, policy = lease.record, POLICIES[failure_class]
        detail = f": {outcome.message}" if outcome.message else ""
        blamed = blamed_cards(lease, outcome, failure_class)
        at_once = policy.blame_card == "at_once"
        if policy.blame_card != "never":
            record.suspects.update(blamed)
            at_once |= pool.fails_in_a_row(blamed)
        if at_once:
            alike = {card for card, cause in record.accused.items() if cause is failure_class}
            if alike - set(blamed):  # the second card: the job is the likelier cause
                pool.acquit(alike)
            else:
                for card in blamed:
                    why = f"{failure_class}{detail}"
                    yield from pool.count_failure(card, why, at_once=True, proven=False)
            record.accused |= dict.fromkeys(blamed, failure_class)
        if verdict.retry and not self.ledger.stopping:
            record.send_elsewhere(policy.elsewhere, blamed)
            yield from self.ledger.retry(pool, record, verdict.delay_s)
        elif verdict.state is State.OUT_OF_MEMORY and not record.repeats:
            yield from self.ledger.prune(pool, lease)

    def start_failed(
        self, pool: Pool, worker: Worker, lease: Lease | None, failure: Failure | None
    ) -> Iterator[Command]:
        """Blame the card of a worker that did not come up, and the job if it happens repeatedly; a
        waiting gang is tried elsewhere."""
        slot = worker.slot
        failure = failure or Failure(FailureClass.CRASH, "the worker stopped while it was starting")
        why = f"its worker did not start ({failure.failure_class}: {failure.message})"
        if lease is not None:
            record = lease.record
            record.start_failures += 1
            rank = lease.slots.index(slot)
            outcome = made_up(lease, State.FAILED, failure, self.ledger, rank)
            given_up = record.start_failures >= self._most_start_failures(record)
            if given_up:
                reason = f"{record.start_failures} workers for it did not start; the last: {why}"
                state = POLICIES[failure.failure_class].state
                yield from self.ledger.finish(pool, record, state, reason, lease.attempt, outcome)
            else:
                yield self.ledger.row(
                    record, State.FAILED, f"{slot.name}: {why}", lease.attempt, outcome
                )
            yield from pool.leases.cancel(
                lease, f"another worker of {lease.attempt.attempt_id} did not start"
            )
            if not given_up:
                record.send_elsewhere("card", [slot.card])
                yield from self.ledger.retry(
                    pool, record, POLICIES[failure.failure_class].backoff_s
                )
        yield from pool.rest(slot)
        self.starts.failure(failure.failure_class, str(slot.card), 0.0, failure.message)
        if failure.failure_class is FailureClass.NODE_LOST:  # says nothing of cards
            return
        # A busy card may be free soon; a card that computes wrong results stays faulty.
        faulty = failure.failure_class is FailureClass.CARD_FAULTY
        yield from pool.count_failure(slot.card, why, at_once=faulty)

    def card_kept(self, pool: Pool, lease: Lease, reason: str) -> Iterator[Command]:
        """Send a job elsewhere whose lease waits for a card with a stuck process."""
        record = lease.record
        record.start_failures += 1
        yield from pool.leases.cancel(lease, reason)
        if record.start_failures < self._most_start_failures(record):
            pool.enqueue(record)
        else:
            why = f"{record.start_failures} times its cards could not be had; the last: {reason}"
            yield from self.ledger.finish(pool, record, State.LOST, why)

    def _most_start_failures(self, record: JobState) -> int:
        return self.settings.max_start_failures + record.width - 1  # each card may fail once

    def lose(self, pool: Pool, lease: Lease, reason: str) -> Iterator[Command]:
        """End a lease that lost cards with their node."""
        if lease.running:
            failure = Failure(FailureClass.NODE_LOST, reason)
            yield from self.conclude(pool, lease, made_up(lease, State.LOST, failure, self.ledger))
        else:
            yield from pool.leases.cancel(lease, reason)
            pool.enqueue(lease.record)

    def _tell_breaker(
        self, record: JobState, outcome: Outcome, failure_class: FailureClass | None
    ) -> None:
        if failure_class in (None, FailureClass.CARD_FAULTY):  # a kernel of the job's may do that
            self._attempts.success()
            return
        took_s = max((rank.ended_at - rank.started_at for rank in outcome.ranks), default=0.0)
        message = outcome.message if outcome.failure is not None else outcome.state
        self._attempts.failure(failure_class, record.job_id, took_s, message)

    def _why_replace(
        self, worker: Worker, lease: Lease, failure_class: FailureClass | None, *, searching: bool
    ) -> str:
        """Reason to replace a worker after an attempt; empty if it may be used again."""
        record = lease.record
        if self.ledger.stopping:
            return self.ledger.stopping
        if worker.slot.quarantined:
            return f"{worker.slot.name} is quarantined: {worker.slot.quarantined}"
        if len(lease.slots) > 1:
            return "the processes of a gang are not used again"
        if not record.warm:
            if record.job.isolation == "process":
                return "isolation: process"
            return f"each job of the engine {record.job.engine} gets a process of its own"
        if searching:
            worker.spoiled = worker.spoiled or failure_class is not None
            return ""
        if failure_class is not None and POLICIES[failure_class].replace_worker:
            return f"not trusted after {failure_class}"
        return "not trusted after an out-of-memory" if worker.spoiled else ""


def made_up(lease: Lease, state: State, failure: Failure, ledger: Ledger, rank: int = 0) -> Outcome:
    """Outcome of an attempt that ends now without a report of its workers."""
    at = ledger.now + ledger.ahead_s  # seconds since the epoch
    ran_s = ledger.now - lease.began_at if lease.began_at is not None else 0.0
    ended = RankOutcome(rank=rank, state=state, started_at=at - ran_s, ended_at=at, failure=failure)
    return Outcome.of_rank(lease.attempt.attempt_id, ended)


class RunEnding:
    """Stops workers and the run, with bounded waits."""

    def __init__(self, pools: Mapping[Accelerator, Pool], verdicts: OutcomeJudge) -> None:
        self.settings = verdicts.settings
        self._pools, self._verdicts, self._ledger = pools, verdicts, verdicts.ledger
        self._closing = False
        self._stops: deque[tuple[float, str]] = deque()  # until when, which worker has to end

    @property
    def next_at(self) -> float:
        """Time at which the wait for the next worker is over."""
        return self._stops[0][0] if self._stops else inf

    def begun(self, command: StopWorker) -> None:
        """Note that a worker is being stopped."""
        self._stops.append((self._ledger.now + self.settings.stop_patience_s, command.worker_id))

    def stop_run(self, reason: str, *, abort: bool) -> Iterator[Command]:
        """Start nothing more; with ``abort`` stop what runs, too."""
        if not self._ledger.stopping:
            self._ledger.stopping = reason
            for pool in self._pools.values():
                for record in pool.records:
                    if record.phase is not Phase.DONE and not pool.is_running(record):
                        yield from self._ledger.end_unrun(pool, record, State.NOT_STARTED, reason)
        for pool in self._pools.values():
            for worker in list(pool.leases.workers.values()):
                if abort or worker.slot.lease is None:
                    yield from pool.leases.stop(worker, reason)

    def give_up(self) -> Iterator[Command]:
        """Abandon workers that exceed their time to end, and all after the deadline."""
        while self._stops and self._stops[0][0] <= self._ledger.now:
            worker_id = self._stops.popleft()[1]
            for pool in self._pools.values():
                if worker_id in pool.leases.workers:
                    yield from self._abandon(pool, pool.leases.workers[worker_id])
        if self._ledger.now >= self._ledger.work_until + self.settings.stop_s:
            for pool in self._pools.values():
                for worker in list(pool.leases.workers.values()):
                    yield from self._abandon(pool, worker)

    def _abandon(self, pool: Pool, worker: Worker) -> Iterator[Command]:
        """End the attempt of a worker that does not stop; its card stays unused until it ends."""
        if worker.abandoned:
            return
        worker.abandoned = True
        lease = worker.slot.lease
        reason = f"its worker {worker.worker_id} was told to end and has not"
        if worker.overdue:
            reason = f"{worker.overdue}; {reason}"
        pool.lock_away(worker.slot, reason)
        if lease is not None and lease.running:
            yield from self._verdicts.conclude(
                pool, lease, made_up(lease, State.LOST, hang(reason), self._ledger)
            )
        elif lease is not None:
            yield from self._verdicts.card_kept(pool, lease, reason)

    def finish_if_done(self) -> Iterator[Command]:
        """Stop the workers once every job has ended, then yield ``RunFinished``."""
        if self._ledger.unfinished:
            return
        if not self._closing:
            self._closing = True
            for pool in self._pools.values():
                for worker in list(pool.leases.workers.values()):
                    yield from pool.leases.stop(worker, "all jobs are done")
        left = [worker for pool in self._pools.values() for worker in pool.leases.workers.values()]
        if all(worker.abandoned for worker in left):
            reason = self._ledger.stopping or "every job has ended"
            if left:
                names = ", ".join(worker.worker_id for worker in left[:5])
                reason += f"; {len(left)} workers were told to end and have not: {names}"
            yield RunFinished(reason=reason)


def hang(message: str) -> Failure:
    """Failure of a hung worker."""
    return Failure(FailureClass.HANG, message)
