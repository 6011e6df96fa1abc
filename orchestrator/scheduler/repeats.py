"""Repeats: rows that something disturbed, and winners, are measured again before the run ends.

A repeat starts only while nothing else waits for its kind of card, and one at a time is queued,
first those that could change an answer; it goes back when other work comes before it has begun. It
is not retried, and only a better row replaces the one that it repeats. Winners of a search come
last, in a fresh process and if possible on another card.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from orchestrator.core.events import RecordRow
from orchestrator.core.job import Accelerator, State
from orchestrator.scheduler.state import JobState, Phase

if TYPE_CHECKING:
    from orchestrator.scheduler.pool import Pool


#: Why a row is a repeat: the beginning of its reason.
FLAGGED = "measured again, since its row was flagged"
WON = "measured again on another card, since it won or is too close to call"


class FlagJudge(Protocol):
    """Judges rows as they are made."""

    def flags(self, row: RecordRow) -> str:
        """Name the flags of a successful final row that a repeat may clear; "" if it has none."""

    def replaces(self, row: RecordRow) -> bool:
        """Return whether the successful row of a repeat is better than its job's present one."""

    def in_order(self, job_ids: Collection[str]) -> Sequence[str]:
        """Sort flagged jobs, those that could change an answer first."""


class Repeats:
    """Flagged rows of a run, and the jobs that are measured again.

    Jobs in ``never`` are not repeated: others load what they saved, which is not to change.
    """

    def __init__(self, judge: FlagJudge | None, never: Collection[str]) -> None:
        self._judge, self._never = judge, never
        #: Jobs with a flagged row and a repeat left, by kind of card and id, with their flags.
        self._flagged: defaultdict[Accelerator, dict[str, JobState]] = defaultdict(dict)
        self._why: dict[str, str] = {}
        self._active: defaultdict[Accelerator, dict[str, JobState]] = defaultdict(dict)

    def reuse(self, record: JobState, left: int) -> None:
        """Take in a job whose flagged row an earlier driver wrote, with the repeats it has left."""
        record.phase, record.state = Phase.DONE, State.SUCCEEDED
        record.repeats = record.job.measure.repeat_flagged - left
        self._add(record, "flagged")

    def consider(self, record: JobState, row: RecordRow) -> None:
        """Judge a final row, or a repeat's."""
        if self._judge is not None and row.state is State.SUCCEEDED:
            flags = self._judge.flags(row)
            if flags and record.repeats < record.job.measure.repeat_flagged:
                self._add(record, flags)

    def _add(self, record: JobState, flags: str) -> None:
        if record.job_id not in self._never:
            self._flagged[record.job.accelerator][record.job_id] = record
            self._why[record.job_id] = f"{FLAGGED}: {flags}"

    def worthwhile(self, pool: Pool) -> Iterator[JobState]:
        """Take jobs to repeat, the best first, while nothing waits for the pool's cards."""
        flagged = self._flagged[pool.cards.accelerator]
        if not flagged or self._judge is None or pool.unfinished.total() > _leased(pool):
            return
        for job_id in self._judge.in_order(flagged):
            record = flagged.pop(job_id)
            if pool.cards.has_set(record.width, lambda slot: slot.usable):
                yield record

    def prove(self, record: JobState) -> None:
        """Have a winner measured in a fresh process, and if possible on other cards than before."""
        self._why[record.job_id] = WON
        record.send_elsewhere("card", sorted(record.cell_cards))
        record.warm = False
        record.expect(record.estimate)

    def begin(self, record: JobState) -> None:
        """Count a repeat that is being queued."""
        record.repeats += 1
        record.start_failures = 0
        self._active[record.job.accelerator][record.job_id] = record

    def in_the_way(self, pool: Pool) -> list[JobState]:
        """Repeats that have not begun while other work waits; they may come again."""
        active = self._active[pool.cards.accelerator]
        if not active:
            return []
        for record in [one for one in active.values() if not one.repeating]:
            del active[record.job_id]
        idle = [record for record in active.values() if not pool.is_running(record)]
        waiting = [record for record in idle if record.phase is not Phase.LEASED]
        if not idle or pool.unfinished.total() - _leased(pool) <= len(waiting):
            return []
        for record in idle:
            record.repeats -= 1
            self._put_back(record)
        return idle

    def _put_back(self, record: JobState) -> None:
        if record.job_id not in self._never and self._why[record.job_id] != WON:
            self._flagged[record.job.accelerator][record.job_id] = record

    def row_of(self, record: JobState, row: RecordRow) -> Iterator[RecordRow]:
        """The row of a repeat, unless it never ran: final if it replaces the one before it."""
        if row.attempt is None:
            return
        row = replace(row, repeat=record.repeats, final=False)
        why = self._why[record.job_id]
        if row.state is not State.SUCCEEDED:
            yield replace(row, reason=f"{row.reason}; {why}; that row stands")
            return
        better = self._judge is not None and self._judge.replaces(row)
        stands = "" if better else "; that row stands, since this one is no better"
        row = replace(row, final=better, reason=f"{why}{stands}")
        if better:
            self.consider(record, row)
        elif record.repeats < record.job.measure.repeat_flagged:
            self._put_back(record)
        yield row


def _leased(pool: Pool) -> int:
    return sum(pool.leases.gangs.values())
