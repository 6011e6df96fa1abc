"""Placement: which waiting job gets which cards, for one kind of accelerator.

The longest job goes first, on the first legal set of cards that is open:

1. A gang longer than every one-card job gets an open set. If no gang of a width runs or has cards
   reserved, one set is drained for it, so that gangs never starve; jobs that end in time may run
   there meanwhile.
2. One-card jobs go to an idle worker that holds their model; else an idle worker takes the model
   with most work waiting; else a new worker starts. Each step costs more than the one before, so it
   is taken only if the workers already serving that model would be slower.
3. Gangs get the open sets that one-card jobs leave.

With a deadline only jobs that can end before it start. Only servers on which a card came open are
considered, so the cost of a decision does not grow with the number of jobs.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING

from orchestrator.scheduler.queues import FRESH, Bucket
from orchestrator.scheduler.state import (
    JobState,
    Reservation,
    Server,
    Slot,
    SlotSet,
    Worker,
    WorkerState,
)

if TYPE_CHECKING:
    from orchestrator.scheduler.pool import Pool

#: Least seconds between two checks of work left to busy workers.
_LOOK_AGAIN_S = 1.0


class Placement:
    """Decides; ``Leases`` carries the decisions out."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.pending, self.leases = pool, pool.pending, pool.leases
        self.ledger = pool.ledger
        self.reservations: dict[str, Reservation] = {}  # by job id
        self._passed_over: dict[Server, None] = {}  # with open sets left to one-card jobs

    def assign(self) -> float | None:
        """Place jobs on open cards; returns when to look again, if time alone may help."""
        if self.ledger.work_until < inf:
            waiting_s = self.pending.firsts_s if self.pending.firsts else self.pending.card_seconds
            cards_s = self.ledger.left_s * max(1, self.pool.usable_cards)
            self.pending.too_much = waiting_s + self.leases.card_seconds > cards_s
        self._passed_over.clear()
        # Gangs that are wider than a server start, or servers are drained for them.
        for width in filter(self.pool.spans, self.pending.widths()):
            while self._place_on_servers(width):
                pass
            if any(map(_has_room, self.pool.dirty)):
                self._reserve(width)
        while self.pool.dirty:  # a reservation made on the way may add servers
            server = min(self.pool.dirty, key=lambda server: server.order)
            self.pool.dirty.discard(server)
            self._fill(server)
        self._use_idle_workers()
        self._swap_models()
        self._start_workers()
        for server in list(self._passed_over):
            for width in self.pending.widths():
                while (
                    _has_room(server)
                    and not self._must_wait(width)
                    and self._place(server, width, in_turn=False)
                ):
                    pass
        waiting = any(len(bucket.queue) for bucket in self.pending.buckets.values())
        if waiting and (self.pool.idle or self.pool.vacant):  # jobs that are left to busy workers
            return self.ledger.now + max(self.leases.start_s, _LOOK_AGAIN_S)
        return None

    @property
    def remaining_s(self) -> float:
        """Estimated seconds until all work is done, were it spread evenly."""
        reserved = sum(r.record.width * r.record.duration for r in self.reservations.values())
        work = self.pending.card_seconds + reserved + self.leases.card_seconds
        return work / max(1, self.pool.usable_cards)

    def release(self, reservation: Reservation) -> JobState:
        """Give up a reservation; the caller queues its job again."""
        record = reservation.record
        del self.reservations[record.job_id]
        record.reservation = None
        for slot in reservation.slots:
            slot.reservation = None
            self.pool.refresh(slot)
        return record

    @property
    def _left_for_fresh_s(self) -> float:
        return self.ledger.left_s - self.leases.start_s

    def _fill(self, server: Server) -> None:
        """Place gangs, and jobs that must avoid some cards, on one server."""
        for reservation in dict.fromkeys(slot.reservation for slot in server.slots.values()):
            if reservation is not None and all(slot.open for slot in reservation.slots):
                self.leases.lease_fresh(self.release(reservation), reservation.slots)
        for width in self.pending.widths():
            if self.pool.spans(width):
                continue
            while self._place(server, width):
                pass
            if _has_room(server):
                self._reserve(width)
        if self.pending.particular.get(1):
            while self._place(server, 1):
                pass
        for slot in server.slots.values():
            free = slot.worker is None or slot.worker.state is WorkerState.IDLE
            if slot.reservation is not None and slot.open and free:
                self._backfill(slot)

    def _place(self, server: Server, width: int, *, in_turn: bool = True) -> bool:
        """Start one job of this width on unreserved cards, else on reserved ones with time left;
        ``in_turn`` leaves unreserved cards to one-card jobs that come before it."""
        passed = in_turn and width > 1 and not self.pending.is_turn_of(width)
        for reserved in (False, True):
            for slots in self._open_sets(server, width, reserved=reserved):
                if not reserved and passed:
                    self._passed_over[server] = None
                    break
                if not reserved and width > 1 and any(map(_is_spoken_for, slots)):
                    continue
                cards = [slot.card for slot in slots]
                within = min(self._window_s(slots), self.ledger.left_s) - self.leases.start_s
                record = self.pending.best_for(width, cards, within)
                if record is not None:
                    self.leases.lease_fresh(self.pending.take(record), slots)
                    return True
        return False

    def _open_sets(self, server: Server, width: int, *, reserved: bool) -> list[SlotSet]:
        """Open legal sets of a server with or without reserved cards, best first: those that stop
        fewest workers, and single cards where aligned groups are broken already."""
        ranked = []
        for group in server.groups(width):
            if not all(slot.open for slot in group):
                continue
            if reserved == any(slot.reservation is not None for slot in group):
                workers = sum(slot.worker is not None for slot in group)
                broken = server.broken(group[0]) if width == 1 else (0, 0)
                ranked.append((workers, -broken[0], -broken[1], group[0].order, group))
        return [group for *_, group in sorted(ranked, key=lambda entry: entry[:4])]

    def _reserve(self, width: int) -> None:
        """Drain a set of cards for the next gang of this width, if the width has none."""
        reserved = any(one.record.width == width for one in self.reservations.values())
        if reserved or self.leases.widths[width] or self._must_wait(width):
            return
        record = next(iter(self.pending.candidates(width, self._left_for_fresh_s)), None)
        slots = self._soonest_set(record) if record is not None else None
        if record is None or slots is None:
            return
        if all(slot.open for slot in slots):
            self.leases.lease_fresh(self.pending.take(record), slots)
            return
        now = self.ledger.now
        start_by = now + max(slot.free_in(now) for slot in slots)
        if record.duration > self.ledger.work_until - start_by - self.leases.start_s:
            return  # drained in vain: it could not end in time
        self.pending.take(record)
        reservation = Reservation(record=record, slots=slots, start_by=start_by)
        record.reservation = self.reservations[record.job_id] = reservation
        for slot in slots:
            slot.reservation = reservation
            if slot.worker is not None:
                self.pending.detach(slot.worker)
            self.pool.refresh(slot)

    def _must_wait(self, width: int) -> bool:
        """Return whether gangs of this width would take the cards of firsts before a deadline."""
        hurried = self.ledger.work_until < inf and self.pending.firsts > 0
        return hurried and not self.pending.turn_of(width)[0]

    def _soonest_set(self, record: JobState) -> SlotSet | None:
        """The unreserved legal set that should be free first, then with least idle time."""
        if self.pool.spans(record.width):
            return self._soonest_servers(record)
        best: SlotSet | None = None
        least, now = (inf, inf), self.ledger.now
        for server in self.pool.servers.values():
            for group in server.groups(record.width):
                latest = total = 0.0
                for slot in group:  # the one loop over the whole cluster: kept lean
                    if not _reservable(record, slot):
                        break
                    wait = slot.free_in(now)
                    latest, total = max(latest, wait), total + wait
                else:
                    if (latest, -total) < least:
                        best, least = group, (latest, -total)
        return best

    def _place_on_servers(self, width: int) -> bool:
        for record in self.pending.candidates(width, self._left_for_fresh_s):

            def free(slot: Slot, record: JobState = record) -> bool:
                return slot.open and _reservable(record, slot)

            for servers in self.pool.spanning_servers(width, free):
                slots = tuple(slot for server in servers for slot in server)
                self.leases.lease_fresh(self.pending.take(record), slots[:width])
                return True
        return False

    def _soonest_servers(self, record: JobState) -> SlotSet | None:
        def free_in(server: SlotSet) -> float:
            return max(slot.free_in(self.ledger.now) for slot in server)

        for servers in self.pool.spanning_servers(record.width, partial(_reservable, record)):
            soonest = sorted(servers, key=free_in)
            return tuple(slot for server in soonest for slot in server)[: record.width]
        return None

    def _use_idle_workers(self) -> None:
        """Step one: jobs go to idle workers that hold their model."""
        for worker in list(self.pool.idle.values()):
            own = worker.bucket or self.pending.buckets.get(worker.key or "no model")
            if own is None or not len(own.queue) or worker.worker_id not in self.pool.idle:
                continue
            self.pending.attach(worker, own)
            other = self._first_elsewhere(own, worker) or self._overdue(worker)
            if other is None or not self._serve(other, worker.slot):
                self._serve(own, worker.slot)

    def _first_elsewhere(self, own: Bucket, worker: Worker) -> Bucket | None:
        """A model with firsts that no other worker takes, where ``own`` has none."""
        if own.queue.firsts or not self.pending.firsts:
            return None
        for bucket in self.pending.short_buckets():
            if bucket.queue.firsts > bucket.starting and _may_serve(worker, bucket):
                gains = bucket.key == FRESH or self._gains_from_another(bucket, 0.0)
                return bucket if gains else None
        return None

    def _overdue(self, worker: Worker) -> Bucket | None:
        """A model without workers whose longest job exceeds all remaining work: it must start now,
        even on a worker that has work of its own model."""
        for bucket in self.pending.short_buckets():
            longest = bucket.queue.longest()
            if bucket.workers or longest is None or not _may_serve(worker, bucket):
                continue
            if longest.duration >= self.remaining_s + bucket.load_s:
                return bucket
        return None

    def _backfill(self, slot: Slot) -> None:
        """Run a job that ends before the card's reservation begins."""
        worker = slot.worker
        window = min(self._window_s((slot,)), self.ledger.left_s)
        window -= 0.0 if worker is not None else self.leases.start_s
        own = self.pending.buckets.get(worker.key or "no model") if worker is not None else None
        for bucket in ([own] if own is not None else []) + self.pending.short_buckets():
            if bucket.key == FRESH or (worker is not None and not _may_serve(worker, bucket)):
                continue
            load_s = 0.0 if bucket is own else bucket.load_s
            record = bucket.queue.longest_within(window - load_s, (slot.card,))
            if record is None:
                continue
            self.pending.take(record)
            if worker is not None:
                self.leases.lease_warm(record, worker)
            else:
                self.leases.lease_fresh(record, (slot,))
            return

    def _swap_models(self) -> None:
        """Step two: workers with nothing left of their model take up another."""
        while self.pool.idle:
            bucket = self._wanting(0.0)
            if bucket is None:
                self._make_room()
                return
            if bucket.key == FRESH and self.pool.vacant:
                slot = self._vacant_for(bucket)
            else:
                slot = self._idle_for(bucket).slot
            self._serve(bucket, slot)

    def _idle_for(self, bucket: Bucket) -> Worker:
        """An idle worker that may serve the model, preferably on a card new to the next cell."""
        idle = [worker for worker in self.pool.idle.values() if _may_serve(worker, bucket)]
        record = bucket.queue.longest() if self.pending.seed is not None else None
        if record is None:
            return idle[0]
        return min(idle, key=lambda worker: worker.slot.card in record.cell_cards)

    def _make_room(self) -> None:
        """Stop idle workers of other replicates if a fresh process is needed and no card vacant."""
        if self.pending.seed is None or self.pool.vacant:
            return
        workers = [one for one in self.ledger.workers.values() if one.pool is self.pool]
        stopping = sum(worker.state is WorkerState.STOPPING for worker in workers)
        for bucket in self.pending.short_buckets():
            if len(bucket.queue) <= bucket.starting + stopping or bucket.key == FRESH:
                continue
            idle = [worker for worker in self.pool.idle.values() if not _may_serve(worker, bucket)]
            setup = self.leases.start_s + bucket.load_s
            enough = len(bucket.workers) + stopping
            if not idle or (enough and bucket.queue.work_s <= enough * setup):
                continue
            record = bucket.queue.longest_within(self.ledger.left_s - setup)
            if record is None:
                continue
            worker = min(idle, key=lambda worker: worker.slot.card in record.cell_cards)
            self.leases.stop(worker, f"replicate {bucket.replicate} needs a fresh process")
            stopping += 1

    def _start_workers(self) -> None:
        """Step three: new workers on vacant cards."""
        while self.pool.vacant:
            bucket = self._wanting(self.leases.start_s)
            if bucket is None:
                return
            slot = self._vacant_for(bucket)
            if bucket.key == FRESH:
                self._serve(bucket, slot)
            else:
                self.leases.start_warm(slot, bucket)

    def _vacant_for(self, bucket: Bucket) -> Slot:
        """A vacant card, preferably one new to the next replicated cell."""
        record = bucket.queue.longest() if self.pending.seed is not None else None
        avoided = record.cell_cards if record is not None else ()
        gangs_wait = bool(self.pending.widths() or self.reservations)
        return self.pool.pick_vacant(leave_groups=gangs_wait, avoided=avoided)

    def _wanting(self, start_s: float) -> Bucket | None:
        """The model that one more worker should serve; ``start_s`` is 0 for a running worker."""
        idle = self.pool.idle.values() if self.pending.seed is not None and not start_s else None
        for bucket in self.pending.short_buckets():
            if idle is not None and not any(_may_serve(worker, bucket) for worker in idle):
                continue
            setup = self.leases.start_s if bucket.key == FRESH else start_s + bucket.load_s
            if bucket.queue.longest_within(self.ledger.left_s - setup) is None:
                continue
            if bucket.key == FRESH or self._gains_from_another(bucket, start_s):
                return bucket
        return None

    def _gains_from_another(self, bucket: Bucket, start_s: float) -> bool:
        """Return whether work is left after the time another worker takes to start and load."""
        setup, waiting = start_s + bucket.load_s, bucket.queue.work_s
        if not bucket.workers or waiting > len(bucket.workers) * setup:
            return True
        spare, now = 0.0, self.ledger.now
        for worker in bucket.workers.values():
            load_s = 0.0 if worker.key == bucket.key else bucket.load_s
            rest_s = worker.slot.free_in(now)
            if worker.state is WorkerState.STARTING:
                rest_s = abs(worker.started_at + self.leases.start_s - now)
            spare += max(0.0, setup - rest_s - load_s)
        return waiting > spare

    def _serve(self, bucket: Bucket, slot: Slot) -> bool:
        """Run the next job of a model on a card (without a worker if the job needs its own
        process); False if no job would end in time."""
        worker = slot.worker if bucket.key != FRESH else None
        if worker is None:
            setup = self.leases.start_s
        else:
            setup = 0.0 if worker.key == bucket.key else bucket.load_s
        record = self.pending.next_of(bucket.queue, self.ledger.left_s - setup, (slot.card,))
        if record is None:
            return False
        if worker is None:
            self.leases.lease_fresh(self.pending.take(record), (slot,))
        else:
            self.pending.attach(worker, bucket)
            self.leases.lease_warm(self.pending.take(record), worker)
        return True

    def _window_s(self, slots: SlotSet) -> float:
        """Seconds that the cards may be used before a gang needs them."""
        reservations = (slot.reservation for slot in slots)
        starts = (one.start_by - self.ledger.now for one in reservations if one is not None)
        return min(starts, default=inf)


def _reservable(record: JobState, slot: Slot) -> bool:
    free = slot.reservation is None and not slot.quarantined
    return free and not (record.avoided and record.avoids(slot.card))


def _is_spoken_for(slot: Slot) -> bool:
    worker = slot.worker
    return worker is not None and worker.state is WorkerState.STARTING and worker.bucket is not None


def _has_room(server: Server) -> bool:
    return any(slot.open and slot.reservation is None for slot in server.slots.values())


def _may_serve(worker: Worker, bucket: Bucket) -> bool:
    """Return whether the worker has run nothing of another replicate."""
    return bucket.key == FRESH or worker.replicate in (None, bucket.replicate)
