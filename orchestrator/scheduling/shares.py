"""Shares of the cluster by width: whether open cards go to a gang or to narrower jobs. Pure.

All widths should end together. Were the widest always first, the run would end with narrow jobs
only, some of which last far longer than estimated while most cards have nothing left to do; were
the narrowest first, gangs would starve. So a set of open cards goes where the work would take
longest even with these cards, as a new worker goes to the model whose jobs would
(``assignment.py``), or to a gang that lasts as long as any narrower job. Narrow jobs are favoured a
little, since their cards come open one by one: for a wider job they would have to be drained. A
width that has hardly any cards, beside its work, gets the next set whatever the others need;
``gangs.py`` drains one for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.scheduling.leases import Leases
from orchestrator.scheduling.pending import PendingJobs

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
