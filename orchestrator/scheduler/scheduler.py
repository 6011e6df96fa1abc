"""The schedule: a state machine that turns events into commands, without I/O or clock.

A card has at most one worker, a worker at most one attempt. Jobs go longest first to workers that
hold their model; gangs get a legal card set drained for them (``placement.py``); ``retry.py`` has
the policy for each failure. An ended attempt gives its row before any other command, and every job
exactly one final row. Durations are of a monotonic clock; the deadline is a time of day, which
moves on that clock when it is set (``ClockSet``). ``driver/loop.py`` and ``simulator.py`` run it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from math import inf

from orchestrator.core import events
from orchestrator.core.job import Accelerator, State
from orchestrator.core.outcome import Failure, FailureClass, Outcome
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Card, Node
from orchestrator.grid.dependencies import things
from orchestrator.scheduler.deadline import Deadline, anchors
from orchestrator.scheduler.ledger import Ledger
from orchestrator.scheduler.outcomes import OutcomeJudge, RunEnding
from orchestrator.scheduler.pool import Pool
from orchestrator.scheduler.queues import Dependencies, drawn, needed, replicated_cells
from orchestrator.scheduler.repeats import FlagJudge, Order, OrderedJobs, Repeats
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
        # Before the pools: they hold jobs back.
        self._needs = Dependencies(jobs, self._records)
        self._ordered = OrderedJobs(order, jobs, self._records)
        self._ledger = Ledger(settings, self._repeats, order)
        self._verdicts = OutcomeJudge(self._ledger)
        self.pools = {kind: Pool(kind, records, self._ledger) for kind, records in by_kind.items()}
        self._deadline = Deadline(self._records.values(), estimates, self.pools, self._ledger)
        self._stops = RunEnding(self.pools, self._verdicts)

    def handle(self, event: events.Event) -> list[events.Command]:
        """Return the commands that answer ``event``, in order; none after ``RunFinished``."""
        if self.finished:
            return []
        self._ledger.now = max(self._ledger.now, event.at)
        commands: list[events.Command] = []
        self._ledger.commands = commands
        if isinstance(event, events.ClockSet):
            # Recompute the time left; a budget is a duration and moves only at the first event.
            self._ledger.ahead_s = event.ahead_s
            if self.settings.follow_clock or not self._started:
                self._deadline.move(self.settings.work_until - event.ahead_s)
        if not self._started:
            self._begin()
        self._react(event)
        self._go_on(event)
        self.finished = any(isinstance(command, events.RunFinished) for command in commands)
        if not self.finished:
            self._wake()
        return commands

    def counts(self) -> dict[State, int]:
        """Count the jobs of this run in each state; all states are there."""
        records = self._records.values()
        running = sum(record.running and not record.repeating for record in records)
        counts = {state: self._ledger.tally[state] for state in State}
        counts[State.RUNNING] = running
        counts[State.PENDING] = self._total - sum(self._ledger.tally.values()) - running
        return counts

    def _begin(self) -> None:
        self._started = True
        for planned in self._unsupported:
            self._ledger.tally[State.UNSUPPORTED] += 1
            self._ledger.give(
                events.RecordRow(
                    job=planned.job, state=State.UNSUPPORTED, reason=planned.reason, final=True
                )
            )
        for record, reason in self._needs.hopeless:
            self._ledger.end_unrun(record, State.NOT_STARTED, reason)
        for pool in self.pools.values():
            pool.changed = True

    def _react(self, event: events.Event) -> None:
        workers = self._ledger.workers
        match event:
            case events.AttemptEnded(outcome=outcome):
                self._attempt_ended(outcome)
            case events.WorkerReady(worker_id=worker_id) if worker_id in workers:
                self._ledger.starts.success()
                workers[worker_id].pool.leases.ready(workers[worker_id])
            case events.WorkerStopped(worker_id=worker_id) if worker_id in workers:
                self._worker_stopped(workers[worker_id], event.failure)
            case events.WorkerOverdue(worker_id=worker_id) if worker_id in workers:
                worker = workers[worker_id]
                if worker.state is not WorkerState.STOPPING:
                    worker.overdue = event.reason
                    worker.pool.leases.stop(worker, event.reason)
            case events.WorkerQueued(worker_id=worker_id) if worker_id in workers:
                worker = workers[worker_id]
                lease, stopping = worker.lease, self._ledger.stopping
                if stopping and lease is not None and worker.state is not WorkerState.STOPPING:
                    lease.queued = True
                    worker.pool.leases.stop(worker, stopping)
            case events.NodeJoined(node=node) if node.accelerator in self.pools:
                self._node_joined(node)
            case events.NodeLeft(node_id=node_id, reason=reason):
                self._node_left(node_id, f"node {node_id} is gone: {reason}")
            case events.MoreCards(kinds=kinds):
                for pool in self.pools.values():
                    pool.more_may_come, pool.changed = pool.accelerator in kinds, True
            case events.StopRequested(reason=reason):
                abort = self._ledger.stopping != "" or not self.settings.finish_running
                self._stops.stop_run(reason, abort=abort)

    def _go_on(self, event: events.Event) -> None:
        """Run due timers, end hopeless jobs, place others, and finish."""
        ledger = self._ledger
        if (tripped := ledger.attempts.tripped or ledger.starts.tripped) and not ledger.stopping:
            self._stops.stop_run(tripped, abort=False)
        ledger.run_due()
        if ledger.now >= ledger.work_until:
            self._stops.stop_run("the deadline came: all work had to end", abort=True)
        if not ledger.stopping:
            self._deadline.give_up_late()
        self._stops.give_up()
        self._settle_needs()
        # Others may join at the same time: the Wake that follows a node decides for all of them.
        waits = isinstance(event, events.NodeJoined) and event.node.accelerator in self.pools
        if not (waits or ledger.stopping):
            self._ordered.go_on(self.pools, ledger)
        self._give_up_hopeless()
        self._settle_needs()
        for pool in self.pools.values():
            for record in self._repeats.in_the_way(pool):
                ledger.end_unrun(record, State.NOT_STARTED, "others wait")
        if waits:
            return
        # Only after every end of this moment: what is left without work may be repeated.
        for pool in self.pools.values() if not ledger.stopping else ():
            again = True
            while again:
                look = pool.placement.assign()
                if look is not None and (self._next_look is None or self._next_look <= ledger.now):
                    self._next_look = look
                    ledger.give(events.Wake(at=look))
                again = self._repeat_next(pool)
        self._stops.finish_if_done()

    def _node_joined(self, node: Node) -> None:
        self._node_left(node.node_id, "its node came back as a new one")  # if it was here before
        for cell_cards, before in self._cards_before:
            cell_cards.update(card for card in node.cards if (node.name, card.index) in before)
        self.pools[node.accelerator].join(node)
        # Deciding after others that join at the same time spreads the work over all.
        self._ledger.give(events.Wake(at=self._ledger.now))

    def _node_left(self, node_id: str, reason: str) -> None:
        for pool in self.pools.values():
            if node_id in pool.server_of:
                for card in pool.server_of[node_id].nodes[node_id].cards:
                    self._ledger.starts.withdrawn(str(card))
                for lease in pool.leave(node_id):
                    self._verdicts.lose(lease, reason)

    def _worker_stopped(self, worker: Worker, failure: Failure | None) -> None:
        pool, lease, was = worker.pool, worker.lease, worker.state
        if worker.overdue and failure is None:
            failure = Failure(FailureClass.HANG, worker.overdue)
        pool.leases.retire(worker)
        if lease is not None and lease.running:  # its end was not reported
            stopping = was is WorkerState.STOPPING
            kind = FailureClass.NODE_LOST if stopping else FailureClass.CRASH
            failure = failure or Failure(kind, "its worker stopped")
            self._verdicts.conclude(lease, self._verdicts.made_up(lease, State.LOST, failure))
        elif (
            was is WorkerState.STARTING
            or (worker.overdue and worker.key is None)
            or (lease is not None and was is WorkerState.BUSY)
        ):
            self._verdicts.start_failed(worker, lease, failure)
        elif was is WorkerState.IDLE and failure is not None:
            pool.count_failure(worker.slot.card, f"its idle worker died: {failure.message}")
        pool.leases.gone(worker)
        if worker.abandoned:
            pool.unlock(worker.slot)

    def _attempt_ended(self, outcome: Outcome) -> None:
        attempt = self._ledger.issued.get(outcome.attempt_id)
        if attempt is None:
            return
        record = self._records[attempt.job_id]
        lease = record.lease
        if lease is not None and lease.attempt is attempt:
            self._verdicts.conclude(lease, outcome)
            if record.phase is Phase.DONE and outcome.state is State.SUCCEEDED:
                self._deadline.learn(lease, outcome)
        elif outcome.state is not State.LOST:
            reason = "came after the attempt was given up or had ended; not counted"
            self._ledger.row(record, outcome.state, reason, attempt, outcome)

    def _repeat_next(self, pool: Pool) -> bool:
        """Queue the flagged row that is most worth a repeat, if nothing else waits; a winner if
        nothing else is left."""
        idle = not any(other.unfinished.total() for other in self.pools.values())
        winners = self._ordered.winners(pool) if idle else ()
        for record in chain(self._repeats.worthwhile(pool), map(self._repeats.prove, winners)):
            record.expect(self._estimates.estimate(record.job))
            if self._ledger.now + record.cold_s <= self._ledger.work_until:
                self._repeats.begin(record)
                self._deadline.watch(record)
                return True
        return False

    def _settle_needs(self) -> None:
        """Queue the dependents of ended jobs, or end them as well."""
        while self._ledger.ended:
            for record, why in self._needs.ended(*self._ledger.ended.popleft()):
                if why:
                    self._ledger.end_unrun(record, State.NOT_STARTED, why)
                else:
                    record.pool.enqueue(record)

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

    def _give_up_hopeless(self) -> None:
        for kind, pool in self.pools.items():
            for width in pool.newly_hopeless():
                self._ledger.give(events.Wake(at=pool.hopeless_at[width]))
            due = [width for width, at in pool.hopeless_at.items() if at <= self._ledger.now]
            for width in filter(pool.waiting, due):
                reason = (
                    f"no {width} {kind} cards that it could run on are left "
                    f"({len(pool.servers)} nodes, {pool.usable_cards} usable cards)"
                )
                for record in pool.records:
                    if record.width == width and record.phase in (Phase.WAITING, Phase.BACKOFF):
                        self._ledger.end_unrun(record, State.LOST, reason)
                        if self._ordered.held:  # and nothing else may happen
                            self._ledger.give(events.Wake(at=self._ledger.now))

    def _wake(self) -> None:
        """Ask for the next time to act without an event."""
        now, until = self._ledger.now, self._ledger.work_until
        ends = (at for at in (until, until + self.settings.stop_s) if at > now)
        late = inf if self._ledger.stopping else self._deadline.next_at + _AFTER_S
        at = min(late, self._stops.next_at, *ends, inf)
        if at < inf and (at != self._woken_for or at <= now):
            self._woken_for = at
            self._ledger.give(events.Wake(at=max(at, now)))
