"""Consequences of an attempt that ended, and of a worker that did not start.

The row comes first; then what becomes of the job (it ends, is tried again, or its search for the
largest batch size goes on), of its workers (kept warm or replaced) and of its cards (trusted, or
held to account).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from orchestrator.core.events import Command, RunAttempt, StartWorker, StopWorker
from orchestrator.core.job import State
from orchestrator.core.outcome import Failure, FailureClass, Outcome, RankOutcome
from orchestrator.core.topology import Node
from orchestrator.scheduling.batch_search import why
from orchestrator.scheduling.breaker import Breaker
from orchestrator.scheduling.cards import Worker
from orchestrator.scheduling.leases import Lease
from orchestrator.scheduling.ledger import Ledger
from orchestrator.scheduling.pool import Pool, blamed_cards
from orchestrator.scheduling.record import JobRecord
from orchestrator.scheduling.retry import POLICIES, Verdict, failure_class_of, judge
from orchestrator.scheduling.searching import Searches


class Verdicts:
    """Judges outcomes."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.settings = ledger.settings
        limits = (self.settings.breaker_failures, self.settings.breaker_within_s)
        self._attempts = Breaker("attempts", *limits)
        self._starts = Breaker("workers", *limits)
        if self.settings.succeeded_before:
            self._attempts.success()
            self._starts.success()
        self._cards: dict[str, str] = {}  # of workers that were started
        self._searches = Searches(ledger)

    @property
    def tripped(self) -> str:
        """Reason for which the run must stop, once a breaker has tripped; empty before."""
        return self._attempts.tripped or self._starts.tripped

    def begun(self, command: Command) -> None:
        """A worker or an attempt is being started, or a worker stopped."""
        if isinstance(command, StartWorker):
            self._starts.begun(str(command.card))
            self._cards[command.worker_id] = str(command.card)
        elif isinstance(command, StopWorker):  # a gang's, say, of which another did not start
            self._starts.withdrawn(self._cards.pop(command.worker_id, ""))
        elif isinstance(command, RunAttempt):
            self._attempts.begun(command.attempt.job_id)

    def node_gone(self, node: Node) -> None:
        """A node is gone, and with it the workers that were starting there."""
        for card in node.cards:
            self._starts.withdrawn(str(card))

    def worker_is_up(self) -> None:
        """A worker has started: so can others."""
        self._starts.success()

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
            tried or failure_class is FailureClass.OUT_OF_MEMORY
        )
        self._searches.learn(lease, outcome)
        verdict: Verdict | None = None
        if searching:
            yield from self._searches.note(lease, outcome, fits=succeeded)
        elif failure_class is None:
            reason = "measured"
            if record.search is not None and record.wish is not None:
                reason = f"measured; {why(record.search, record.wish)}"
            yield self.ledger.finish(pool, record, State.SUCCEEDED, reason, lease.attempt, outcome)
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
        """Write the row of a failed attempt, the job's last unless that is to be retried."""
        record = lease.record
        record.failures[failure_class] = record.failures.get(failure_class, 0) + 1
        message = outcome.failure.message if outcome.failure is not None else ""
        verdict = judge(
            failure_class,
            message,
            failures=record.failures[failure_class],
            attempts=sum(record.failures.values()),
            max_attempts=self.settings.max_attempts,
        )
        if verdict.retry and not self.ledger.stopping:
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
            yield self.ledger.finish(pool, record, state, reason, lease.attempt, outcome)
        return verdict

    def _follow_up(
        self,
        pool: Pool,
        lease: Lease,
        outcome: Outcome,
        failure_class: FailureClass,
        verdict: Verdict,
    ) -> Iterator[Command]:
        """A failed job is retried or ends, and its cards may have to answer."""
        record, policy = lease.record, POLICIES[failure_class]
        message = outcome.failure.message if outcome.failure is not None else ""
        detail = f": {message}" if message else ""
        blamed = blamed_cards(lease, outcome, failure_class)
        if policy.blame_card == "at_once":
            for card in blamed:
                yield from pool.count_failure(card, f"{failure_class}{detail}", at_once=True)
        elif policy.blame_card == "if_it_works_elsewhere":
            record.suspects.update(blamed)
        if verdict.retry and not self.ledger.stopping:
            record.send_elsewhere(policy.elsewhere, blamed)
            yield from self.ledger.retry(pool, record, verdict.delay_s)
        elif verdict.state is State.OUT_OF_MEMORY:
            yield from self.ledger.prune(pool, lease)

    def start_failed(
        self, pool: Pool, worker: Worker, lease: Lease | None, failure: Failure | None
    ) -> Iterator[Command]:
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
            rank = lease.slots.index(slot)
            outcome = made_up(lease, State.FAILED, failure, self.ledger, rank)
            given_up = record.start_failures >= self._most_start_failures(record)
            if given_up:
                reason = f"{record.start_failures} workers for it did not start; the last: {why}"
                state = POLICIES[failure.failure_class].state
                yield self.ledger.finish(pool, record, state, reason, lease.attempt, outcome)
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
        self._starts.failure(failure.failure_class, str(slot.card), 0.0, failure.message)
        if failure.failure_class is FailureClass.NODE_LOST:  # says nothing of cards
            return
        # A card that is not to be had may be a moment later; one that computes nonsense will again.
        faulty = failure.failure_class is FailureClass.CARD_FAULTY
        yield from pool.count_failure(slot.card, why, at_once=faulty)

    def card_kept(self, pool: Pool, lease: Lease, reason: str) -> Iterator[Command]:
        """A lease waits for a card whose old process does not end: its job goes elsewhere."""
        record = lease.record
        record.start_failures += 1
        yield from pool.leases.cancel(lease, reason)
        if record.start_failures < self._most_start_failures(record):
            pool.enqueue(record)
        else:
            why = f"{record.start_failures} times its cards could not be had; the last: {reason}"
            yield self.ledger.finish(pool, record, State.LOST, why)

    def _most_start_failures(self, record: JobRecord) -> int:
        return self.settings.max_start_failures + record.width - 1  # each card may fail once

    def lose(self, pool: Pool, lease: Lease, reason: str) -> Iterator[Command]:
        """A lease has lost cards with their node."""
        if lease.running:
            failure = Failure(failure_class=FailureClass.NODE_LOST, message=reason)
            yield from self.conclude(pool, lease, made_up(lease, State.LOST, failure, self.ledger))
        else:
            yield from pool.leases.cancel(lease, reason)
            pool.enqueue(lease.record)

    def _tell_breaker(
        self, record: JobRecord, outcome: Outcome, failure_class: FailureClass | None
    ) -> None:
        if failure_class is None:
            self._attempts.success()
            return
        took_s = max((rank.ended_at - rank.started_at for rank in outcome.ranks), default=0.0)
        message = outcome.failure.message if outcome.failure is not None else outcome.state
        self._attempts.failure(failure_class, record.job_id, took_s, message)

    def _why_replace(
        self,
        worker: Worker,
        lease: Lease,
        failure_class: FailureClass | None,
        *,
        searching: bool,
    ) -> str:
        """Reason for which a worker may not be used again after an attempt; empty when it may."""
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
    """The outcome of an attempt of which no worker is left to tell, and which ends now."""
    at = ledger.time_of_day
    ran_s = ledger.now - lease.began_at if lease.began_at is not None else 0.0
    ended = RankOutcome(rank=rank, state=state, started_at=at - ran_s, ended_at=at, failure=failure)
    return Outcome(
        attempt_id=lease.attempt.attempt_id, state=state, ranks=(ended,), failure=failure
    )
