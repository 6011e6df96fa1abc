"""Workers that are told to end, and the end of the run.

A process that does not end holds up its card and nothing else: after a while its attempt is over
and its card is not used until it has ended after all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from math import inf

from orchestrator.core.events import Command, RunFinished, StopWorker
from orchestrator.core.job import Accelerator, State
from orchestrator.core.outcome import Failure, FailureClass
from orchestrator.scheduling.cards import Worker
from orchestrator.scheduling.pool import Pool
from orchestrator.scheduling.record import Phase
from orchestrator.scheduling.verdicts import Verdicts, made_up


class Stops:
    """Stops what is to end, and waits for it no longer than the settings say."""

    def __init__(self, pools: Mapping[Accelerator, Pool], verdicts: Verdicts) -> None:
        self.settings = verdicts.settings
        self._pools, self._verdicts, self._ledger = pools, verdicts, verdicts.ledger
        self._closing = False
        self._stops: deque[tuple[float, str]] = deque()  # until when, which worker has to end

    @property
    def next_at(self) -> float:
        """Time at which the wait for the next worker is over."""
        return self._stops[0][0] if self._stops else inf

    def begun(self, command: StopWorker) -> None:
        """A worker is being told to end."""
        self._stops.append((self._ledger.now + self.settings.stop_patience_s, command.worker_id))

    def stop_run(self, reason: str, *, abort: bool) -> Iterator[Command]:
        """Start nothing more; with ``abort`` stop what runs, too."""
        if not self._ledger.stopping:
            self._ledger.stopping = reason
            for pool in self._pools.values():
                for record in pool.records:
                    held = pool.lease_of(record)
                    if record.phase is not Phase.DONE and (held is None or not held.running):
                        yield from self._ledger.end_unrun(pool, record, State.NOT_STARTED, reason)
        for pool in self._pools.values():
            for worker in list(pool.leases.workers.values()):
                if abort or worker.slot.lease is None:
                    yield from pool.leases.stop(worker, reason)

    def give_up(self) -> Iterator[Command]:
        """Wait no more for workers that had their time to end, nor for any after the deadline."""
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
        """Stop waiting for a worker that was told to stop: its attempt is over, and its card is not
        used until it has ended after all."""
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
        """Stop the workers when every job has ended; say so when none is left to wait for."""
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
    """The failure of a worker that stands still."""
    return Failure(failure_class=FailureClass.HANG, message=message)
