"""Jobs that are released in the order of a search, or left unmeasured once it has its answer.

An ``Order`` governs jobs that neither need others nor are needed. They are held until it releases
them, as many as there are cards free; those that are left end as NOT_STARTED with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from orchestrator.core.events import Command, RecordRow
from orchestrator.core.job import Accelerator, State
from orchestrator.core.plan import SEARCH_ENDED, PlannedJob
from orchestrator.scheduler.ledger import Ledger
from orchestrator.scheduler.pool import Pool
from orchestrator.scheduler.queues import needed
from orchestrator.scheduler.state import JobState, Phase


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
        self.held: dict[str, JobState] = {}  # jobs that wait for their release
        self._widths: Counter[Accelerator] = Counter()  # cards that held jobs want, by kind
        if order is None:
            return
        bound = needed(jobs) | {p.job.job_id for p in jobs if p.needs or p.after}
        for job_id, record in records.items():
            free = record.phase is Phase.WAITING and job_id not in bound
            if free and order.governs(job_id):
                record.phase = Phase.HELD
                self.held[job_id] = record
                self._widths[record.job.accelerator] += record.width

    def take_in(self, row: RecordRow) -> None:
        """Pass on a row."""
        if self._order is not None:
            self._order.learn(row)
            if row.final:
                self._let_go(row.job.job_id)

    def winners(self, pool: Pool) -> Iterator[JobState]:
        """Take the winners of this kind of card that are yet to be measured again: last, once
        nothing else is left to do, and each once."""
        if self._order is None or self.held or pool.unfinished.total():
            return
        for job_id in self._order.winners():
            record = self._records.get(job_id)
            if record is None or job_id in self._measured_again:
                continue
            mine = record.job.accelerator == pool.cards.accelerator
            if mine and record.job.measure.repeat_flagged and record.phase is Phase.DONE:
                self._measured_again.add(job_id)
                yield record

    def go_on(self, pools: Mapping[Accelerator, Pool], ledger: Ledger) -> Iterator[Command]:
        """Queue the next jobs, or end those that are left."""
        if self._order is None or not self.held:
            return
        reason = self._order.over(ledger.now)
        if not reason:
            taken = {kind: self._taken(kind, pool) for kind, pool in pools.items()}
            stuck = not any(taken.values())  # even without a free card, a job must wait for one
            free = {
                kind: max(pool.cards.usable_cards - taken[kind], int(stuck))
                for kind, pool in pools.items()
                if self._widths[kind]
            }
            free = {kind: count for kind, count in free.items() if count > 0}
            if not free:
                return
            warm = {worker.key for pool in pools.values() for worker in pool.cards.idle.values()}

            def seconds(job_id: str) -> float:
                record = self._records.get(job_id)
                if record is None:  # reused, so it does not matter
                    return 1.0
                return record.duration if record.key in warm else record.cold_s

            released = self._order.release(free, ledger.now, seconds)
            for record in filter(None, map(self._let_go, released)):
                if record.phase is Phase.HELD:
                    pools[record.job.accelerator].enqueue(record)
            if released or not stuck:
                return
            reason = f"{SEARCH_ENDED}: it has nothing to choose from"
        for record in filter(None, map(self._let_go, list(self.held))):
            if record.phase is Phase.HELD:
                pool = pools[record.job.accelerator]
                yield from ledger.end_unrun(pool, record, State.NOT_STARTED, reason)

    def _let_go(self, job_id: str) -> JobState | None:
        record = self.held.pop(job_id, None)
        if record is not None:
            self._widths[record.job.accelerator] -= record.width
        return record

    def _taken(self, kind: Accelerator, pool: Pool) -> int:
        """Cards that other unfinished jobs of this kind have or want."""
        wanted = sum(width * count for width, count in pool.unfinished.items())
        return wanted - self._widths[kind]
