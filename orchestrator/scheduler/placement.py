"""Assignment of waiting jobs to cards, for one kind of accelerator.

The order of preference, and why:

1. Open cards are offered to gangs first, the widest set to the widest. A gang takes them if its
   width would otherwise end after all narrower jobs; what those do not take goes to gangs after
   all. For a width that is short of cards a set is reserved and drained; what runs there meanwhile
   must be estimated to end in time.
2. Except that a longer job goes before wider ones if what is left does not last several times as
   long: started last, it would hold up the end of the run alone, by more than estimated.
3. One-card jobs go to an idle worker that holds their model; then an idle worker takes the model
   that has most work waiting; then a new worker is started. Each step costs more than the one
   before, so it is taken only if the workers already serving that model would be slower.

A worker serves one replicate number (``queues.py``). Where none that is idle serves the number
of the jobs that wait, one is stopped, so that a fresh process can take its card.

With a deadline, nothing is given out that could not end before it, however early it was planned;
near the end this makes short jobs fill the gaps that longer ones leave. The first cell of each
configuration goes before the others, whatever model a worker holds: see ``queues.py``.

Only servers on which a card came open are looked at, so a decision costs the same in a run of a
hundred jobs and of a million.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from functools import partial
from math import inf

from orchestrator.core.events import Command
from orchestrator.scheduler.leases import Leases, rest_s, spare_s
from orchestrator.scheduler.queues import FRESH, Bucket, PendingJobs
from orchestrator.scheduler.state import (
    CardPool,
    JobRecord,
    Reservation,
    ScheduleSettings,
    Server,
    Slot,
    SlotSet,
    Worker,
    WorkerState,
)

#: A width gets open cards if its work would take at least so much longer than that of narrower
#: jobs. Chosen by simulation: ``benchmarks/hard_scheduling.py``.
NARROW_FAVOUR = 1 / 0.6
#: A width is short of cards if it has less than this part of its share.
SHORT_PART = 0.5


class Shares:
    """The card sets that each width has, beside the work that it has left."""

    def __init__(
        self, pending: PendingJobs, leases: Leases, reserved_sets: Mapping[int, int]
    ) -> None:
        self._pending, self._leases = pending, leases
        self._reserved_sets = reserved_sets  # by width; changes
        self.left_open = 0  # cards left to narrower jobs in this round, which have none on them yet

    def sets(self, width: int) -> int:
        """Count the card sets that gangs of this width have or wait for."""
        return self._leases.gangs.get(width, 0) + self._reserved_sets.get(width, 0)

    def is_short(self, width: int, remaining_s: float) -> bool:
        """Return whether a width has no set, or far fewer than its work is worth.

        Args:
            width: cards of each gang.
            remaining_s: until all work is done, were it spread evenly.
        """
        fair = self._pending.gang_work(width) / (width * max(remaining_s, 1e-9))
        return self.sets(width) < max(1, int(SHORT_PART * fair))

    def is_due(self, width: int, passed: int) -> bool:
        """Return whether an open set should go to a gang of this width, not to narrower jobs.

        Args:
            width: cards of the set, more than one.
            passed: other cards of the same server that were left to narrower jobs just before.
        """
        if self._is_longest(width):
            return True
        single_s = self._pending.card_seconds  # less that of gangs, below: card-seconds
        cards = passed + self.left_open + self._leases.gangs.get(1, 0) + self._pending.starting
        narrower_s = 0.0
        for other in self._pending.gangs:
            work_s = self._pending.gang_work(other)
            single_s -= work_s
            if other < width:
                narrower_s += work_s
                cards += other * self.sets(other)
        narrower_s += max(0.0, single_s)
        lasts_s = self._pending.gang_work(width) / (width * (self.sets(width) + 1))
        return lasts_s >= NARROW_FAVOUR * narrower_s / (cards + width)

    def _is_longest(self, width: int) -> bool:
        """Tell if no narrower job lasts longer than the next gang of this width: narrower ones fill
        what such gangs leave, but a long gang that begins last ends last."""
        narrower = [
            record
            for other in self._pending.gangs
            if other < width
            for record in self._pending.candidates(other)
        ]
        if (single := self._pending.longest_single()) is not None:
            narrower.append(single)
        longest_s = max((record.duration for record in narrower), default=0.0)
        own = self._pending.candidates(width)
        return bool(own) and max(record.duration for record in own) >= longest_s


class Gangs:
    """Places jobs of several cards, and keeps the cards that are reserved for them."""

    def __init__(
        self, pool: CardPool, pending: PendingJobs, leases: Leases, settings: ScheduleSettings
    ) -> None:
        self.pool, self.pending, self.leases = pool, pending, leases
        self.urgency = settings.urgency
        self.work_until = settings.work_until  # on the clock of the events
        self.reservations: dict[str, Reservation] = {}  # by job id
        self._reserved_widths: dict[int, int] = {}
        self._shares = Shares(pending, leases, self._reserved_widths)
        self._passed_over: dict[str, Server] = {}  # by id

    def left_s(self, now: float) -> float:
        """Seconds in which what is started now must end."""
        return self.work_until - now

    def remaining_s(self, now: float) -> float:
        """Estimated seconds until all work is done, were it spread evenly."""
        reserved = sum(r.record.width * r.record.duration for r in self.reservations.values())
        work = self.pending.card_seconds + reserved + self.leases.leased_card_seconds(now)
        return work / max(1, self.pool.usable_cards)

    def release(self, reservation: Reservation) -> JobRecord:
        """Give up a reservation; its job waits for new cards, with the caller."""
        record = reservation.record
        del self.reservations[record.job_id]
        self._reserved_widths[record.width] -= 1
        record.reservation = None
        for slot in reservation.slots:
            slot.reservation = None
            self.pool.refresh(slot)
        return record

    def redeem(self, server: Server, now: float) -> Generator[Command, None, bool]:
        """Start a gang whose reserved set has become free."""
        for slot in server.slots.values():
            reservation = slot.reservation
            if reservation is not None and all(other.open for other in reservation.slots):
                yield from self.leases.lease_fresh(
                    self.release(reservation), reservation.slots, now
                )
                return True
        return False

    def place_urgent(self, server: Server, now: float) -> Generator[Command, None, bool]:
        """Start a job that would otherwise end last, though wider ones wait, the longest first.
        Where no gang waits, longest-first needs no exception."""
        widths = self.pending.widths()
        if not widths or not has_room(server):
            return False
        widest = self.pending.candidates(widths[0])
        if not widest:
            return False
        narrower = [self.pending.longest_single()]
        for width in widths[1:]:
            narrower += self.pending.candidates(width)[-1:]
        longer = (
            record
            for record in narrower
            if record is not None and record.duration > widest[-1].duration
        )
        urgent = (record for record in longer if self._is_urgent(record, now))
        record = max(urgent, key=lambda record: (record.duration, -record.order), default=None)
        if record is None or record.particular or (not record.first and self.pending.firsts):
            return False
        if record.cold_s > self.left_s(now) - self.leases.start_s:
            return False
        for slots in self._open_sets(server, record.width, reserved=False):
            yield from self.leases.lease_fresh(self.pending.take(record), slots, now)
            return True
        return False

    def _is_urgent(self, record: JobRecord, now: float) -> bool:
        """Return whether a job would hold up the end of the run, were it to wait for all wider
        ones: what is left does not last several times as long."""
        return record.duration * self.urgency >= self.remaining_s(now)

    def place(
        self, server: Server, width: int, now: float, *, whatever_is_due: bool = False
    ) -> Generator[Command, None, bool]:
        """Start one job of this width, on unreserved cards that are due to it (or on any, if asked)
        or else on some with time to spare."""
        for reserved in (False, True):
            passed = set[int]()  # indices of cards, which may be in several sets
            for slots in self._open_sets(server, width, reserved=reserved):
                own = {slot.card.index for slot in slots}
                left = len(passed - own)
                if not reserved and not self._may_take(slots, left, now, whatever_is_due):
                    passed |= own
                    self._passed_over[server.server_id] = server
                    continue
                cards = [slot.card for slot in slots]
                within = min(window_s(slots, now), self.left_s(now)) - self.leases.start_s
                record = self.pending.best_for(width, cards, within)
                if record is not None:
                    yield from self.leases.lease_fresh(self.pending.take(record), slots, now)
                    return True
        return False

    def _may_take(self, slots: SlotSet, passed: int, now: float, whatever_is_due: bool) -> bool:
        """Return whether a gang may have these cards although narrower jobs wait. Before a
        deadline it always may: what measures most goes first (``deadline.py``)."""
        width = len(slots)
        if width == 1 or self.work_until < inf:
            return True
        if self._shares.is_short(width, self.remaining_s(now)):
            return True
        if any(map(_is_spoken_for, slots)):
            return False
        return whatever_is_due or self._shares.is_due(width, passed)

    def begin_round(self) -> None:
        """Begin to give out cards: nothing is left to narrower jobs yet."""
        self._passed_over.clear()
        self._shares.left_open = 0

    def leave_rest(self, server: Server) -> None:
        """Leave the open cards of a server to one-card jobs, where they were not due to gangs."""
        if server.server_id in self._passed_over:
            rest = (slot.open and slot.reservation is None for slot in server.slots.values())
            self._shares.left_open += sum(rest)

    def fill_rest(self, now: float) -> Iterator[Command]:
        """Give gangs the cards that narrower jobs did not take after all."""
        for server in list(self._passed_over.values()):
            for width in self.pending.widths():
                while has_room(server) and (
                    yield from self.place(server, width, now, whatever_is_due=True)
                ):
                    pass

    def _open_sets(self, server: Server, width: int, *, reserved: bool) -> list[SlotSet]:
        """The server's open legal sets with or without reserved cards, best first: those that
        stop fewest workers, and single cards where aligned groups are broken already."""
        found = []
        for group in server.groups(width):
            if not all(slot.open for slot in group):
                continue
            if reserved == any(slot.reservation is not None for slot in group):
                workers = sum(slot.worker is not None for slot in group)
                broken = server.broken(group[0]) if width == 1 else (0, 0)
                found.append((workers, -broken[0], -broken[1], group[0].order, group))
        return [group for *_, group in sorted(found, key=lambda entry: entry[:4])]

    def reserve(self, width: int, now: float) -> Iterator[Command]:
        """Drain cards for gangs of this width as long as it is short of them, so that they never
        starve and never hold more than their work is worth."""
        within = self.left_s(now) - self.leases.start_s
        while candidates := self.pending.candidates(width, within):
            if not self._shares.is_short(width, self.remaining_s(now)):
                return
            record = candidates[0]
            slots = self._soonest_set(record, now)
            if slots is None:
                return
            self.pending.take(record)
            if all(slot.open for slot in slots):
                yield from self.leases.lease_fresh(record, slots, now)
                continue
            start_by = now + max(slot.free_in(now) for slot in slots)
            if record.duration > self.left_s(start_by) - self.leases.start_s:
                self.pending.push(record)  # drained in vain: it could not end in time
                return
            reservation = Reservation(record=record, slots=slots, start_by=start_by)
            record.reservation = reservation
            self.reservations[record.job_id] = reservation
            self._reserved_widths[width] = self._reserved_widths.get(width, 0) + 1
            for slot in slots:
                slot.reservation = reservation
                if slot.worker is not None:
                    self.pending.detach(slot.worker)
                self.pool.refresh(slot)

    def _soonest_set(self, record: JobRecord, now: float) -> SlotSet | None:
        """The unreserved legal set that should be free first; of equals the one that leaves
        least unused meanwhile."""
        if self.pool.spans(record.width):
            return self._soonest_servers(record, now)
        best: SlotSet | None = None
        least = (inf, inf)
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

    def place_spanning(self, now: float) -> Iterator[Command]:
        """Start gangs that are wider than a server, or drain servers for them."""
        for width in self.pending.widths():
            if not self.pool.spans(width):
                continue
            while (yield from self._place_on_servers(width, now)):
                pass
            if any(map(has_room, self.pool.dirty.values())):
                yield from self.reserve(width, now)

    def _place_on_servers(self, width: int, now: float) -> Generator[Command, None, bool]:
        within = self.left_s(now) - self.leases.start_s
        for record in self.pending.candidates(width, within):

            def free(slot: Slot, record: JobRecord = record) -> bool:
                return slot.open and _reservable(record, slot)

            for servers in self.pool.spanning_servers(width, free):
                slots = tuple(slot for server in servers for slot in server)
                yield from self.leases.lease_fresh(self.pending.take(record), slots[:width], now)
                return True
        return False

    def _soonest_servers(self, record: JobRecord, now: float) -> SlotSet | None:
        def free_in(server: SlotSet) -> float:
            return max(slot.free_in(now) for slot in server)

        good = partial(_reservable, record)
        for servers in self.pool.spanning_servers(record.width, good):
            soonest = sorted(servers, key=free_in)
            return tuple(slot for server in soonest for slot in server)[: record.width]
        return None


def _reservable(record: JobRecord, slot: Slot) -> bool:
    if slot.reservation is not None or slot.quarantined:
        return False
    return not (record.particular and record.avoids(slot.card))


def _is_spoken_for(slot: Slot) -> bool:
    """Return whether a worker is starting there that will take a one-card job."""
    worker = slot.worker
    return worker is not None and worker.state is WorkerState.STARTING and worker.bucket is not None


def has_room(server: Server) -> bool:
    return any(slot.open and slot.reservation is None for slot in server.slots.values())


def window_s(slots: SlotSet, now: float) -> float:
    """Seconds that the cards may be used before a gang needs them."""
    return min(
        (slot.reservation.start_by - now for slot in slots if slot.reservation is not None),
        default=inf,
    )


#: Between two looks at work that is left to busy workers, at least this many seconds.
_LOOK_AGAIN_S = 1.0


class Assigner:
    """Decides; ``Leases`` carries the decisions out."""

    def __init__(
        self, pool: CardPool, pending: PendingJobs, leases: Leases, settings: ScheduleSettings
    ) -> None:
        self.pool, self.pending, self.leases = pool, pending, leases
        self.settings = settings
        self.gangs = Gangs(pool, pending, leases, settings)

    def assign(self, now: float) -> Generator[Command, None, float | None]:
        """Give out what can be given out; returns when to look again, if time alone may help."""
        self.pending.too_much = self._is_too_much(now)
        self.gangs.begin_round()
        yield from self.gangs.place_spanning(now)
        while self.pool.dirty:  # a reservation made on the way may add servers
            server = min(self.pool.dirty.values(), key=lambda server: server.order)
            del self.pool.dirty[server.server_id]
            yield from self._fill(server, now)
            self.gangs.leave_rest(server)
        yield from self._use_warm_workers(now)
        yield from self._swap_models(now)
        yield from self._start_workers(now)
        yield from self.gangs.fill_rest(now)
        return self._look_again(now)

    # ------------------------------------------------------------ one server

    def _fill(self, server: Server, now: float) -> Iterator[Command]:
        """Give the open cards of one server to gangs and to jobs that may not go elsewhere."""
        while (yield from self.gangs.redeem(server, now)) or (
            yield from self.gangs.place_urgent(server, now)
        ):
            pass
        for width in self.pending.widths():
            if self.pool.spans(width):
                continue
            while (yield from self.gangs.place(server, width, now)):
                pass
            if has_room(server):
                yield from self.gangs.reserve(width, now)
        if self.pending.particular.get(1):
            while (yield from self.gangs.place(server, 1, now)):
                pass
        for slot in server.slots.values():
            if slot.reservation is not None and slot.open and slot.worker is None:
                yield from self._backfill(slot, now)

    # ------------------------------------------------------------ one-card jobs

    def _use_warm_workers(self, now: float) -> Iterator[Command]:
        """Step one: jobs go to idle workers that hold their model."""
        for bucket in self.pending.arrived:
            for worker in list(bucket.workers.values()):
                if worker.worker_id in self.pool.idle and len(bucket.queue):
                    yield from self._serve(bucket, worker.slot, now)
        self.pending.arrived.clear()
        for worker in list(self.pool.newly_idle.values()):
            if worker.slot.reservation is not None:
                yield from self._backfill(worker.slot, now)
                continue
            own = worker.bucket or self._bucket_held_by(worker)
            if own is None:
                continue
            self.pending.attach(worker, own)
            if not len(own.queue):
                continue
            other = self._first_elsewhere(own, now) or self._overdue(own, now)
            if other is not None and not _may_serve(worker, other):
                other = None
            if other is None or not (yield from self._serve(other, worker.slot, now)):
                yield from self._serve(own, worker.slot, now)
        self.pool.newly_idle.clear()

    def _first_elsewhere(self, own: Bucket, now: float) -> Bucket | None:
        """A model with firsts that no other worker takes, where ``own`` has none."""
        if not self.pending.ordered or own.queue.firsts:
            return None
        bucket = self.pending.most_firsts()
        if bucket is None or bucket is own:
            return None
        gains = bucket.key == FRESH or self._gains_from_another(bucket, 0.0, now)
        return bucket if gains else None

    def _bucket_held_by(self, worker: Worker) -> Bucket | None:
        return self.pending.buckets.get(worker.key) if worker.key is not None else None

    def _overdue(self, own: Bucket, now: float) -> Bucket | None:
        """A model that no worker holds and whose jobs would take longer than all the rest: it must
        be begun now, even by a worker that has work of its own model."""
        bucket = self.pending.longest_unheld()
        if bucket is None or bucket is own:
            return None
        longest = bucket.queue.longest()
        if longest is None or longest.duration < self.gangs.remaining_s(now) + bucket.load_s:
            return None
        return bucket

    def _backfill(self, slot: Slot, now: float) -> Iterator[Command]:
        """Run something that ends before the gang for which the card is reserved can start."""
        worker = slot.worker
        window = min(window_s((slot,), now), self.gangs.left_s(now))
        window -= 0.0 if worker is not None else self.leases.start_s
        own = self._bucket_held_by(worker) if worker is not None else None
        for bucket in self.pending.some_buckets(own):
            if worker is not None and not _may_serve(worker, bucket):
                continue
            load_s = 0.0 if bucket is own else bucket.load_s
            record = bucket.queue.longest_within(window - load_s, (slot.card,))
            if record is not None and worker is not None:
                yield from self.leases.lease_warm(self.pending.take(record), worker, now)
                return
            if record is not None:
                yield from self.leases.lease_fresh(self.pending.take(record), (slot,), now)
                return

    def _swap_models(self, now: float) -> Iterator[Command]:
        """Step two: workers with nothing left of their model take up another."""
        while self.pool.idle:
            bucket = self._wanting(0.0, now)
            if bucket is None:
                yield from self._make_room(now)
                return
            fresh = bucket.key == FRESH and self.pool.vacant
            slot = (
                self.pool.pick_vacant(leave_groups=self._gangs_wait())
                if fresh
                else self._idle_for(bucket).slot
            )
            yield from self._serve(bucket, slot, now)

    def _idle_for(self, bucket: Bucket) -> Worker:
        """An idle worker that may serve the model; of several, one whose card is new to the
        replicate that is next."""
        idle = [worker for worker in self.pool.idle.values() if _may_serve(worker, bucket)]
        record = bucket.queue.longest() if self.pending.seed is not None else None
        if record is None:
            return idle[0]
        return min(idle, key=lambda worker: worker.slot.card in record.cell_cards)

    def _make_room(self, now: float) -> Iterator[Command]:
        """Stop idle workers of other replicates where a model wants a fresh process and no card is
        vacant."""
        if self.pending.seed is None or self.pool.vacant:
            return
        stopping = sum(w.state is WorkerState.STOPPING for w in self.leases.workers.values())
        for bucket in self._demanding(now):
            if len(bucket.queue) <= bucket.starting + stopping or bucket.key == FRESH:
                continue
            idle = [worker for worker in self.pool.idle.values() if not _may_serve(worker, bucket)]
            setup = self.leases.start_s + bucket.load_s
            enough = len(bucket.workers) + stopping
            if not idle or (enough and bucket.queue.work_s <= enough * setup):
                continue
            record = bucket.queue.longest_within(self.gangs.left_s(now) - setup)
            if record is None:
                continue
            worker = min(idle, key=lambda worker: worker.slot.card in record.cell_cards)
            why = f"replicate {bucket.replicate} needs a fresh process"
            yield from self.leases.stop(worker, why)
            stopping += 1

    def _start_workers(self, now: float) -> Iterator[Command]:
        """Step three: new workers on vacant cards."""
        limit = self.settings.max_starting
        while self.pool.vacant:
            bucket = self._wanting(self.leases.start_s, now)
            if bucket is None:
                return
            if limit is not None and self.leases.starting >= limit:
                return
            slot = self._vacant_for(bucket)
            if bucket.key == FRESH:
                yield from self._serve(bucket, slot, now)
            else:
                yield self.leases.start_warm(slot, bucket, now)

    def _vacant_for(self, bucket: Bucket) -> Slot:
        """A vacant card; where replicates wait, one that is new to the next of them."""
        record = bucket.queue.longest() if self.pending.seed is not None else None
        avoided = record.cell_cards if record is not None else ()
        return self.pool.pick_vacant(leave_groups=self._gangs_wait(), avoided=avoided)

    def _wanting(self, start_s: float, now: float) -> Bucket | None:
        """The model that one more worker should serve, if it should; ``start_s`` is 0 for a
        worker that is up."""
        idle = self.pool.idle.values() if self.pending.seed is not None and not start_s else None
        for bucket in self._demanding(now):
            if idle is not None and not any(_may_serve(worker, bucket) for worker in idle):
                continue
            setup = self.leases.start_s if bucket.key == FRESH else start_s + bucket.load_s
            if bucket.queue.longest_within(self.gangs.left_s(now) - setup) is None:
                continue
            if bucket.key == FRESH:
                return bucket
            if start_s and not self._short_of_workers(bucket, start_s, now):
                continue
            if self._gains_from_another(bucket, start_s, now):
                return bucket
        return None

    def _demanding(self, now: float) -> Iterator[Bucket]:
        """The models that want another worker most; before a deadline also some whose jobs are
        shorter and may still fit."""
        first = self.pending.most_firsts() if self.pending.ordered else None
        most = (first, self.pending.most_demanding(), self.pending.longest_unheld())
        for bucket in (*self.pending.next_drawn(), *most):
            if bucket is not None:
                yield bucket
        if self.gangs.left_s(now) < inf:
            fresh = self.pending.buckets.get(FRESH)
            if fresh is not None:
                yield fresh
            for bucket in self.pending.some_buckets(None):
                if len(bucket.queue) > bucket.starting:
                    yield bucket

    def _short_of_workers(self, bucket: Bucket, start_s: float, now: float) -> bool:
        """Return whether work of the bucket's replicate will be left when a worker started now is
        ready."""
        waiting, workers = self.pending.single_work_s, self.pending.staff
        if self.pending.seed is not None:
            waiting = self.pending.work_s_of[bucket.replicate]
            workers = {n: w for n, w in workers.items() if w.bucket and _same(w.bucket, bucket)}
        if waiting > len(workers) * start_s:
            return True
        return waiting > spare_s(workers, now, start_s, self.leases.start_s)

    def _gains_from_another(self, bucket: Bucket, start_s: float, now: float) -> bool:
        """Return whether the model's own workers leave it work for the time another takes to start
        and load."""
        setup = start_s + bucket.load_s
        waiting = bucket.queue.work_s
        if not bucket.workers or waiting > len(bucket.workers) * setup:
            return True
        spare = sum(
            max(0.0, setup - rest_s(worker, now, self.leases.start_s) - load)
            for worker in bucket.workers.values()
            for load in [0.0 if worker.key == bucket.key else bucket.load_s]
        )
        return waiting > spare

    def _gangs_wait(self) -> bool:
        return bool(self.pending.widths() or self.gangs.reservations)

    def _is_too_much(self, now: float) -> bool:
        """Return whether the work whose turn it is takes longer than there is time."""
        left = self.gangs.left_s(now)
        if left == inf:
            return False
        waiting = self.pending.firsts_s if self.pending.firsts else self.pending.card_seconds
        work = waiting + self.leases.leased_card_seconds(now)
        return work > left * max(1, self.pool.usable_cards)

    # ------------------------------------------------------------ carrying out

    def _serve(self, bucket: Bucket, slot: Slot, now: float) -> Generator[Command, None, bool]:
        """Run the next job of a model on a card with an idle worker (or none, if the job needs
        a process of its own); False when none is left that would end in time."""
        worker, left = slot.worker, self.gangs.left_s(now)
        if bucket.key == FRESH:
            within = left - self.leases.start_s
            record = self.pending.next_of(bucket.queue, within, (slot.card,))
            if record is not None:
                yield from self.leases.lease_fresh(self.pending.take(record), (slot,), now)
            return record is not None
        assert worker is not None, f"{slot.card} has no worker"
        load_s = 0.0 if worker.key == bucket.key else bucket.load_s
        record = self.pending.next_of(bucket.queue, left - load_s, (slot.card,))
        if record is not None:
            self.pending.attach(worker, bucket)
            yield from self.leases.lease_warm(self.pending.take(record), worker, now)
        return record is not None

    def _look_again(self, now: float) -> float | None:
        """Time of the next look at jobs that are left to busy workers while others stand idle."""
        if not (self.pool.idle or self.pool.vacant) or not self.pending.single_work_s:
            return None
        return now + max(self.leases.start_s, _LOOK_AGAIN_S)


def _may_serve(worker: Worker, bucket: Bucket) -> bool:
    """Return whether the worker has run nothing of another replicate."""
    return bucket.key == FRESH or worker.replicate in (None, bucket.replicate)


def _same(one: Bucket, other: Bucket) -> bool:
    return one.replicate == other.replicate
