"""The schedule: a state machine that turns events into commands, without I/O or clock.

A card has at most one worker, a worker at most one attempt. Jobs go longest first to workers that
hold their model; gangs get a legal card set drained for them (``placement.py``); ``retry.py`` has
the policy for each failure. An ended attempt gives its row before any other command, and every job
exactly one final row. Durations are of a monotonic clock; the deadline is a time of day, which
moves on that clock when it is set (``ClockSet``). ``driver/loop.py`` and ``simulator.py`` run it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf

from orchestrator.core import events
from orchestrator.core.job import Accelerator, State
from orchestrator.core.outcome import Attempt, Failure, FailureClass, Outcome
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Card, Node
from orchestrator.grid.dependencies import things
from orchestrator.scheduler.deadline import Deadline, anchors
from orchestrator.scheduler.ledger import Ledger
from orchestrator.scheduler.outcomes import OutcomeJudge, RunEnding, hang, made_up
from orchestrator.scheduler.pool import Pool
from orchestrator.scheduler.queues import Dependencies, drawn, needed, replicated_cells
from orchestrator.scheduler.repeats import FlagJudge, Repeats
from orchestrator.scheduler.searched_jobs import Order, OrderedJobs
from orchestrator.scheduler.state import (
    Estimates,
    JobState,
    Phase,
    ScheduleSettings,
    Worker,
    WorkerState,
)
from orchestrator.util.format import duration, plural

_AFTER_S = 1e-3  # later than a job's latest start, and not just as late
_NOTICE_S = 60.0  # that nodes may take to start before a job without cards is worth a notice


class Schedule:
    """Turns events, in order, into commands to be carried out in order.

    ``attempts_before`` counts the attempts of each job in earlier invocations of the run, so that
    attempt ids stay unique; ``cards_before`` are the cards (node name, index) on which they
    measured replicates of a cell. A job id that is planned twice runs once. ``judge`` finds rows to
    be measured again; ``again`` has the measurements left to reused jobs whose rows are flagged.
    ``order`` releases the jobs that it governs, and may leave some out.
    """

    def __init__(
        self,
        jobs: Sequence[PlannedJob],
        settings: ScheduleSettings,
        estimates: Estimates,
        *,
        attempts_before: Mapping[str, int] | None = None,
        cards_before: Mapping[str, Collection[tuple[str, int]]] | None = None,
        judge: FlagJudge | None = None,
        again: Mapping[str, int] | None = None,
        order: Order | None = None,
    ) -> None:
        before = attempts_before or {}
        self.settings = settings
        self.finished = False
        self._started = False
        self._unsupported: list[PlannedJob] = []
        self._records: dict[str, JobState] = {}
        self._issued: dict[str, Attempt] = {}  # every attempt that ever ran
        self._next_look: float | None = None
        self._woken_for = inf
        by_kind: dict[Accelerator, list[JobState]] = {}
        seen: set[str] = set()
        hurried = settings.work_until < inf
        firsts = anchors(jobs) if hurried else needed(jobs)
        cell_cards: dict[str, set[Card]] = {
            cell: set() for cell in replicated_cells(planned.job for planned in jobs)
        }
        known = (cards_before or {}).items()
        self._cards_before = [(cell_cards[cell], at) for cell, at in known if cell in cell_cards]
        left = again or {}
        self._estimates = estimates
        saving = {job.job_id for job, _, _ in things([p.job for p in jobs], "produces")}
        self._repeats = Repeats(judge, needed(jobs) | saving)
        for planned in jobs:
            job_id = planned.job.job_id
            reused = planned.action is Action.REUSE
            if job_id in seen or planned.action is Action.SKIP or (reused and not left.get(job_id)):
                continue
            seen.add(job_id)
            if planned.action is Action.UNSUPPORTED:
                self._unsupported.append(planned)
                continue
            record = JobState(
                job=planned.job,
                job_id=job_id,
                order=len(self._records),
                estimate=estimates.estimate(planned.job),
                cautious=hurried,
                first=not firsts or job_id in firsts,
                number=before.get(job_id, 0),
            )
            if cell_cards and planned.job.cell_id in cell_cards:
                record.draw = drawn(settings.seed, job_id)
                record.cell_cards = cell_cards[planned.job.cell_id]
            if reused:
                self._repeats.reuse(record, left[job_id])
            self._records[job_id] = record
            by_kind.setdefault(planned.job.accelerator, []).append(record)
        self._total = len(self._unsupported) + sum(r.state is None for r in self._records.values())
        # Before the pools: it holds jobs back.
        self._needs = Dependencies(jobs, self._records.values())
        self._ordered = OrderedJobs(order, jobs, self._records)
        self._ledger = Ledger(self._records.values(), settings, self._repeats)
        self._verdicts = OutcomeJudge(self._ledger)
        self.pools = {
            kind: Pool(kind, records, settings, self._ledger.later)
            for kind, records in by_kind.items()
        }
        self._deadline = Deadline(self._records.values(), estimates, self.pools, self._ledger)
        self._stops = RunEnding(self.pools, self._verdicts)

    def handle(self, event: events.Event) -> list[events.Command]:
        """Return the commands that answer ``event``, in order; none after ``RunFinished``."""
        if self.finished:
            return []
        self._ledger.now = max(self._ledger.now, event.at)
        if isinstance(event, events.ClockSet):
            self._clock_set(event.ahead_s)
        commands = self._noted(self._react(event))
        commands += self._noted(self._go_on(event))
        if not self.finished:
            commands += self._wakes()
        return commands

    def counts(self) -> dict[State, int]:
        """Count the jobs of this run in each state; all states are there."""
        leases = (lease for pool in self.pools.values() for lease in pool.leases.current.values())
        running = sum(lease.running and not lease.record.repeating for lease in leases)
        counts = {state: self._ledger.tally[state] for state in State}
        counts[State.RUNNING] = running
        counts[State.PENDING] = self._total - sum(self._ledger.tally.values()) - running
        return counts

    def remaining_s(self) -> float:
        """Estimated seconds until the end, with the remaining work spread evenly."""
        return max(
            (pool.placement.remaining_s(self._ledger.now) for pool in self.pools.values()),
            default=0.0,
        )

    def _react(self, event: events.Event) -> Iterator[events.Command]:
        if not self._started:
            yield from self._begin()
        match event:
            case events.AttemptEnded(outcome=outcome):
                yield from self._attempt_ended(outcome)
            case events.WorkerReady(worker_id=worker_id):
                for pool, worker in self._worker_of(worker_id):
                    self._verdicts.starts.success()
                    yield from pool.leases.ready(worker, self._ledger.now)
            case events.WorkerStopped(worker_id=worker_id, failure=failure):
                yield from self._worker_stopped(worker_id, failure)
            case events.WorkerOverdue(worker_id=worker_id, reason=reason):
                for pool, worker in self._worker_of(worker_id):
                    if worker.state is not WorkerState.STOPPING:
                        worker.overdue = reason
                        yield from pool.leases.stop(worker, reason)
            case events.WorkerQueued(worker_id=worker_id) if self._ledger.stopping:
                for pool, worker in self._worker_of(worker_id):
                    lease = worker.slot.lease
                    if lease is not None and worker.state is not WorkerState.STOPPING:
                        lease.queued = True
                        yield from pool.leases.stop(worker, self._ledger.stopping)
            case events.NodeJoined(node=node):
                yield from self._node_joined(node)
            case events.NodeLeft(node_id=node_id, reason=reason):
                yield from self._node_left(node_id, reason)
            case events.MoreCards(kinds=kinds):
                for pool in self.pools.values():
                    pool.more_cards_may_come(pool.cards.accelerator in kinds)
            case events.StopRequested(reason=reason):
                abort = self._ledger.stopping != "" or not self.settings.finish_running
                yield from self._stops.stop_run(reason, abort=abort)

    def _go_on(self, event: events.Event) -> Iterator[events.Command]:
        """Run due timers, end hopeless jobs, place others, and finish."""
        if self._verdicts.tripped and not self._ledger.stopping:
            yield from self._stops.stop_run(self._verdicts.tripped, abort=False)
        self._ledger.run_due()
        if self._ledger.now >= self._ledger.work_until:
            why = "the deadline came: all work had to end"
            yield from self._stops.stop_run(why, abort=True)
        if not self._ledger.stopping:
            yield from self._deadline.give_up_late()
        yield from self._stops.give_up()
        yield from self._settle_needs()
        # Others may join at the same time: the Wake that follows a node decides for all of them.
        waits = isinstance(event, events.NodeJoined) and event.node.accelerator in self.pools
        if not (waits or self._ledger.stopping):
            yield from self._ordered.go_on(self.pools, self._ledger)
        yield from self._give_up_hopeless()
        yield from self._settle_needs()
        for pool in self.pools.values():
            for record in self._repeats.in_the_way(pool):
                yield from self._ledger.end_unrun(pool, record, State.NOT_STARTED, "others wait")
        if not waits:
            # Only after every end of this moment: what is left without work may be repeated.
            yield from self._assign()
            yield from self._stops.finish_if_done()

    def _noted(self, commands: Iterable[events.Command]) -> list[events.Command]:
        given = list(commands)
        for command in given:
            self._verdicts.begun(command)
            if isinstance(command, events.RecordRow):
                self._ordered.take_in(command)
            elif isinstance(command, events.RunAttempt):
                self._issued[command.attempt.attempt_id] = command.attempt
            elif isinstance(command, events.StopWorker):
                self._stops.begun(command)
            elif isinstance(command, events.RunFinished):
                self.finished = True
        return given

    def _begin(self) -> Iterator[events.Command]:
        self._started = True
        for planned in self._unsupported:
            self._ledger.tally[State.UNSUPPORTED] += 1
            yield events.RecordRow(
                job=planned.job, state=State.UNSUPPORTED, reason=planned.reason, final=True
            )
        for record, reason in self._needs.hopeless:
            pool = self.pools[record.job.accelerator]
            yield from self._ledger.end_unrun(pool, record, State.NOT_STARTED, reason)
        for pool in self.pools.values():
            pool.cards.changed = True

    def _clock_set(self, ahead_s: float) -> None:
        """Recompute the time left; a budget is a duration and moves only at the first event."""
        self._ledger.ahead_s = ahead_s
        if self._started and not self.settings.follow_clock:
            return
        self._deadline.move(self.settings.work_until - ahead_s)

    def _node_joined(self, node: Node) -> Iterator[events.Command]:
        pool = self.pools.get(node.accelerator)
        if pool is None:
            return
        self._verdicts.node_gone(node)  # if it was here before
        for cell_cards, before in self._cards_before:
            cell_cards.update(card for card in node.cards if (node.name, card.index) in before)
        for lease in (yield from pool.join(node)):
            yield from self._verdicts.lose(pool, lease, "its node came back as a new one")
        # Deciding after others that join at the same time spreads the work over all.
        yield events.Wake(at=self._ledger.now)

    def _node_left(self, node_id: str, reason: str) -> Iterator[events.Command]:
        for pool in self.pools.values():
            if node_id in pool.cards.server_of:
                self._verdicts.node_gone(pool.cards.server_of[node_id].nodes[node_id])
                for lease in pool.leave(node_id):
                    yield from self._verdicts.lose(pool, lease, f"node {node_id} is gone: {reason}")

    def _worker_of(self, worker_id: str) -> Iterator[tuple[Pool, Worker]]:
        for pool in self.pools.values():
            worker = pool.leases.workers.get(worker_id)
            if worker is not None:
                yield pool, worker

    def _worker_stopped(self, worker_id: str, failure: Failure | None) -> Iterator[events.Command]:
        for pool, worker in self._worker_of(worker_id):
            lease, was = worker.slot.lease, worker.state
            if worker.overdue:
                failure = failure or hang(worker.overdue)
            pool.leases.retire(worker)
            if lease is not None and lease.running:  # its end was not reported
                stopping = was is WorkerState.STOPPING
                kind = FailureClass.NODE_LOST if stopping else FailureClass.CRASH
                failure = failure or Failure(kind, "its worker stopped")
                outcome = made_up(lease, State.LOST, failure, self._ledger)
                yield from self._verdicts.conclude(pool, lease, outcome)
            elif (
                was is WorkerState.STARTING
                or (worker.overdue and not worker.used)
                or (lease is not None and was is WorkerState.BUSY)
            ):
                yield from self._verdicts.start_failed(pool, worker, lease, failure)
            elif was is WorkerState.IDLE and failure is not None:
                reason = f"its idle worker died: {failure.message}"
                yield from pool.count_failure(worker.slot.card, reason)
            yield from pool.leases.gone(worker, self._ledger.now)
            if worker.abandoned:
                pool.unlock(worker.slot)

    def _attempt_ended(self, outcome: Outcome) -> Iterator[events.Command]:
        for pool in self.pools.values():
            lease = pool.leases.current.get(outcome.attempt_id)
            if lease is not None and lease.running:
                yield from self._verdicts.conclude(pool, lease, outcome)
                if lease.record.phase is Phase.DONE and outcome.state is State.SUCCEEDED:
                    self._deadline.learn(lease, outcome)
                return
        yield from self._record_late(outcome)

    def _record_late(self, outcome: Outcome) -> Iterator[events.Command]:
        """Record the late outcome (except LOST) of an attempt that was given up."""
        attempt = self._issued.get(outcome.attempt_id)
        if attempt is None or outcome.state is State.LOST:
            return
        yield events.RecordRow(
            job=self._records[attempt.job_id].job,
            state=outcome.state,
            reason="came after the attempt was given up or had ended; not counted",
            final=False,
            attempt=attempt,
            outcome=outcome,
        )

    def _assign(self) -> Iterator[events.Command]:
        now = self._ledger.now
        for pool in self.pools.values() if not self._ledger.stopping else ():
            again = True
            while again:
                look = yield from pool.placement.assign(now)
                if look is not None and (self._next_look is None or self._next_look <= now):
                    self._next_look = look
                    yield events.Wake(at=look)
                again = self._repeat_next(pool)

    def _repeat_next(self, pool: Pool) -> bool:
        """Queue the flagged row that is most worth a repeat, if nothing else waits; a winner if
        nothing else is left."""
        winners = self._winners(pool) if not self._ledger.unfinished else ()
        for record in chain(self._repeats.worthwhile(pool), winners):
            record.expect(self._estimates.estimate(record.job))
            if self._ledger.now + record.cold_s <= self._ledger.work_until:
                self._repeats.begin(record)
                self._ledger.repeat(pool, record)
                self._deadline.watch(record)
                return True
        return False

    def _winners(self, pool: Pool) -> Iterator[JobState]:
        for record in self._ordered.winners(pool):
            if pool.cards.has_set(record.width, lambda slot: slot.usable):
                self._repeats.prove(record)
                yield record

    def _settle_needs(self) -> Iterator[events.Command]:
        """Queue the dependents of ended jobs, or end them as well."""
        while self._ledger.ended:
            for record, why in self._needs.ended(*self._ledger.ended.popleft()):
                pool = self.pools[record.job.accelerator]
                if why:
                    yield from self._ledger.end_unrun(pool, record, State.NOT_STARTED, why)
                else:
                    pool.enqueue(record)

    def without_cards(self, now: float) -> str:
        """Jobs that lost their last card set, or have waited a minute for a first one, and how long
        they go on waiting; "" if there are none."""
        limit_s = self.settings.wait_for_nodes_s
        return "; ".join(
            f"{plural(pool.waiting(width), 'job')} of {plural(width, f'{kind} card')}: none is "
            f"left to run on, and after {duration(limit_s)} without a server they are given up"
            for kind, pool in self.pools.items()
            for width, given_up_at in sorted(pool.hopeless_at.items())
            if pool.waiting(width)
            and (width in pool.had_cards or now >= given_up_at - limit_s + _NOTICE_S)
        )

    def _give_up_hopeless(self) -> Iterator[events.Command]:
        for kind, pool in self.pools.items():
            for width in pool.newly_hopeless(self._ledger.now):
                yield events.Wake(at=pool.hopeless_at[width])
            due = [width for width, at in pool.hopeless_at.items() if at <= self._ledger.now]
            for width in filter(pool.waiting, due):
                reason = (
                    f"no {width} {kind} cards that it could run on are left "
                    f"({len(pool.cards.servers)} nodes, {pool.cards.usable_cards} usable cards)"
                )
                for record in pool.records:
                    if record.width == width and record.phase in (Phase.WAITING, Phase.BACKOFF):
                        yield from self._ledger.end_unrun(pool, record, State.LOST, reason)
                        if self._ordered.held:  # and nothing else may happen
                            yield events.Wake(at=self._ledger.now)

    def _wakes(self) -> Iterable[events.Wake]:
        """Yield the next time to act without an event."""
        now, until = self._ledger.now, self._ledger.work_until
        ends = (at for at in (until, until + self.settings.stop_s) if at > now)
        late = inf if self._ledger.stopping else self._deadline.next_at + _AFTER_S
        at = min(late, self._stops.next_at, *ends, inf)
        if at < inf and (at != self._woken_for or at <= now):
            self._woken_for = at
            yield events.Wake(at=max(at, now))
