"""Leases of cards to attempts, and the worker processes on the cards.

A lease gives a card set to one attempt, from the decision until its outcome. An attempt that needs
processes of its own (a gang, ``isolation: process``, a retry elsewhere) waits until the old workers
on its cards are gone and new ones ready. Workers started without a lease serve one-card jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.core.events import Command, RunAttempt, StartWorker, StopWorker
from orchestrator.core.outcome import Attempt
from orchestrator.core.topology import Card
from orchestrator.scheduler.queues import Bucket, PendingJobs
from orchestrator.scheduler.state import (
    CardPool,
    JobState,
    Phase,
    ScheduleSettings,
    Slot,
    SlotSet,
    Worker,
    WorkerState,
)

#: Weight of the newest observation in the estimate of how long a worker takes to start.
_START_LEARNING = 0.2


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """Lease of a card set to one attempt."""

    record: JobState
    attempt: Attempt
    slots: SlotSet  # in rank order
    lasts_s: float  # estimated, once it runs
    ends_at: float  # estimated
    ready: dict[int, Worker] = field(default_factory=dict)  # by rank
    began_at: float | None = None  # time of its ``RunAttempt``
    asks_passports: bool = False  # of its cards
    queued: bool = False  # its attempt was stopped while it waited for a CPU slot

    @property
    def running(self) -> bool:
        """Return whether its attempt runs; until then its workers are gathered."""
        return self.began_at is not None


class Leases:
    """Leases and workers of one kind of accelerator; methods do their work as their iterator of
    commands is consumed."""

    def __init__(self, pool: CardPool, pending: PendingJobs, settings: ScheduleSettings) -> None:
        self.workers: dict[str, Worker] = {}
        self.current: dict[str, Lease] = {}  # by attempt id
        self.gangs: dict[int, int] = {}  # leases by width
        self.start_s = settings.worker_start_s
        self.starting = 0  # workers
        self._pool = pool
        self._pending = pending
        self._numbers = 0
        self._passports = settings.passports
        self._examined: set[tuple[Card, bool]] = set()  # cards, alone and in a gang
        self._ends = 0.0  # sum over leases of width * ends_at
        self._cards = 0  # in leases

    def lease_fresh(self, record: JobState, slots: SlotSet, now: float) -> Iterator[Command]:
        """Dequeue a job and lease it ``slots``; it runs when its own workers are ready."""
        slots = tuple(sorted(slots, key=lambda slot: slot.order))
        lease = self._open(record, slots, now + self.start_s, record.estimate.total_s)
        gang = record.width > 1
        wanted = [self._wants_passport(slot.card, gang=gang) for slot in slots]
        lease.asks_passports = any(wanted)
        for rank, slot in enumerate(slots):
            worker = slot.worker
            if worker is None:
                yield self._start_for(lease, rank, now)
            elif record.width == 1 and worker.fresh:
                self._pending.detach(worker)
                worker.state, worker.for_lease = WorkerState.BUSY, True
                lease.ready[rank] = worker
            elif worker.state is not WorkerState.STOPPING:
                yield from self.stop(worker, f"its card goes to {record.job.label}")
        for slot in slots:
            self._pool.refresh(slot)
        yield from self._run_when_ready(lease, now)

    def lease_warm(self, record: JobState, worker: Worker, now: float) -> Iterator[Command]:
        """Run a one-card job on an idle worker at once."""
        load = 0.0 if worker.key == record.key else record.estimate.load_s
        lease = self._open(record, (worker.slot,), now, load + record.estimate.run_s)
        worker.state = WorkerState.BUSY
        lease.ready[0] = worker
        self._pool.refresh(worker.slot)
        yield from self._run_when_ready(lease, now)

    def start_warm(self, slot: Slot, bucket: Bucket, now: float) -> StartWorker:
        """Start a worker for the jobs of ``bucket`` and later others."""
        worker = self._new_worker(slot, now, for_lease=False)
        self._pending.attach(worker, bucket)
        first = bucket.queue.longest()
        kind = first.job.process_kind if first is not None else ""
        self._pool.refresh(slot)
        return StartWorker(
            worker_id=worker.worker_id,
            card=slot.card,
            kind=kind,
            passport=self._wants_passport(slot.card, gang=False),
        )

    def ready(self, worker: Worker, now: float) -> Iterator[Command]:
        """Handle the start of a worker."""
        if worker.state is not WorkerState.STARTING:
            return
        self.starting -= 1
        self._pending.started(worker)
        took = max(0.0, now - worker.started_at)
        self.start_s += _START_LEARNING * (took - self.start_s)
        lease = worker.slot.lease
        if lease is not None:
            worker.state = WorkerState.BUSY
            lease.ready[lease.slots.index(worker.slot)] = worker
            yield from self._run_when_ready(lease, now)
        else:
            worker.state = WorkerState.IDLE
        self._pool.refresh(worker.slot)

    def stop(self, worker: Worker, reason: str) -> Iterator[Command]:
        """Stop a worker; its card is free once it has ended."""
        if worker.state is WorkerState.STOPPING:
            return
        self.retire(worker)
        yield StopWorker(worker_id=worker.worker_id, reason=reason)
        self._pool.refresh(worker.slot)

    def retire(self, worker: Worker) -> None:
        """Give a worker no more work; ``gone`` follows."""
        self._pending.detach(worker)
        self.starting -= worker.state is WorkerState.STARTING
        worker.state = WorkerState.STOPPING

    def gone(self, worker: Worker, now: float) -> Iterator[Command]:
        """Remove a worker whose process has ended; a lease that waited for its card goes on."""
        slot = worker.slot
        self.vanished(worker)
        lease = slot.lease
        if lease is not None and not lease.running:
            yield self._start_for(lease, lease.slots.index(slot), now)
        self._pool.refresh(slot)

    def vanished(self, worker: Worker) -> None:
        """Forget a worker that is gone, perhaps with its node."""
        self.retire(worker)
        self._pool.idle.pop(worker.worker_id, None)
        del self.workers[worker.worker_id]
        worker.slot.worker = None

    def close(self, lease: Lease) -> None:
        """Take the cards back; workers on them become idle unless they are stopped."""
        width = len(lease.slots)
        del self.current[lease.attempt.attempt_id]
        self.gangs[width] -= 1
        self._ends -= width * lease.ends_at
        self._cards -= width
        for slot in lease.slots:
            slot.lease = None
            if slot.worker is not None and slot.worker.state is WorkerState.BUSY:
                slot.worker.state = WorkerState.IDLE
            self._pool.refresh(slot)

    def cancel(self, lease: Lease, reason: str) -> Iterator[Command]:
        """End a lease that does not run, and stop the workers that were started for it."""
        self.close(lease)
        for slot in lease.slots:
            if slot.worker is not None and slot.worker.for_lease:
                yield from self.stop(slot.worker, reason)

    def leased_card_seconds(self, now: float) -> float:
        """Estimated work left in the leases."""
        return max(0.0, self._ends - self._cards * now)

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
        self.current[attempt.attempt_id] = lease
        self.gangs[len(slots)] = self.gangs.get(len(slots), 0) + 1
        self._ends += len(slots) * lease.ends_at
        self._cards += len(slots)
        return lease

    def _start_for(self, lease: Lease, rank: int, now: float) -> StartWorker:
        slot = lease.slots[rank]
        worker = self._new_worker(slot, now, for_lease=True)
        here = tuple(own.card.index for own in lease.slots if own.server is slot.server)
        return StartWorker(
            worker_id=worker.worker_id,
            card=slot.card,
            rank=rank,
            local_rank=here.index(slot.card.index),
            world_size=len(lease.slots),
            gang=here if len(lease.slots) > 1 else (),
            kind=lease.record.job.process_kind,
            # All ranks of a gang or none: they exchange.
            passport=lease.asks_passports,
        )

    def _wants_passport(self, card: Card, *, gang: bool) -> bool:
        """Return whether the card has no passport yet from a worker of this sort."""
        new = self._passports and (card, gang) not in self._examined
        self._examined.add((card, gang))
        return new

    def _run_when_ready(self, lease: Lease, now: float) -> Iterator[Command]:
        width = len(lease.slots)
        if len(lease.ready) < width:
            return
        ends_at = now + lease.lasts_s
        self._ends += width * (ends_at - lease.ends_at)
        lease.ends_at = ends_at
        lease.began_at = now
        workers = [lease.ready[rank] for rank in range(width)]
        for worker in workers:
            worker.used, worker.key = True, lease.record.key
            worker.replicate = lease.record.job.replicate
        ids = tuple(worker.worker_id for worker in workers)
        yield RunAttempt(attempt=lease.attempt, worker_ids=ids)

    def _new_worker(self, slot: Slot, now: float, *, for_lease: bool) -> Worker:
        self._numbers += 1
        number = self._numbers
        worker = Worker(
            worker_id=f"{slot.node.name}-{slot.card.accelerator}{slot.card.index}-{number}",
            slot=slot,
            state=WorkerState.STARTING,
            started_at=now,
            for_lease=for_lease,
        )
        slot.worker = worker
        self.workers[worker.worker_id] = worker
        self.starting += 1
        return worker
