"""Leases of cards to attempts, and the worker processes on the cards.

A lease gives a card set to one attempt, from the decision until its outcome. An attempt that needs
processes of its own (a gang, ``isolation: process``, a retry elsewhere) waits until the old workers
on its cards are gone and new ones ready. Workers started without a lease serve one-card jobs.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from orchestrator.core.events import RunAttempt, StartWorker, StopWorker
from orchestrator.core.outcome import Attempt
from orchestrator.core.topology import Card
from orchestrator.scheduler.queues import Bucket
from orchestrator.scheduler.state import JobState, Lease, Phase, Slot, SlotSet, Worker, WorkerState

if TYPE_CHECKING:
    from orchestrator.scheduler.pool import Pool

#: Weight of the newest observation in the estimate of how long a worker takes to start.
_START_LEARNING = 0.2


class Leases:
    """Leases and workers of one kind of accelerator."""

    def __init__(self, pool: Pool) -> None:
        self.current: dict[str, Lease] = {}  # by attempt id
        self.widths: Counter[int] = Counter()  # of these
        self.start_s = pool.ledger.settings.worker_start_s
        self._pool, self._pending, self._ledger = pool, pool.pending, pool.ledger
        self._numbers = 0
        self._checked: set[tuple[Card, bool]] = set()  # cards, alone and in a gang

    def lease_fresh(self, record: JobState, slots: SlotSet) -> None:
        """Lease a dequeued job ``slots``; it runs when its own workers are ready."""
        slots = tuple(sorted(slots, key=lambda slot: slot.order))
        runs_at = self._ledger.now + self.start_s
        lease = self._open(record, slots, runs_at, record.estimate.total_s)
        gang = record.width > 1
        wanted = [self._is_unchecked(slot.card, gang=gang) for slot in slots]
        lease.checks_cards = any(wanted)
        for rank, slot in enumerate(slots):
            worker = slot.worker
            if worker is None:
                self._start_for(lease, rank)
            elif record.width == 1 and worker.fresh:
                self._pending.detach(worker)
                worker.state, worker.for_lease = WorkerState.BUSY, True
                lease.ready[rank] = worker
            else:
                self.stop(worker, f"its card goes to {record.job.label}")
        for slot in slots:
            self._pool.refresh(slot)
        self._run_when_ready(lease)

    def lease_warm(self, record: JobState, worker: Worker) -> None:
        """Run a one-card job on an idle worker at once."""
        load = 0.0 if worker.key == record.key else record.estimate.load_s
        lease = self._open(record, (worker.slot,), self._ledger.now, load + record.estimate.run_s)
        worker.state = WorkerState.BUSY
        lease.ready[0] = worker
        self._pool.refresh(worker.slot)
        self._run_when_ready(lease)

    def start_warm(self, slot: Slot, bucket: Bucket) -> None:
        """Start a worker for the jobs of ``bucket`` and later others."""
        worker = self._new_worker(slot, for_lease=False)
        self._pending.attach(worker, bucket)
        first = bucket.queue.longest()
        self._pool.refresh(slot)
        self._ledger.give(
            StartWorker(
                worker_id=worker.worker_id,
                card=slot.card,
                kind=first.job.process_kind if first is not None else "",
                check_card=self._is_unchecked(slot.card, gang=False),
            )
        )

    def ready(self, worker: Worker) -> None:
        """Handle the start of a worker."""
        if worker.state is not WorkerState.STARTING:
            return
        if worker.bucket is not None:
            worker.bucket.starting -= 1
        took = max(0.0, self._ledger.now - worker.started_at)
        self.start_s += _START_LEARNING * (took - self.start_s)
        lease = worker.lease
        worker.state = WorkerState.IDLE if lease is None else WorkerState.BUSY
        if lease is not None:
            lease.ready[lease.slots.index(worker.slot)] = worker
            self._run_when_ready(lease)
        self._pool.refresh(worker.slot)

    def stop(self, worker: Worker, reason: str) -> None:
        """Stop a worker; its card is free once it has ended."""
        if worker.state is WorkerState.STOPPING:
            return
        self.retire(worker)
        self._ledger.starts.withdrawn(str(worker.slot.card))
        patience_s = self._ledger.settings.stop_patience_s
        self._ledger.stops.append((self._ledger.now + patience_s, worker))
        self._ledger.give(StopWorker(worker_id=worker.worker_id, reason=reason))
        self._pool.refresh(worker.slot)

    def retire(self, worker: Worker) -> None:
        """Give a worker no more work; ``gone`` follows."""
        self._pending.detach(worker)
        worker.state = WorkerState.STOPPING

    def gone(self, worker: Worker) -> None:
        """Remove a worker whose process has ended; a lease that waited for its card goes on."""
        self.vanished(worker)
        lease = worker.lease
        if lease is not None and not lease.running:
            self._start_for(lease, lease.slots.index(worker.slot))
        self._pool.refresh(worker.slot)

    def vanished(self, worker: Worker) -> None:
        """Forget a worker that is gone, perhaps with its node."""
        self.retire(worker)
        self._pool.idle.pop(worker.worker_id, None)
        del self._ledger.workers[worker.worker_id]
        worker.slot.worker = None

    def close(self, lease: Lease) -> None:
        """Take the cards back; workers on them become idle unless they are stopped."""
        del self.current[lease.attempt.attempt_id]
        self.widths[len(lease.slots)] -= 1
        lease.record.lease = None
        for slot in lease.slots:
            slot.lease = None
            if slot.worker is not None and slot.worker.state is WorkerState.BUSY:
                slot.worker.state = WorkerState.IDLE
            self._pool.refresh(slot)

    def cancel(self, lease: Lease, reason: str) -> None:
        """End a lease that does not run, and stop the workers that were started for it."""
        self.close(lease)
        for slot in lease.slots:
            if slot.worker is not None and slot.worker.for_lease:
                self.stop(slot.worker, reason)

    @property
    def card_seconds(self) -> float:
        """Estimated work left in the leases."""
        now, leases = self._ledger.now, self.current.values()
        return max(0.0, sum(len(lease.slots) * (lease.ends_at - now) for lease in leases))

    def _open(self, record: JobState, slots: SlotSet, runs_at: float, lasts_s: float) -> Lease:
        record.phase = Phase.LEASED
        record.number += 1
        attempt = Attempt(
            attempt_id=f"{record.job_id}-{record.number}",
            job_id=record.job_id,
            number=record.number,
            job=record.concrete_job(),
            cards=tuple(slot.card for slot in slots),
            purpose=record.purpose,
        )
        lease = Lease(
            record=record, attempt=attempt, slots=slots, lasts_s=lasts_s, ends_at=runs_at + lasts_s
        )
        for slot in slots:
            if slot.lease is not None:
                raise AssertionError(f"{slot.card} is held by {slot.lease.attempt.attempt_id}")
            slot.lease = lease
        record.cell_cards.update(attempt.cards)
        record.lease = self.current[attempt.attempt_id] = lease
        self.widths[len(slots)] += 1
        return lease

    def _start_for(self, lease: Lease, rank: int) -> None:
        slot = lease.slots[rank]
        worker = self._new_worker(slot, for_lease=True)
        here = tuple(own.card.index for own in lease.slots if own.server is slot.server)
        self._ledger.give(
            StartWorker(
                worker_id=worker.worker_id,
                card=slot.card,
                rank=rank,
                local_rank=here.index(slot.card.index),
                world_size=len(lease.slots),
                gang=here if len(lease.slots) > 1 else (),
                kind=lease.record.job.process_kind,
                # All ranks of a gang or none: they exchange.
                check_card=lease.checks_cards,
            )
        )

    def _is_unchecked(self, card: Card, *, gang: bool) -> bool:
        """Return whether the card is to be checked, by the first worker of this sort."""
        new = self._ledger.settings.check_cards and (card, gang) not in self._checked
        self._checked.add((card, gang))
        return new

    def _run_when_ready(self, lease: Lease) -> None:
        if len(lease.ready) < len(lease.slots):
            return
        lease.began_at = self._ledger.now
        lease.ends_at = lease.began_at + lease.lasts_s
        workers = [lease.ready[rank] for rank in range(len(lease.slots))]
        for worker in workers:
            worker.key, worker.replicate = lease.record.key, lease.record.job.replicate
        self._ledger.attempts.begun(lease.attempt.job_id)
        self._ledger.issued[lease.attempt.attempt_id] = lease.attempt
        worker_ids = tuple(worker.worker_id for worker in workers)
        self._ledger.give(RunAttempt(attempt=lease.attempt, worker_ids=worker_ids))

    def _new_worker(self, slot: Slot, *, for_lease: bool) -> Worker:
        self._numbers += 1
        worker = Worker(
            worker_id=f"{slot.node.name}-{slot.card.accelerator}{slot.card.index}-{self._numbers}",
            slot=slot,
            state=WorkerState.STARTING,
            started_at=self._ledger.now,
            for_lease=for_lease,
        )
        slot.worker = self._ledger.workers[worker.worker_id] = worker
        self._ledger.starts.begun(str(slot.card))
        return worker
