"""Searches for a batch size, one trial after the other: ``max`` probes, ``best`` measures.

A trial is an attempt whose row is not the job's last. A probe asks only whether a size fits; a
trial of ``best`` is timed, less tightly than the measurement that follows the search: the figure
of the size that won is taken anew, since the highest of several noisy figures is too high.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.core.events import Command
from orchestrator.core.job import State
from orchestrator.core.outcome import Outcome
from orchestrator.scheduling.batch_search import Trial, answer, next_size, why
from orchestrator.scheduling.cards import Worker, WorkerState
from orchestrator.scheduling.leases import Lease
from orchestrator.scheduling.ledger import Ledger
from orchestrator.scheduling.memory_line import MemoryBook
from orchestrator.scheduling.pool import Pool
from orchestrator.scheduling.record import JobRecord
from orchestrator.scheduling.trials import purpose_of, rate_of, unit_of
from workloads.confidence import Interval


class Searches:
    """Chooses the sizes that the searching jobs of a run try."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._memory = MemoryBook()

    def learn(self, lease: Lease, outcome: Outcome) -> None:
        """Take note of the memory that an attempt used, of whatever job."""
        if outcome.state is State.SUCCEEDED:
            self._memory.learn(lease.attempt.job, outcome)

    def note(self, lease: Lease, outcome: Outcome, *, fits: bool) -> Iterator[Command]:
        """Record a trial that has ended."""
        record = lease.record
        assert record.search is not None
        rate = None
        if fits and lease.attempt.purpose != "probe":
            rate = rate_of(lease.attempt.job, outcome) or Interval(mean=0.0, low=0.0, high=0.0)
        record.search[record.batch_size] = Trial(fits=fits, rate=rate)
        reason = f"batch size {record.batch_size} {'fits' if fits else 'does not fit'}"
        if rate is not None:
            reason = f"batch size {record.batch_size} gives {rate.mean:.4g} {unit_of(record.job)}"
        yield self.ledger.row(record, outcome.state, reason, lease.attempt, outcome)

    def proceed(self, pool: Pool, record: JobRecord, workers: list[Worker]) -> Iterator[Command]:
        """Try the next size, on the same worker while it is there; then measure, in a clean
        process."""
        assert record.search is not None and record.wish is not None
        worker = next((worker for worker in workers if worker.state is WorkerState.IDLE), None)
        size = next_size(record.search, record.wish, self._memory.line(record.job))
        record.purpose = purpose_of(record.wish.goal) if size is not None else "measure"
        size = answer(record.search, record.wish) if size is None else size
        if self.ledger.stopping:
            yield self.ledger.finish(pool, record, State.NOT_STARTED, self.ledger.stopping)
        elif size is not None and self.ledger.now + record.next_s > self.ledger.work_until:
            reason = f"its search got to batch size {size}, too late to measure before the deadline"
            yield self.ledger.finish(pool, record, State.NOT_STARTED, reason)
        elif size is None:
            reason = why(record.search, record.wish)
            yield self.ledger.finish(pool, record, State.OUT_OF_MEMORY, reason)
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
