"""Consequences of an ended attempt, of a worker that did not start, and of a stop.

The row comes first; then the job (ended, retried, or its search goes on), its workers (kept warm or
replaced) and its cards (trusted or blamed). A process that does not end only blocks its card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from orchestrator.core.events import RunFinished
from orchestrator.core.job import Accelerator, State
from orchestrator.core.outcome import Failure, FailureClass, Outcome, RankOutcome
from orchestrator.core.topology import Card
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
from orchestrator.scheduler.ledger import Ledger
from orchestrator.scheduler.pool import Pool, blamed_cards
from orchestrator.scheduler.retry import POLICIES, failure_class_of, judge
from orchestrator.scheduler.state import JobState, Lease, Phase, Worker, WorkerState
from orchestrator.util.format import listed
from workloads.util.statistics import Interval


class OutcomeJudge:
    """Decides what follows from outcomes."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._memory = MemoryBook()

    def conclude(self, lease: Lease, outcome: Outcome) -> None:
        """Write the row of a current attempt, then decide about its job, workers and cards."""
        record, pool = lease.record, lease.record.pool
        succeeded = outcome.state is State.SUCCEEDED
        pool.leases.close(lease)
        workers = [slot.worker for slot in lease.slots if slot.worker is not None]
        failure_class = None if succeeded else failure_class_of(outcome)
        if failure_class in (None, FailureClass.CARD_FAULTY):  # a kernel of the job's may do that
            self.ledger.attempts.success()
        else:
            took_s = max((rank.ended_at - rank.started_at for rank in outcome.ranks), default=0.0)
            message = outcome.message if outcome.failure is not None else outcome.state
            self.ledger.attempts.failure(failure_class, record.job_id, took_s, message)
        tried = succeeded and lease.attempt.purpose != "measure"
        searching = record.search is not None and (
            tried or (failure_class is FailureClass.OUT_OF_MEMORY and not record.repeating)
        )
        if succeeded:
            self._memory.learn(lease.attempt.job, outcome)
        if searching:
            self._note_trial(lease, outcome, fits=succeeded)
        elif failure_class is not None:
            self._fail(lease, outcome, failure_class)
        else:
            reason = "measured"
            if suspects := record.suspects.difference(lease.attempt.cards):
                slots = filter(None, map(pool.slot, sorted(suspects)))
                names = listed([slot.name for slot in slots])
                reason += f"; it failed on {names}" if names else ""
            if record.search is not None and record.wish is not None:
                reason = f"measured; {why(record.search, record.wish)}"
            self.ledger.finish(record, State.SUCCEEDED, reason, lease.attempt, outcome)
        if succeeded:
            pool.count_success(lease)
        for worker in workers:
            reason = self._why_replace(worker, lease, failure_class, searching=searching)
            if reason:
                pool.leases.stop(worker, reason)
        if searching:
            self._search_on(record, workers)

    def _note_trial(self, lease: Lease, outcome: Outcome, *, fits: bool) -> None:
        """Record a trial of a batch size that has ended."""
        record, rate = lease.record, None
        assert record.search is not None
        reason = f"batch size {record.batch_size} {'fits' if fits else 'does not fit'}"
        if fits and lease.attempt.purpose != "probe":
            rate = rate_of(lease.attempt.job, outcome) or Interval(mean=0.0, low=0.0, high=0.0)
            reason = f"batch size {record.batch_size} gives {rate.mean:.4g} {unit_of(record.job)}"
        record.search[record.batch_size] = Trial(fits=fits, rate=rate)
        self.ledger.row(record, outcome.state, reason, lease.attempt, outcome)

    def _search_on(self, record: JobState, workers: list[Worker]) -> None:
        """Try the next size on the same worker if it is there; in the end measure."""
        assert record.search is not None and record.wish is not None
        leases = record.pool.leases
        worker = next((worker for worker in workers if worker.state is WorkerState.IDLE), None)
        size = next_size(record.search, record.wish, self._memory.largest(record.job))
        record.purpose = purpose_of(record.wish.goal) if size is not None else "measure"
        size = answer(record.search, record.wish) if size is None else size
        if self.ledger.stopping:
            self.ledger.finish(record, State.NOT_STARTED, self.ledger.stopping)
        elif size is None:
            reason = why(record.search, record.wish)
            self.ledger.finish(record, State.OUT_OF_MEMORY, reason)
        elif self.ledger.now + record.next_s > self.ledger.work_until:
            reason = f"its search got to batch size {size}, too late to measure before the deadline"
            self.ledger.finish(record, State.NOT_STARTED, reason)
        else:
            record.batch_size = size
            if worker is None:
                record.pool.enqueue(record)
            elif record.purpose != "probe" and worker.spoiled:
                leases.lease_fresh(record, (worker.slot,))
            else:
                leases.lease_warm(record, worker)
            return
        if worker is not None and worker.spoiled:
            leases.stop(worker, "not trusted after an out-of-memory")

    def _fail(self, lease: Lease, outcome: Outcome, failure_class: FailureClass) -> None:
        """Write the row of a failed attempt, blame its cards if the policy says so, and retry or
        end its job."""
        record, policy = lease.record, POLICIES[failure_class]
        stopping, message = self.ledger.stopping, outcome.message
        record.failures[failure_class] = record.failures.get(failure_class, 0) + 1
        verdict = judge(
            failure_class,
            message,
            failures=record.failures[failure_class],
            attempts=sum(record.failures.values()),
            max_attempts=self.ledger.settings.max_attempts,
        )
        if record.repeating:  # the row that it has stands
            verdict = replace(verdict, retry=False)
        retried = verdict.retry and not stopping
        state, reason = verdict.state, verdict.reason
        row = outcome
        if lease.queued and outcome.state is State.LOST:  # nothing of it ran
            state, reason = State.NOT_STARTED, stopping
            row = Outcome(attempt_id=outcome.attempt_id, state=state, ranks=())
        elif stopping and outcome.state is State.LOST:  # taken away from it
            # The message may be that very reason.
            more = f": {message}" if message and stopping not in message else ""
            state, reason = State.LOST, f"cut short: {stopping}{more}"
        elif stopping and verdict.retry:  # the end of the run came first: the job is still open
            state, reason = State.LOST, f"{reason}; not retried: {stopping}"
        if retried:
            self.ledger.row(record, outcome.state, reason, lease.attempt, outcome)
        else:
            self.ledger.finish(record, state, reason, lease.attempt, row)
        blamed = blamed_cards(lease, outcome, failure_class)
        self._blame(record, blamed, failure_class, f": {message}" if message else "")
        if retried:
            record.send_elsewhere(policy.elsewhere, blamed)
            self.ledger.retry(record, verdict.delay_s)
        elif verdict.state is State.OUT_OF_MEMORY and not record.repeats:
            self.ledger.prune(lease)

    def _blame(
        self, record: JobState, cards: list[Card], failure_class: FailureClass, detail: str
    ) -> None:
        policy, pool = POLICIES[failure_class], record.pool
        if policy.blame_card == "never":
            return
        record.suspects.update(cards)
        in_a_row = pool.fails_in_a_row(cards)
        if policy.blame_card != "at_once" and not in_a_row:
            return
        alike = {card for card, cause in record.accused.items() if cause is failure_class}
        if alike.difference(cards):  # the second card: the job is the likelier cause
            pool.acquit(alike)
        else:
            for card in cards:
                pool.count_failure(card, f"{failure_class}{detail}", at_once=True, proven=False)
        record.accused |= dict.fromkeys(cards, failure_class)

    def start_failed(self, worker: Worker, lease: Lease | None, failure: Failure | None) -> None:
        """Blame the card of a worker that did not come up, and the job if it happens repeatedly; a
        waiting gang is tried elsewhere."""
        slot, pool = worker.slot, worker.pool
        failure = failure or Failure(FailureClass.CRASH, "the worker stopped while it was starting")
        why = f"its worker did not start ({failure.failure_class}: {failure.message})"
        if lease is not None:
            record, policy = lease.record, POLICIES[failure.failure_class]
            outcome = self.made_up(lease, State.FAILED, failure, lease.slots.index(slot))
            given_up = self._starts_in_vain(record)
            if given_up:
                reason = f"{record.start_failures} workers for it did not start; the last: {why}"
                self.ledger.finish(record, policy.state, reason, lease.attempt, outcome)
            else:
                reason = f"{slot.name}: {why}"
                self.ledger.row(record, State.FAILED, reason, lease.attempt, outcome)
            reason = f"another worker of {lease.attempt.attempt_id} did not start"
            pool.leases.cancel(lease, reason)
            if not given_up:
                record.send_elsewhere("card", [slot.card])
                self.ledger.retry(record, policy.backoff_s)
        pool.rest(slot)
        self.ledger.starts.failure(failure.failure_class, str(slot.card), 0.0, failure.message)
        if failure.failure_class is not FailureClass.NODE_LOST:  # which says nothing of cards
            # A busy card may be free soon; a card that computes wrong results stays faulty.
            faulty = failure.failure_class is FailureClass.CARD_FAULTY
            pool.count_failure(slot.card, why, at_once=faulty)

    def _starts_in_vain(self, record: JobState) -> bool:
        """Count a failed start for a job; return whether it is given up."""
        record.start_failures += 1  # each of its cards may fail once
        return record.start_failures >= self.ledger.settings.max_start_failures + record.width - 1

    def card_kept(self, lease: Lease, reason: str) -> None:
        """Send a job elsewhere whose lease waits for a card with a stuck process."""
        record = lease.record
        record.pool.leases.cancel(lease, reason)
        if self._starts_in_vain(record):
            why = f"{record.start_failures} times its cards could not be had; the last: {reason}"
            self.ledger.finish(record, State.LOST, why)
        else:
            record.pool.enqueue(record)

    def lose(self, lease: Lease, reason: str) -> None:
        """End a lease that lost cards with their node."""
        if lease.running:
            failure = Failure(FailureClass.NODE_LOST, reason)
            self.conclude(lease, self.made_up(lease, State.LOST, failure))
        else:
            lease.record.pool.leases.cancel(lease, reason)
            lease.record.pool.enqueue(lease.record)

    def made_up(self, lease: Lease, state: State, failure: Failure, rank: int = 0) -> Outcome:
        """Outcome of an attempt that ends now without a report of its workers."""
        now = self.ledger.now
        at = now + self.ledger.ahead_s  # seconds since the epoch
        began_at = at if lease.began_at is None else at - (now - lease.began_at)
        ended = RankOutcome(
            rank=rank, state=state, started_at=began_at, ended_at=at, failure=failure
        )
        return Outcome.of_rank(lease.attempt.attempt_id, ended)

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


