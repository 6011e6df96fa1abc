"""Gangs of cards: jobs of several cards get legal sets, which are drained for them.

Each width holds its share of the cluster, and at least one set (``shares.py``). One that is short
of cards gets a set reserved; what runs there meanwhile must be estimated to end in time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from math import inf

from orchestrator.core.events import Command
from orchestrator.scheduling.cards import CardPool, Reservation, Server, Slot, SlotSet, WorkerState
from orchestrator.scheduling.leases import Leases
from orchestrator.scheduling.pending import PendingJobs
from orchestrator.scheduling.record import JobRecord, ScheduleSettings
from orchestrator.scheduling.shares import Shares


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
        deadline it always may: what measures most goes first (``anchors.py``)."""
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
