"""State that the parts of one run share: clock, commands given, rows, workers and timers.

Final rows are made only here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush

from orchestrator.core.events import Command, RecordRow, Wake
from orchestrator.core.job import State
from orchestrator.core.outcome import Attempt, Outcome
from orchestrator.scheduler.batch_size import configuration_of
from orchestrator.scheduler.repeats import Order, Repeats
from orchestrator.scheduler.retry import Breaker
from orchestrator.scheduler.state import JobState, Lease, Phase, ScheduleSettings, Worker


class Ledger:
    """Clock, commands, rows and timers of one run."""

    def __init__(
        self, settings: ScheduleSettings, repeats: Repeats, order: Order | None = None
    ) -> None:
        self.settings, self.repeats = settings, repeats
        self._order = order  # learns from every row
        self.now = 0.0
        self.ahead_s = 0.0  # of the time of day, on the clock of the events
        self.work_until = settings.work_until  # on the clock of the events
        self.stopping = ""  # why nothing more is started; empty while all is well
        self.commands: list[Command] = []  # of the present event
        self.workers: dict[str, Worker] = {}
        self.stops: deque[tuple[float, Worker]] = deque()  # until when they have to end
        self.issued: dict[str, Attempt] = {}  # every attempt that ever ran
        self.tally: Counter[State] = Counter()  # ended jobs
        self.ended: deque[tuple[JobState, str]] = deque()  # with reasons; emptied by the schedule
        limits = (settings.breaker_failures, settings.breaker_within_s)
        self.attempts, self.starts = Breaker("attempts", *limits), Breaker("workers", *limits)
        if settings.succeeded_before:
            self.attempts.success()
            self.starts.success()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._timers = 0

    @property
    def left_s(self) -> float:
        """Seconds in which what is started now must end."""
        return self.work_until - self.now

    def give(self, command: Command) -> None:
        """Give a command, after those given before it."""
        self.commands.append(command)
        if self._order is not None and isinstance(command, RecordRow):
            self._order.learn(command)

    def row(
        self,
        record: JobState,
        state: State,
        reason: str,
        attempt: Attempt | None = None,
        outcome: Outcome | None = None,
        *,
        final: bool = False,
    ) -> None:
        """Give a row of a job, or of its repeat; final ones are those of ``finish``."""
        row = RecordRow(
            job=record.job,
            state=state,
            reason=reason,
            final=final,
            attempt=attempt,
            outcome=outcome,
        )
        if final and record.state is not None:
            for repeat in self.repeats.row_of(record, row):
                self.give(repeat)
            return
        if final:
            record.state = state
            self.ended.append((record, reason))
            self.tally[state] += 1
            self.repeats.consider(record, row)
        self.give(row)

    def finish(
        self,
        record: JobState,
        state: State,
        reason: str,
        attempt: Attempt | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """End a job that is in no queue with its one final row, or its repeat."""
        if record.phase is Phase.DONE:
            raise AssertionError(f"{record.job_id} has its final row already")
        record.phase = Phase.DONE
        record.pool.unfinished[record.width] -= 1
        self.row(record, state, reason, attempt, outcome, final=True)

    def end_unrun(self, record: JobState, state: State, reason: str) -> None:
        """End a job that has no running attempt."""
        record.pool.withdraw(record, reason)
        self.finish(record, state, reason)

    def prune(self, lease: Lease) -> None:
        """End replicates and larger batches of a configuration that ran out of memory."""
        record, job = lease.record, lease.record.job
        configuration = configuration_of(job)
        reason = (
            f"batch size {job.batch_size} of the same configuration ran out of memory "
            f"(attempt {lease.attempt.attempt_id})"
        )
        for other in record.pool.records:
            if other.phase is Phase.DONE or other.running or other.search is not None:
                continue
            larger = other.batch_size >= record.batch_size and other.job.model == job.model
            if larger and configuration_of(other.job) == configuration:
                self.end_unrun(other, State.PRUNED, reason)

    def later(self, delay_s: float, then: Callable[[], None]) -> None:
        """Call ``then`` after ``delay_s``."""
        due = self.now + delay_s
        self._timers += 1
        heappush(self._due, (due, self._timers, then))
        self.give(Wake(at=due))

    def run_due(self) -> None:
        """Run the timers that are due."""
        while self._due and self._due[0][0] <= self.now:
            heappop(self._due)[2]()

    def retry(self, record: JobState, delay_s: float) -> None:
        """Queue a job again after a pause."""
        if delay_s <= 0:
            record.pool.enqueue(record)
            return
        record.phase = Phase.BACKOFF

        def end_of_pause() -> None:
            if record.phase is Phase.BACKOFF:
                record.pool.enqueue(record)

        self.later(delay_s, end_of_pause)
