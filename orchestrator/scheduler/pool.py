"""One kind of accelerator: its cards indexed by state, the jobs that want them, and the failures of
each card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from orchestrator.core.job import Accelerator
from orchestrator.core.outcome import FailureClass, Outcome
from orchestrator.core.topology import Card, Node
from orchestrator.scheduler.leases import Leases
from orchestrator.scheduler.ledger import Ledger
from orchestrator.scheduler.placement import Placement
from orchestrator.scheduler.queues import PendingJobs
from orchestrator.scheduler.state import (
    JobState,
    Lease,
    Phase,
    Server,
    Slot,
    SlotSet,
    Worker,
    WorkerState,
)

#: Failed jobs that one success on a card makes up for: one in three may fail.
FORGIVEN = 0.5
#: Failures in a row that are less likely than this on a sound card quarantine one; before attempts
#: have ended, one in so many counts as failed.
_CHANCE, _AS_IF = 1e-3, 20


class Pool:
    """The cards of one accelerator, and its parts of the schedule."""

    def __init__(self, kind: Accelerator, records: Sequence[JobState], ledger: Ledger) -> None:
        self.accelerator, self.records, self.ledger = kind, records, ledger
        self._settings = ledger.settings
        self.servers: dict[str, Server] = {}  # by id
        self.server_of: dict[str, Server] = {}  # by the id of a node
        self.vacant: set[Slot] = set()  # open cards that have no worker and are not reserved
        self.idle: dict[str, Worker] = {}  # on open cards that are not reserved
        self.dirty: set[Server] = set()  # with a card that came open
        self.changed = False  # cards came or went for good
        self.joined = 0
        replicated = any(record.draw is not None for record in records)
        self.pending = PendingJobs(seed=self._settings.seed if replicated else None)
        self.leases = Leases(self)
        self.placement = Placement(self)
        #: Jobs by width, repeats included.
        self.unfinished = Counter(r.width for r in records if r.phase is not Phase.DONE)
        self.hopeless_at: dict[int, float] = {}  # by width: when to give up, no card set being left
        self.had_cards: set[int] = set()  # widths that had a card set at some time
        self.more_may_come = False  # cards; while they may, no job is hopeless
        self._failed = self._worked = 0  # attempts, for which a card may be blamed or not
        self._confined: dict[str, JobState] = {}  # jobs with too few cards to avoid all they should
        self.losses: Counter[str] = Counter()  # of nodes, by name: ids change
        self._down: set[str] = set()  # names of nodes that were lost and have not joined since
        for record in records:
            record.pool = self
            if record.phase is Phase.WAITING:
                self.pending.push(record)

    # ---------------------------------------------------------------- cards

    @property
    def usable_cards(self) -> int:
        """Cards that may be used, now or when they are free."""
        return sum(
            slot.usable for server in self.servers.values() for slot in server.slots.values()
        )

    def slot(self, card: Card) -> Slot | None:
        """The slot of a card that is here now."""
        server = self.server_of.get(card.node_id)
        return server.slots.get(card.index) if server is not None else None

    def refresh(self, slot: Slot) -> None:
        """Update the indexes by a slot's state."""
        worker = slot.worker
        if slot.server.slots.get(slot.card.index) is not slot:  # its node has left
            return
        free = slot.open and slot.reservation is None
        if free and worker is None:
            self.vacant.add(slot)
        else:
            self.vacant.discard(slot)
        if worker is not None and free and worker.state is WorkerState.IDLE:
            self.idle[worker.worker_id] = worker
        elif worker is not None:
            self.idle.pop(worker.worker_id, None)
        if slot.open:
            self.dirty.add(slot.server)

    def touch_all(self) -> None:
        """Mark every server with an open card as dirty: a new job may fit there."""
        for server in self.servers.values():
            if any(slot.open for slot in server.slots.values()):
                self.dirty.add(server)

    def pick_vacant(self, *, leave_groups: bool, avoided: Collection[Card] = ()) -> Slot:
        """A vacant card for a new warm worker, spread over servers or keeping aligned groups whole;
        avoided ones only if there are no others."""
        slots = [slot for slot in self.vacant if slot.card not in avoided] or list(self.vacant)
        counts = Counter(slot.server for slot in self.vacant)
        sign = -1 if leave_groups else 1
        server = max((s.server for s in slots), key=lambda s: (sign * counts[s], -s.order))
        here = (slot for slot in slots if slot.server is server)
        return max(here, key=lambda slot: (*server.broken(slot), -slot.order))

    def spanning_servers(self, width: int, good: Callable[[Slot], bool]) -> Iterator[list[SlotSet]]:
        """Cards of whole good servers in joining order, by server size; ``width`` must be several
        servers of that size."""
        by_size: dict[int, list[SlotSet]] = {}
        for server in self.servers.values():
            size = server.size
            if width > size and width % size == 0 and server.whole(good):
                by_size.setdefault(size, []).append(tuple(server.slots.values()))
        for size, servers in sorted(by_size.items(), reverse=True):
            if len(servers) >= width // size:
                yield servers

    def spans(self, width: int) -> bool:
        """Return whether a job of this width takes several servers here."""
        return not any(server.groups(width) for server in self.servers.values())

    def has_set(self, width: int, good: Callable[[Slot], bool]) -> bool:
        """Return whether some legal set of this width has only good cards, were they all open."""
        for server in self.servers.values():
            if any(all(map(good, group)) for group in server.groups(width)):
                return True
        return self.spans(width) and any(self.spanning_servers(width, good))

    def join(self, node: Node) -> None:
        """Add a node; a node of the same id must have left before."""
        server = self.servers.get(node.server_id)
        if server is None:
            server = self.servers[node.server_id] = Server(pool=self, order=self.joined)
            self.joined += 1
        self.server_of[node.node_id] = server
        server.add(node)
        self.changed = True
        self._down.discard(node.name)
        losses = self.losses[node.name]
        for index in node.card_indices:
            slot = server.slots[index]
            self.refresh(slot)
            if losses >= self._settings.node_failures:
                self._quarantine(slot, f"node {node.name} was lost {losses} times")
        self.cards_came()

    def leave(self, node_id: str) -> list[Lease]:
        """Remove a node and its workers; returns its leases, which the caller must end. Parts of
        one server share a name and count as one loss."""
        server = self.server_of.pop(node_id)
        node = server.nodes[node_id]
        if node.name not in self._down:
            self.losses[node.name] += 1
            self._down.add(node.name)
        gone = server.remove(node_id)
        if not server.nodes:
            del self.servers[node.server_id]
            self.dirty.discard(server)
        self.changed = True
        reservations = {slot.reservation for slot in gone if slot.reservation is not None}
        for reservation in sorted(reservations, key=lambda r: r.record.order):
            self.enqueue(self.placement.release(reservation))
        lost: dict[str, Lease] = {}
        for slot in gone:
            self.vacant.discard(slot)
            slot.quarantined = slot.quarantined or "its node is gone"
            if slot.lease is not None:
                lost[slot.lease.attempt.attempt_id] = slot.lease
            if slot.worker is not None:
                self.leases.vanished(slot.worker)
        self._cards_went()
        return list(lost.values())

    # ---------------------------------------------------------------- jobs

    def enqueue(self, record: JobState) -> None:
        """Queue a job for cards."""
        record.phase = Phase.WAITING
        record.avoided = self._avoidable(record)
        if len(record.avoided) < len(record.failed_on):
            self._confined[record.job_id] = record
        self.pending.push(record)
        if record.avoided or record.width > 1:
            self.touch_all()

    def withdraw(self, record: JobState, reason: str) -> None:
        """Remove a job from its queue, reservation or a lease that does not run yet."""
        if record.reservation is not None:
            self.placement.release(record.reservation)
        elif record.phase is Phase.WAITING:
            self.pending.take(record)
        elif record.lease is not None:
            self.leases.cancel(record.lease, reason)

    def waiting(self, width: int | None = None) -> int:
        """Count the unfinished jobs, of this width, that have no cards."""
        if width is None:
            return self.unfinished.total() - len(self.leases.current)
        return self.unfinished[width] - self.leases.widths[width]

    def newly_hopeless(self) -> list[int]:
        """Widths that lost their last usable card set since the last call."""
        if not self.changed:
            return []
        self.changed = False
        widths = []
        for width, count in self.unfinished.items():
            has_set = count > 0 and self.has_set(width, lambda slot: not slot.barred)
            if has_set:
                self.had_cards.add(width)
            if has_set or not count or self.more_may_come:
                self.hopeless_at.pop(width, None)
            elif width not in self.hopeless_at:
                self.hopeless_at[width] = self.ledger.now + self._settings.wait_for_nodes_s
                widths.append(width)
        return widths

    def _avoidable(self, record: JobState) -> frozenset[Card | str]:
        """Most of the newest places of failure that the job can avoid and still have a card set."""
        places = list(record.failed_on)
        for first in range(len(places)):
            avoided = frozenset(places[first:])

            def good(slot: Slot, avoided: frozenset[Card | str] = avoided) -> bool:
                return slot.usable and avoided.isdisjoint((slot.card, slot.card.node_id))

            if self.has_set(record.width, good):
                return avoided
        return frozenset()

    def _cards_went(self) -> None:
        """Update jobs that avoid cards: they may have no others left."""
        for apart in list(self.pending.particular.values()):
            self._avoid_anew(apart.values())

    def cards_came(self) -> None:
        """Update jobs that had too few cards to avoid any: they may avoid more now."""
        confined, self._confined = self._confined, {}
        self._avoid_anew(confined.values())

    def _avoid_anew(self, records: Iterable[JobState]) -> None:
        """Recompute the cards that waiting jobs avoid; others do so when queued."""
        for record in list(records):
            if record.phase is not Phase.WAITING or record.reservation is not None:
                continue
            if self._avoidable(record) != record.avoided:
                self.enqueue(self.pending.take(record))
            elif len(record.avoided) < len(record.failed_on):
                self._confined[record.job_id] = record

    # ---------------------------------------------------------------- failures of cards

    def count_failure(
        self, card: Card, reason: str, *, at_once: bool = False, proven: bool = True
    ) -> None:
        """Count a failure of a card; enough of them quarantine it, each time twice as long, and in
        the end for good. While the job may be at fault (not ``proven``), its node is spared, and
        so is the last card on which the job could show that."""
        slot = self.slot(card)
        if slot is None or not slot.usable:
            return
        slot.failures += 1
        if not at_once and slot.failures < self._settings.card_failures:
            return
        if proven:
            self._quarantine_with_node(slot, reason)
        elif self.usable_cards > 1:
            self._quarantine(slot, reason)

    def _quarantine_with_node(self, slot: Slot, reason: str) -> None:
        """Quarantine a card, and its server if half of the cards there have failed."""
        self._quarantine(slot, reason)
        others = list(slot.server.slots.values())
        bad = sum(not other.usable for other in others)
        if bad >= max(self._settings.node_failures, len(others) / 2):
            why = f"{bad} cards of {slot.node.name} failed, the last: {reason}"
            for other in others:
                if other.usable:
                    self._quarantine(other, why)

    def _quarantine(self, slot: Slot, reason: str) -> None:
        self._close(slot, reason)
        if slot.worker is not None and slot.lease is None:
            self.leases.stop(slot.worker, f"{slot.name} is quarantined: {reason}")
        self._cards_went()
        if slot.quarantines > self._settings.card_readmissions:
            slot.barred = True
            return
        pause = self._settings.quarantine_s * 2 ** (slot.quarantines - 1)
        self.ledger.later(pause, lambda: self._readmit(slot))

    def _close(self, slot: Slot, reason: str) -> None:
        """Stop using a card until it is readmitted."""
        slot.quarantined = reason or "no reason given"
        slot.quarantines += 1
        self.changed = True
        self.refresh(slot)
        self._release_reservation(slot)

    def acquit(self, cards: Iterable[Card]) -> None:
        """End quarantines for which a job was at fault: it failed alike on other cards."""
        for slot in filter(None, map(self.slot, cards)):
            if not slot.usable and not slot.barred:
                slot.quarantines -= 1
                self._readmit(slot)
                slot.failures = slot.in_a_row = 0
                slot.job_failures = 0.0

    def lock_away(self, slot: Slot, reason: str) -> None:
        """Quarantine a card until its stuck process ends."""
        slot.barred = True
        if slot.usable:
            self._close(slot, reason)
        self._cards_went()

    def unlock(self, slot: Slot) -> None:
        """Release a card whose stuck process has ended."""
        slot.barred = False
        self._readmit(slot)

    def _readmit(self, slot: Slot) -> None:
        """Readmit a card on probation: one more failure of the kind quarantines it."""
        if slot.barred:  # meanwhile
            return
        slot.failures = min(slot.failures, self._settings.card_failures - 1)
        slot.job_failures = min(slot.job_failures, self._settings.card_job_failures - 1)
        if self.slot(slot.card) is slot and not slot.usable:  # it may have gone
            slot.quarantined = ""
            self.changed = True
            self.refresh(slot)
        self.cards_came()
        if self.pending.widths():
            self.touch_all()

    def fails_in_a_row(self, cards: Sequence[Card]) -> bool:
        """Count a failed attempt; return whether so many in a row on one card are unlikely where
        attempts fail as often as elsewhere. While the first of its jobs is tried on another card, a
        broken one could fail all the others."""
        self._failed += 1
        slot = self.slot(cards[0])
        if slot is None or len(cards) > 1:  # any of a gang's cards may be the one
            return False
        slot.in_a_row += 1
        others = self._failed - slot.in_a_row
        rate = (others + 1) / (others + self._worked + _AS_IF)
        return rate**slot.in_a_row < _CHANCE

    def count_success(self, lease: Lease) -> None:
        """Clear the failures of a successful attempt's cards, of jobs only a part, so that a card
        that fails every second job is quarantined, too; count one for each card on which its job
        failed."""
        record = lease.record
        self._worked += 1
        for slot in lease.slots:
            slot.failures = slot.in_a_row = 0
            slot.job_failures = max(0.0, slot.job_failures - FORGIVEN)
        reason = f"{record.job_id} failed here and worked elsewhere"
        suspects = sorted(record.suspects.difference(lease.attempt.cards))
        for slot in filter(None, map(self.slot, suspects)):
            slot.job_failures += 1
            if slot.usable and slot.job_failures >= self._settings.card_job_failures:
                self._quarantine_with_node(slot, reason)
        record.suspects.clear()
        record.accused.clear()

    def rest(self, slot: Slot) -> None:
        """Pause a card after a failed start."""
        slot.resting = True
        self._release_reservation(slot)
        self.refresh(slot)

        def rested() -> None:
            slot.resting = False
            self.refresh(slot)
            if self.pending.widths():
                self.touch_all()

        self.ledger.later(self._settings.card_rest_s, rested)

    def _release_reservation(self, slot: Slot) -> None:
        if slot.reservation is not None:
            self.enqueue(self.placement.release(slot.reservation))


def blamed_cards(lease: Lease, outcome: Outcome, failure_class: FailureClass) -> list[Card]:
    """Cards whose ranks failed in this class; all cards if none did."""
    cards = lease.attempt.cards
    blamed = [
        cards[rank.rank]
        for rank in outcome.ranks
        if rank.failure is not None and rank.failure.failure_class is failure_class
        if rank.rank < len(cards)
    ]
    return blamed or list(cards)
