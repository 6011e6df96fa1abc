"""A queue of waiting jobs, from which the next one is asked for by its duration.

Longest first ends a run soonest. Replicates are the exception: their order is drawn by the run's
seed, so that no cell is always measured early, or after the same neighbour; among the next few of
them one is preferred whose cell has not yet been on the card at hand. A job that is no replicate
comes before those that are.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable

from orchestrator.core.topology import Card
from orchestrator.scheduling.record import JobRecord

#: The job's duration, or the place drawn for it; then the batch size, the order and the token.
_Entry = tuple[float, int, int, int, JobRecord]

#: Jobs that are considered for one card where some suit it better than others.
LOOK_AHEAD = 32

#: Places of the lists whose order is drawn.
_DRAWN = (1, 3)


class DurationQueue:
    """Jobs sorted by duration, or as drawn; those that are no firsts come after all others. Equal
    ones: smaller batch first (its failure prunes the larger)."""

    def __init__(self) -> None:
        #: Firsts by duration, firsts as drawn, and the others alike; each ascending, and may hold
        #: void entries.
        self._entries: tuple[list[_Entry], ...] = ([], [], [], [])
        self._length = 0
        self.firsts = 0  # how many are firsts
        self.work_s = 0.0  # sum of durations

    def __len__(self) -> int:
        return self._length

    def push(self, record: JobRecord) -> None:
        """Add one job."""
        insort(self._entries[_place(record)], self._enter(record))

    def extend(self, records: Iterable[JobRecord]) -> None:
        """Add many at once, at the cost of one sort."""
        for record in records:
            self._entries[_place(record)].append(self._enter(record))
        for entries in self._entries:
            entries.sort()

    def discard(self, record: JobRecord) -> None:
        """Take a job out wherever it is; its entry is dropped when it surfaces."""
        if record.queue is not self:
            raise ValueError(f"{record.job_id} does not wait in this queue")
        record.queue = None
        record.token += 1
        self._length -= 1
        self.firsts -= record.first
        self.work_s = self.work_s - record.duration if self._length else 0.0

    def longest(self) -> JobRecord | None:
        """The longest job, or the next as drawn, left where it is."""
        for entries in self._entries:
            record = _live(entries, len(entries) - 1)
            if record is not None:
                return record
        return None

    def longest_within(self, seconds: float, cards: Iterable[Card] = ()) -> JobRecord | None:
        """The longest job of at most ``seconds``, left where it is; of replicates the next one,
        if possible one that has not been on any of these cards."""
        for place, entries in enumerate(self._entries):
            if place in _DRAWN:
                record = _next_drawn(entries, seconds, cards)
            else:
                record = _live(entries, bisect_right(entries, seconds, key=_first_field) - 1)
            if record is not None:
                return record
        return None

    def shortest_within(self, seconds: float) -> JobRecord | None:
        """The shortest job if it is of at most ``seconds``, left where it is."""
        for place, entries in enumerate(self._entries):
            if place in _DRAWN:
                live = [record for *_, token, record in entries if token == record.token]
                shortest_one = min(live, key=_duration, default=None)
                if shortest_one is not None and shortest_one.duration <= seconds:
                    return shortest_one
                continue
            while entries and entries[0][0] <= seconds:
                shortest = entries[0][0]
                record = _live(entries, bisect_right(entries, shortest, key=_first_field) - 1)
                if record is not None:
                    return record
        return None

    def _enter(self, record: JobRecord) -> _Entry:
        record.token += 1
        record.queue = self
        self._length += 1
        self.firsts += record.first
        self.work_s += record.duration
        place = record.duration if record.draw is None else record.draw
        return (place, -record.batch_size, -record.order, record.token, record)


def _live(entries: list[_Entry], at: int) -> JobRecord | None:
    """The job at this place or the nearest before it; void entries on the way are dropped."""
    while at >= 0 and entries[at][3] != entries[at][4].token:
        entries.pop(at)
        at -= 1
    return entries[at][4] if at >= 0 else None


def _next_drawn(entries: list[_Entry], seconds: float, cards: Iterable[Card]) -> JobRecord | None:
    """The next job as drawn that is short enough; of the next few one that is new to the cards."""
    first: JobRecord | None = None
    looked = 0
    for at in range(len(entries) - 1, -1, -1):
        *_, token, record = entries[at]
        if token != record.token:
            entries.pop(at)
        elif record.duration <= seconds:
            first = first or record
            looked += 1
            if not any(card in record.cell_cards for card in cards):
                return record
            if looked == LOOK_AHEAD:
                break
    return first


def _place(record: JobRecord) -> int:
    return 2 * (not record.first) + (record.draw is not None)


def _first_field(entry: _Entry) -> float:
    return entry[0]


def _duration(record: JobRecord) -> float:
    return record.duration
