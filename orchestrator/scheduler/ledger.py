"""Clock, rows and ended jobs of a run; final rows are made only here."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush

from orchestrator.core.events import Command, RecordRow, Wake
from orchestrator.core.job import Job, State
from orchestrator.core.outcome import Attempt, Outcome
from orchestrator.scheduler.batch_size import configuration_of
from orchestrator.scheduler.leases import Lease
from orchestrator.scheduler.pool import Pool
from orchestrator.scheduler.repeats import Repeats
from orchestrator.scheduler.state import JobState, Phase, ScheduleSettings


class Ledger:
    """Clock, rows and timers of one run."""

    def __init__(
        self, records: Iterable[JobState], settings: ScheduleSettings, repeats: Repeats
    ) -> None:
        self.settings = settings
        self.repeats = repeats
        self.now = 0.0
        self.ahead_s = 0.0  # of the time of day, on the clock of the events
        self.work_until = settings.work_until  # on the clock of the events
        self.stopping = ""  # why nothing more is started; empty while all is well
        self.tally: Counter[State] = Counter()  # ended jobs
        self.unfinished = 0
        self.ended: deque[tuple[JobState, str]] = deque()  # with reasons; emptied by the schedule
        self._configurations: dict[Job, list[JobState]] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._timers = 0
        for record in records:
            self.unfinished += record.phase is not Phase.DONE
            if record.search is None:
                self._configurations.setdefault(configuration_of(record.job), []).append(record)

    def row(
        self,
        record: JobState,
        state: State,
        reason: str,
        attempt: Attempt | None = None,
        outcome: Outcome | None = None,
    ) -> RecordRow:
        """A row of a job; final ones are made by ``finish``."""
        return RecordRow(
            job=record.job,
            state=state,
            reason=reason,
            final=False,
            attempt=attempt,
            outcome=outcome,
        )

    def finish(
        self,
        pool: Pool,
        record: JobState,
        state: State,
        reason: str,
        attempt: Attempt | None = None,
        outcome: Outcome | None = None,
    ) -> Iterator[RecordRow]:
        """End a job that is in no queue with its one final row, or its repeat."""
        if record.phase is Phase.DONE:
            raise AssertionError(f"{record.job_id} has its final row already")
        repeating, record.phase = record.repeating, Phase.DONE
        self.unfinished -= 1
        pool.unfinished[record.width] -= 1
        row = RecordRow(
            job=record.job,
            state=state,
            reason=reason,
            final=True,
            attempt=attempt,
            outcome=outcome,
        )
        if repeating:
            yield from self.repeats.row_of(record, row)
            return
        record.state = state
        self.ended.append((record, reason))
        self.tally[state] += 1
        self.repeats.consider(record, row)
        yield row

    def repeat(self, pool: Pool, record: JobState) -> None:
        """Queue a job that is done once more."""
        self.unfinished += 1
        pool.unfinished[record.width] += 1
        pool.cards.changed = True  # whether any are left for it is to be looked at again
        pool.enqueue(record)

    def end_unrun(
        self, pool: Pool, record: JobState, state: State, reason: str
    ) -> Iterator[Command]:
        """End a job that has no running attempt."""
        yield from pool.withdraw(record, reason)
        yield from self.finish(pool, record, state, reason)

    def prune(self, pool: Pool, lease: Lease) -> Iterator[Command]:
        """End replicates and larger batches of a configuration that ran out of memory."""
        job, attempt_id = lease.record.job, lease.attempt.attempt_id
        for other in self._configurations.get(configuration_of(job), ()):
            if other is lease.record or other.phase is Phase.DONE:
                continue
            if other.batch_size < lease.record.batch_size:
                continue
            if not pool.is_running(other):
                reason = (
                    f"batch size {job.batch_size} of the same configuration ran out of memory "
                    f"(attempt {attempt_id})"
                )
                yield from self.end_unrun(pool, other, State.PRUNED, reason)

    def later(self, delay_s: float, then: Callable[[], None]) -> Wake:
        """Call ``then`` after ``delay_s``."""
        due = self.now + delay_s
        self._timers += 1
        heappush(self._due, (due, self._timers, then))
        return Wake(at=due)

    def run_due(self) -> None:
        """Run the timers that are due."""
        while self._due and self._due[0][0] <= self.now:
            heappop(self._due)[2]()

    def retry(self, pool: Pool, record: JobState, delay_s: float) -> Iterator[Command]:
        """Queue a job again after a pause."""
        if delay_s <= 0:
            pool.enqueue(record)
            return
        record.phase = Phase.BACKOFF

        def end_of_pause() -> None:
            if record.phase is Phase.BACKOFF:
                pool.enqueue(record)

        yield self.later(delay_s, end_of_pause)
