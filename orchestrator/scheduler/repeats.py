"""Jobs outside the queues: those that a search holds, and rows that are measured again.

An ``Order`` governs jobs that neither need others nor are needed. They are held until it releases
them, as many as there are cards free; those that are left end as NOT_STARTED with its reason.

Rows that something disturbed are repeated before the run ends. A repeat starts only while nothing
else waits for its kind of card, and one at a time is queued, first those that could change an
answer; it goes back when other work comes before it has begun. It is not retried, and only a better
row replaces the one that it repeats. Winners of a search come last, in a fresh process and if
possible on another card.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from orchestrator.core.events import RecordRow
from orchestrator.core.job import Accelerator, State
from orchestrator.core.plan import SEARCH_ENDED, PlannedJob
from orchestrator.scheduler.queues import needed
from orchestrator.scheduler.state import JobState, Phase

if TYPE_CHECKING:
    from orchestrator.scheduler.ledger import Ledger
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
        flagged = self._flagged[pool.accelerator]
        if not flagged or self._judge is None or pool.waiting():
            return
        for job_id in self._judge.in_order(flagged):
            record = flagged.pop(job_id)
            # Before the first node has joined, they wait for it as other jobs do.
            if not pool.joined or pool.has_set(record.width, lambda slot: slot.usable):
                yield record

    def prove(self, record: JobState) -> JobState:
        """Have a winner measured in a fresh process, and if possible on other cards than before."""
        self._why[record.job_id] = WON
        record.send_elsewhere("card", sorted(record.cell_cards))
        record.warm = False
        record.expect(record.estimate)
        return record

    def begin(self, record: JobState) -> None:
        """Queue a repeat."""
        record.repeats += 1
        record.start_failures = 0
        self._active[record.job.accelerator][record.job_id] = record
        record.pool.unfinished[record.width] += 1
        record.pool.changed = True  # whether any are left for it is to be looked at again
        record.pool.enqueue(record)

    def in_the_way(self, pool: Pool) -> list[JobState]:
        """Repeats that have not begun while other work waits; they may come again."""
        active = self._active[pool.accelerator]
        for record in [one for one in active.values() if not one.repeating]:
            del active[record.job_id]
        idle = [record for record in active.values() if not record.running]
        waiting = [record for record in idle if record.phase is not Phase.LEASED]
        if not idle or pool.waiting() <= len(waiting):
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


class Order(Protocol):
    """Decides which jobs are measured next, and when enough is known."""

    def governs(self, job_id: str) -> bool:
        """Return whether a job waits for its release."""

    def release(
        self, free: Mapping[Accelerator, int], now: float, seconds: Callable[[str], float]
    ) -> Sequence[str]:
        """Ids of jobs to start now on so many free cards of each kind; each once in a run.
        ``seconds`` are those of a job if it starts now, loading included."""

    def learn(self, row: RecordRow) -> None:
        """Take in a row of any job."""

    def over(self, now: float) -> str:
        """Reason why the other jobs are left unmeasured; "" while the search goes on."""

    def winners(self) -> Sequence[str]:
        """Ids of the jobs that won, worth another measurement on another card."""


class OrderedJobs:
    """The jobs of a run that an order governs."""

    def __init__(
        self, order: Order | None, jobs: Sequence[PlannedJob], records: Mapping[str, JobState]
    ) -> None:
        self._order, self._records = order, records
        self._measured_again: set[str] = set()
        self._held: dict[str, JobState] = {}
        self._widths = Counter[Accelerator]()  # cards that they want
        if order is None:
            return
        bound = needed(jobs) | {p.job.job_id for p in jobs if p.needs or p.after}
        for job_id, record in records.items():
            free = record.phase is Phase.WAITING and job_id not in bound
            if free and order.governs(job_id):
                record.phase = Phase.HELD
                self._held[job_id] = record
                self._widths[record.job.accelerator] += record.width

    @property
    def held(self) -> dict[str, JobState]:
        """Jobs that wait for their release, by id: a search may have ten thousand."""
        for record in [one for one in self._held.values() if one.phase is not Phase.HELD]:
            del self._held[record.job_id]
            self._widths[record.job.accelerator] -= record.width
        return self._held

    def winners(self, pool: Pool) -> Iterator[JobState]:
        """Take the winners of this kind of card that are yet to be measured again, each once; to be
        asked when nothing else is left to do."""
        if self._order is None or self.held:
            return
        for job_id in self._order.winners():
            record = self._records.get(job_id)
            if record is None or job_id in self._measured_again:
                continue
            done = record.pool is pool and record.phase is Phase.DONE
            if done and record.job.measure.repeat_flagged:
                self._measured_again.add(job_id)
                if pool.has_set(record.width, lambda slot: slot.usable):
                    yield record

    def go_on(self, pools: Mapping[Accelerator, Pool], ledger: Ledger) -> None:
        """Queue the next jobs, or end those that are left."""
        if self._order is None or not self.held:
            return
        reason = self._order.over(ledger.now)
        if not reason:
            # Cards that other unfinished jobs have or want.
            taken = {
                kind: sum(width * count for width, count in pool.unfinished.items())
                - self._widths[kind]
                for kind, pool in pools.items()
            }
            stuck = not any(taken.values())  # even without a free card, a job must wait for one
            free = {
                kind: max(pool.usable_cards - taken[kind], int(stuck))
                for kind, pool in pools.items()
                if self._widths[kind]
            }
            free = {kind: count for kind, count in free.items() if count > 0}
            if not free:
                return
            warm = {worker.key for pool in pools.values() for worker in pool.idle.values()}

            def seconds(job_id: str) -> float:
                record = self._records.get(job_id)
                if record is None:  # reused, so it does not matter
                    return 1.0
                return record.duration if record.key in warm else record.cold_s

            released = self._order.release(free, ledger.now, seconds)
            for record in filter(None, map(self._held.get, dict.fromkeys(released))):
                record.pool.enqueue(record)
            if released or not stuck:
                return
            reason = f"{SEARCH_ENDED}: it has nothing to choose from"
        for record in list(self.held.values()):
            ledger.end_unrun(record, State.NOT_STARTED, reason)