class RunEnding:
    """Stops workers and the run, with bounded waits."""

    def __init__(self, pools: Mapping[Accelerator, Pool], verdicts: OutcomeJudge) -> None:
        self._pools, self._verdicts, self._ledger = pools, verdicts, verdicts.ledger
        self._closing = False

    @property
    def next_at(self) -> float:
        """Time at which the wait for the next worker is over."""
        return self._ledger.stops[0][0] if self._ledger.stops else inf

    def stop_run(self, reason: str, *, abort: bool) -> None:
        """Start nothing more; with ``abort`` stop what runs, too."""
        if not self._ledger.stopping:
            self._ledger.stopping = reason
            for pool in self._pools.values():
                for record in pool.records:
                    if record.phase is not Phase.DONE and not record.running:
                        self._ledger.end_unrun(record, State.NOT_STARTED, reason)
        for worker in list(self._ledger.workers.values()):
            if abort or worker.lease is None:
                worker.pool.leases.stop(worker, reason)

    def give_up(self) -> None:
        """Abandon workers that exceed their time to end, and all after the deadline."""
        while self.next_at <= self._ledger.now:
            self._abandon(self._ledger.stops.popleft()[1])
        if self._ledger.now >= self._ledger.work_until + self._ledger.settings.stop_s:
            for worker in list(self._ledger.workers.values()):
                self._abandon(worker)

    def _abandon(self, worker: Worker) -> None:
        """End the attempt of a worker that does not stop; its card stays unused until it ends."""
        if worker.abandoned or worker.worker_id not in self._ledger.workers:
            return
        worker.abandoned = True
        lease = worker.lease
        reason = f"its worker {worker.worker_id} was told to end and has not"
        if worker.overdue:
            reason = f"{worker.overdue}; {reason}"
        worker.pool.lock_away(worker.slot, reason)
        if lease is not None and lease.running:
            failure = Failure(FailureClass.HANG, reason)
            self._verdicts.conclude(lease, self._verdicts.made_up(lease, State.LOST, failure))
        elif lease is not None:
            self._verdicts.card_kept(lease, reason)

    def finish_if_done(self) -> None:
        """Stop the workers once every job has ended, then give ``RunFinished``."""
        if any(pool.unfinished.total() for pool in self._pools.values()):
            return
        left = list(self._ledger.workers.values())
        if not self._closing:
            self._closing = True
            for worker in left:
                worker.pool.leases.stop(worker, "all jobs are done")
        if all(worker.abandoned for worker in left):
            reason = self._ledger.stopping or "every job has ended"
            if left:
                names = ", ".join(worker.worker_id for worker in left[:5])
                reason += f"; {len(left)} workers were told to end and have not: {names}"
            self._ledger.give(RunFinished(reason=reason))
