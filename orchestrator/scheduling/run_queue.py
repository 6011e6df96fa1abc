"""The queue of runs that want cards of one cluster: first come, first served, and no preemption.

Each run has one ticket. A ticket that has a ``turn`` may claim cards; turns are given out in the
order of the queue, to a run that shares no kind of card with any run that has one already. Numbers
of tickets and turns come from one sequence, of which the cluster gives each out once; so of two
runs that take turns in the same moment both see the lower number, and only its holder claims.

A ticket ends with its driver. A run that had its turn and has a supervisor keeps it for
``GRACE_S``, in which its next driver comes; a driver that says nothing for ``SILENCE_S`` holds up
nobody, and what cards it has it keeps. Where the tickets lie is ``on_ray/run_queue.py``'s matter.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

#: A driver that was killed needs this long at most until its supervisor's next one is here.
GRACE_S = 120.0
SILENCE_S = 60.0
#: Time in which a submitted run that came earlier may start its driver and take its ticket.
ARRIVAL_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """A run's wishes for its place."""

    since: float  # when the command was typed, seconds since the epoch
    priority: int = 0
    supervised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A run's place in the queue."""

    run: str
    run_id: str
    host: str  # where its driver is
    kinds: tuple[str, ...]  # of card, as grids name them
    since: float  # when it was sent or typed, seconds since the epoch
    driver: str  # Ray's id of it
    submission: str = ""  # id of the Ray job that the driver is, if it is one
    priority: int = 0  # higher goes first
    number: int = 0  # in the sequence; 0: not there yet
    turn: int = 0  # the number with which it may claim cards; 0: not yet
    supervised: bool = False  # another driver comes should this one die
    beat: int = 0  # changes while the driver lives
    over: bool = False  # kept for its number alone

    @property
    def order(self) -> tuple[int, float, int]:
        """The place among those that wait."""
        return -self.priority, self.since, self.number

    def rivals(self, other: Ticket) -> bool:
        """Return whether both want a kind of card."""
        return self.run_id != other.run_id and bool(set(self.kinds) & set(other.kinds))

    def __str__(self) -> str:
        return f"{self.run} (on {self.host})"

    def to_json(self) -> str:
        """The ticket as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Ticket | None:
        """The ticket in a text; None where another version wrote it."""
        try:
            values: Mapping[str, Any] = json.loads(text)
            known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
            return cls(**known | {"kinds": tuple(map(str, known["kinds"]))})
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The place of a run in the queue at one moment."""

    turn_due: bool  # it should take a turn now
    may_claim: bool
    ahead: tuple[Ticket, ...]  # that it waits for, in their order

    @property
    def why(self) -> str:
        """The runs that this one waits for, in words; empty where there are none."""
        if not self.ahead:
            return ""
        having = [str(each) for each in self.ahead if each.turn]
        waiting = [str(each) for each in self.ahead if not each.turn]
        texts = [f"{listed(having)} has the cards"] if having else []
        texts += [f"{listed(waiting)} came first or has a higher priority"] if waiting else []
        return "; ".join(texts)


def listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def standing(mine: Ticket, others: Iterable[Ticket]) -> Standing:
    """The place of a run, given the tickets that count (``counting``)."""
    rivals = [each for each in others if not each.over and each.rivals(mine)]
    before = [each for each in rivals if each.turn and (not mine.turn or each.turn < mine.turn)]
    before.sort(key=lambda each: each.turn)
    if mine.turn:
        return Standing(turn_due=False, may_claim=not before, ahead=tuple(before))
    waiting = sorted(
        (each for each in rivals if not each.turn and each.order < mine.order),
        key=lambda each: each.order,
    )
    ahead = (*before, *waiting)
    return Standing(turn_due=not ahead, may_claim=False, ahead=ahead)


def inherited(mine: Ticket, tickets: Iterable[Ticket], living: Collection[str]) -> Ticket:
    """My ticket with the turn that an earlier driver of the run, now dead, has left; it is gone
    once a rival has a later one."""
    tickets = list(tickets)
    left = [
        each
        for each in tickets
        if each.run_id == mine.run_id and each.turn and each.driver not in living and not each.over
    ]
    if not left:
        return mine
    last = max(left, key=lambda each: each.turn)
    taken = any(
        each.turn > last.turn and each.rivals(mine) and each.driver in living and not each.over
        for each in tickets
    )
    return mine if taken else replace(mine, number=last.number, turn=last.turn)


class Watch:
    """Finds out which tickets count, from looks at the queue: those of drivers that live and speak,
    and of those that died a moment ago and come back."""

    def __init__(self) -> None:
        self._time_s = 0.0  # in which the queue could be looked at
        self._looked_at: float | None = None
        self._heard: dict[int, tuple[int, float]] = {}  # by number: beat, when it came
        self._dead: dict[int, float] = {}  # by number: when that was seen first
        self._expected: dict[str, float] = {}  # by submission: when it was seen first

    def counting(
        self,
        now: float,
        tickets: Iterable[Ticket],
        living: Collection[str],
        submitted: Iterable[Ticket] = (),
    ) -> list[Ticket]:
        """The tickets that count now.

        Args:
            now: seconds of a clock that never jumps.
            living: drivers that the cluster has not seen end.
            submitted: runs that were sent and have not ended, by ``submission``; those without a
                ticket are waited for (``ARRIVAL_S``).
        """
        if self._looked_at is not None:  # while the queue cannot be looked at, nobody is silent
            self._time_s += min(now - self._looked_at, 10.0)
        self._looked_at = now
        at = self._time_s
        found, arrived = [], set()
        for ticket in tickets:
            arrived.add(ticket.submission)
            if ticket.over:
                continue
            if ticket.driver not in living:
                died = self._dead.setdefault(ticket.number, at)
                if ticket.turn and ticket.supervised and at - died < GRACE_S:
                    found.append(ticket)
                continue
            self._dead.pop(ticket.number, None)
            beat, heard = self._heard.get(ticket.number, (None, at))
            if beat != ticket.beat:
                heard = at
                self._heard[ticket.number] = (ticket.beat, at)
            if at - heard < SILENCE_S:
                found.append(ticket)
        for ticket in submitted:
            first = self._expected.setdefault(ticket.submission, at)
            if ticket.submission not in arrived and at - first < ARRIVAL_S:
                found.append(ticket)
        return found
