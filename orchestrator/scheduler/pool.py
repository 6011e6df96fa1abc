"""One kind of accelerator: its cards, the jobs that want them, and the failures of each card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from orchestrator.core.events import Command, Wake
from orchestrator.core.job import Accelerator
from orchestrator.core.outcome import FailureClass, Outcome
from orchestrator.core.topology import Card, Node
from orchestrator.scheduler.leases import Lease, Leases
from orchestrator.scheduler.placement import Placement
from orchestrator.scheduler.queues import PendingJobs
from orchestrator.scheduler.state import CardPool, JobState, Phase, ScheduleSettings, Slot

#: Failed jobs that one success on a card makes up for: one in three may fail.
FORGIVEN = 0.5
#: Failures in a row that are less likely than this on a sound card quarantine one; before attempts
#: have ended, one in so many counts as failed.
_CHANCE, _AS_IF = 1e-3, 20


class Pool:
    """Keeps the parts of one accelerator's schedule consistent with each other."""

    def __init__(
        self,
        kind: Accelerator,
        records: Sequence[JobState],
        settings: ScheduleSettings,
        later: Callable[[float, Callable[[], None]], Wake],
    ) -> None:
        self.cards = CardPool(kind)
        replicated = any(record.draw is not None for record in records)
        self.pending = PendingJobs(seed=settings.seed if replicated else None)
        self.pending.load([record for record in records if record.phase is Phase.WAITING])
        self.leases = Leases(self.cards, self.pending, settings)
        self.placement = Placement(self.cards, self.pending, self.leases, settings)
        self.records = records
        #: Jobs by width, repeats included.
        self.unfinished = Counter(r.width for r in records if r.phase is not Phase.DONE)
        self.hopeless_at: dict[int, float] = {}  # by width: when to give up, no card set being left
        self.had_cards: set[int] = set()  # widths that had a card set at some time
        self._more_may_come = False  # cards
        self._failed = self._worked = 0  # attempts, for which a card may be blamed or not
        self._settings = settings
        self._confined: dict[str, JobState] = {}  # jobs with too few cards to avoid all they should
        self._losses: Counter[str] = Counter()  # of nodes, by name: ids change
        self._down: set[str] = set()  # names of nodes that were lost and have not joined since
        self._later = later  # (seconds, what to do then)

    def enqueue(self, record: JobState) -> None:
        """Queue a job for cards."""
        record.phase = Phase.WAITING
        record.avoid_newest(self._most_avoidable(record))
        if len(record.avoided) < len(record.failed_on):
            self._confined[record.job_id] = record
        self.pending.push(record)
        if record.avoided or record.width > 1:
            self.cards.touch_all()

    def withdraw(self, record: JobState, reason: str) -> Iterator[Command]:
        """Remove a job from its queue, reservation or a lease that does not run yet."""
        if record.reservation is not None:
            self.placement.release(record.reservation)
        elif record.phase is Phase.WAITING:
            self.pending.take(record)
        elif record.phase is Phase.LEASED:
            lease = self.lease_of(record)
            if lease is not None:
                yield from self.leases.cancel(lease, reason)

    def lease_of(self, record: JobState) -> Lease | None:
        """The lease that a job holds now."""
        return self.leases.current.get(f"{record.job_id}-{record.number}")

    def is_running(self, record: JobState) -> bool:
        """Return whether an attempt at the job runs."""
        lease = self.lease_of(record)
        return lease is not None and lease.running

    def waiting(self, width: int) -> int:
        """Count the unfinished jobs of this width that have no cards."""
        return self.unfinished[width] - self.leases.gangs.get(width, 0)

    def newly_hopeless(self, now: float) -> list[int]:
        """Widths that lost their last usable card set since the last call."""
        if not self.cards.changed:
            return []
        self.cards.changed = False
        widths = []
        for width, count in self.unfinished.items():
            if not count or self._can_have(width):
                self.hopeless_at.pop(width, None)
            elif width not in self.hopeless_at:
                self.hopeless_at[width] = now + self._settings.wait_for_nodes_s
                widths.append(width)
        return widths

    def _can_have(self, width: int) -> bool:
        """Return whether a card set of this width exists, or may come."""
        if self.cards.has_set(width, lambda slot: not slot.barred):
            self.had_cards.add(width)
            return True
        return self._more_may_come

    def more_cards_may_come(self, may_come: bool) -> None:
        """Set whether more cards may come; while they may, no job is hopeless."""
        self._more_may_come, self.cards.changed = may_come, True

    def join(self, node: Node) -> Generator[Command, None, list[Lease]]:
        """Add a node; returns the leases of a lost node with the same id."""
        lost = self.leave(node.node_id) if node.node_id in self.cards.server_of else []
        self.cards.add(node)
        self._down.discard(node.name)
        losses = self._losses[node.name]
        if losses >= self._settings.node_failures:
            for slot in self.cards.slots_of(node.node_id):
                yield from self._quarantine(slot, f"node {node.name} was lost {losses} times")
        self.cards_came()
        return lost

    def leave(self, node_id: str) -> list[Lease]:
        """Remove a node and its workers; returns its leases, which the caller must end. Parts of
        one server share a name and count as one loss."""
        name = self.cards.server_of[node_id].nodes[node_id].name
        if name not in self._down:
            self._losses[name] += 1
            self._down.add(name)
        slots = self.cards.slots_of(node_id)
        reservations = {slot.reservation for slot in slots if slot.reservation is not None}
        self.cards.leave(node_id)
        for reservation in sorted(reservations, key=lambda r: r.record.order):
            self.enqueue(self.placement.release(reservation))
        lost: dict[str, Lease] = {}
        for slot in slots:
            slot.quarantined = slot.quarantined or "its node is gone"
            if slot.lease is not None:
                lost[slot.lease.attempt.attempt_id] = slot.lease
            if slot.worker is not None:
                self.leases.vanished(slot.worker)
        self._cards_went()
        return list(lost.values())

    def count_failure(
        self, card: Card, reason: str, *, at_once: bool = False, proven: bool = True
    ) -> Iterator[Command]:
        """Count a failure of a card; enough of them quarantine it, each time twice as long, and in
        the end for good. While the job may be at fault (not ``proven``), its node is spared, and
        so is the last card on which the job could show that."""
        slot = self.cards.slot(card)
        if slot is None or not slot.usable:
            return
        slot.failures += 1
        if not at_once and slot.failures < self._settings.card_failures:
            return
        if not proven and self.cards.usable_cards == 1:
            return
        quarantine = self._quarantine_with_node if proven else self._quarantine
        yield from quarantine(slot, reason)

    def _quarantine_with_node(self, slot: Slot, reason: str) -> Iterator[Command]:
        """Quarantine a card, and its server if half of the cards there have failed."""
        yield from self._quarantine(slot, reason)
        others = list(slot.server.slots.values())
        bad = sum(not other.usable for other in others)
        if bad >= max(self._settings.node_failures, len(others) / 2):
            name = slot.node.name
            for other in others:
                if other.usable:
                    why = f"{bad} cards of {name} failed, the last: {reason}"
                    yield from self._quarantine(other, why)

    def _quarantine(self, slot: Slot, reason: str) -> Iterator[Command]:
        self.cards.quarantine(slot, reason)
        self._release_reservation(slot)
        if slot.worker is not None and slot.lease is None:
            yield from self.leases.stop(slot.worker, f"{slot.name} is quarantined: {reason}")
        self._cards_went()
        if slot.quarantines > self._settings.card_readmissions:
            slot.barred = True
            return
        pause = self._settings.quarantine_s * 2 ** (slot.quarantines - 1)
        yield self._later(pause, lambda: self._readmit(slot))

    def acquit(self, cards: Iterable[Card]) -> None:
        """End quarantines for which a job was at fault: it failed alike on other cards."""
        for card in cards:
            slot = self.cards.slot(card)
            if slot is not None and not slot.usable and not slot.barred:
                slot.quarantines -= 1
                self._readmit(slot)
                slot.failures = slot.in_a_row = 0
                slot.job_failures = 0.0

    def lock_away(self, slot: Slot, reason: str) -> None:
        """Quarantine a card until its stuck process ends."""
        if slot.usable:
            self.cards.quarantine(slot, reason)
        slot.barred = True
        self._release_reservation(slot)
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
        self.cards.release(slot)
        self.cards_came()
        if self.pending.widths():
            self.cards.touch_all()

    def fails_in_a_row(self, cards: Sequence[Card]) -> bool:
        """Count a failed attempt; return whether so many in a row on one card are unlikely where
        attempts fail as often as elsewhere. While the first of its jobs is tried on another card, a
        broken one could fail all the others."""
        self._failed += 1
        slot = self.cards.slot(cards[0])
        if slot is None or len(cards) > 1:  # any of a gang's cards may be the one
            return False
        slot.in_a_row += 1
        others = self._failed - slot.in_a_row
        rate = (others + 1) / (others + self._worked + _AS_IF)
        return rate**slot.in_a_row < _CHANCE

    def count_success(self, lease: Lease) -> Iterator[Command]:
        """Clear the failures of a successful attempt's cards, of jobs only a part, so that a card
        that fails every second job is quarantined, too; count one for each card on which its job
        failed."""
        record = lease.record
        self._worked += 1
        cards = {slot.card for slot in lease.slots}
        for slot in lease.slots:
            slot.failures = slot.in_a_row = 0
            slot.job_failures = max(0.0, slot.job_failures - FORGIVEN)
        reason = f"{record.job_id} failed here and worked elsewhere"
        for slot in filter(None, map(self.cards.slot, sorted(record.suspects - cards))):
            slot.job_failures += 1
            if slot.usable and slot.job_failures >= self._settings.card_job_failures:
                yield from self._quarantine_with_node(slot, reason)
        record.suspects.clear()
        record.accused.clear()

    def rest(self, slot: Slot) -> Iterator[Command]:
        """Pause a card after a failed start."""
        slot.resting = True
        self._release_reservation(slot)
        self.cards.refresh(slot)

        def rested() -> None:
            slot.resting = False
            self.cards.refresh(slot)
            if self.pending.widths():
                self.cards.touch_all()

        yield self._later(self._settings.card_rest_s, rested)

    def _release_reservation(self, slot: Slot) -> None:
        if slot.reservation is not None:
            self.enqueue(self.placement.release(slot.reservation))

    def _most_avoidable(self, record: JobState) -> int:
        """Most of the newest places of failure that the job can avoid and still have a card set."""
        places = list(reversed(record.failed_on))
        for count in range(len(places), 0, -1):
            avoided = set(places[:count])

            def good(slot: Slot, avoided: set[Card | str] = avoided) -> bool:
                return slot.usable and avoided.isdisjoint((slot.card, slot.card.node_id))

            if self.cards.has_set(record.width, good):
                return count
        return 0

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
            if self._most_avoidable(record) != len(record.avoided):
                self.enqueue(self.pending.take(record))
            elif len(record.avoided) < len(record.failed_on):
                self._confined[record.job_id] = record


def blamed_cards(lease: Lease, outcome: Outcome, failure_class: FailureClass) -> list[Card]:
    """Cards whose ranks failed in this class; all cards if none did."""
    ranks = [
        rank.rank
        for rank in outcome.ranks
        if rank.failure is not None and rank.failure.failure_class is failure_class
    ]
    cards = lease.attempt.cards
    return [cards[rank] for rank in ranks if rank < len(cards)] or list(cards)
