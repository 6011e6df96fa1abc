"""Board of a run: its status and its hung workers, from events and commands, without I/O."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.core import events
from orchestrator.core.job import Job, State
from orchestrator.core.labels import Label, labels_of
from orchestrator.core.measurement import Measurement
from orchestrator.core.plan import NOTHING, Action, Plan, Span
from orchestrator.core.status import Answered, CardStatus, FailedAttempt, Rate, RunStatus
from orchestrator.core.topology import Card, Node
from orchestrator.driver.standing import Standing
from orchestrator.planning.forecast import Remaining
from workloads.devices.monitor.host import CardTelemetry

# A call into a card's driver or a collective can hang for ever with the interpreter held, so the
# worker itself cannot notice. Every phase has a generous limit, except being queued for processors;
# one that an extension named itself has that of ``measure``.
# Time counts on this host's clock from when it first saw the phase: other clocks may be wrong.

#: Limits in seconds by phase; ``starting`` is imports and acquisition of the card.
PHASE_LIMITS_S: Mapping[str, float] = {
    "starting": 900.0,
    "start": 600.0,
    "install": 3600.0,  # of software, by itself or after another that makes the same
    "load": 3600.0,
    "compile": 7200.0,
    "warmup": 1800.0,
    "measure": 1800.0,
    "finish": 600.0,
}
_UNLIMITED = ("free", "idle", "queued")  # phases in which no job hangs
#: Allowance over a job's own limits, since a batch that has begun is finished (it may compile).
MEASURE_FACTOR = 3.0
#: Most that a pause between two looks for hung workers counts (normally a second).
LONGEST_PAUSE_S = 5.0
#: Number of last failures whose messages are kept; all failures are counted.
KEPT_FAILURES = 5
REASON_LENGTH = 400
_FAILED = (State.FAILED, State.TIMED_OUT, State.LOST)


@dataclass(slots=True)
class _Seat:
    card: Card
    worker_id: str = ""
    phase: str = "free"
    since: float = 0.0
    job: str = ""
    attempt_id: str = ""
    allowances_s: Mapping[str, float] = field(default_factory=dict)  # beyond the limits, by phase
    is_overdue: bool = False  # its worker has exceeded a limit


@dataclass(slots=True)
class Board:
    """Counts of a run from its events and commands; times are of the events' clock."""

    run: str
    plan: Plan
    started_at: float
    start: str = ""  # how the run comes to its cards
    processors: int = 1  # on which emulated cards take turns
    standing: Standing | None = None  # of its rows; None: they are not judged
    final_rows: int = 0  # of the run, those of earlier drivers included
    limits_s: Mapping[str, float] = field(default_factory=lambda: PHASE_LIMITS_S)  # by phase
    longest_pause_s: float = LONGEST_PAUSE_S
    #: Present answers to the questions of the grid, at a time of the events' clock.
    answers: Callable[[float], tuple[Answered, ...]] = lambda _: ()
    _first_at: float | None = None  # when its first attempt began
    _waited: bool = False  # for cards that others held
    _nodes: dict[str, Node] = field(default_factory=dict)
    _seats: dict[Card, _Seat] = field(default_factory=dict)
    _workers: dict[str, Card] = field(default_factory=dict)
    _seats_of: dict[str, list[_Seat]] = field(default_factory=dict)  # by attempt
    _counts: Counter[str] = field(default_factory=Counter)
    _to_do: set[str] = field(default_factory=set)  # ids of jobs still to be done
    _to_run: int = 0
    _remaining: Remaining = field(init=False)
    _used: set[str] = field(default_factory=set)  # workers that ran an attempt
    _attempts: int = 0
    _jobs_run: int = 0
    # By unit: tokens or samples, the seconds that they took, and the jobs that did them.
    _work: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _timed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _timed_jobs: Counter[str] = field(default_factory=Counter)
    _failures: deque[FailedAttempt] = field(default_factory=lambda: deque(maxlen=KEPT_FAILURES))
    _failure_counts: Counter[str] = field(default_factory=Counter)
    paused: str = ""
    trouble: str = ""
    waiting: str = ""
    slow_cards: tuple[str, ...] = ()
    stop_requests: int = 0
    _stopping: str = ""
    _finished: bool = False
    _looked_at: float | None = None  # for hung workers
    _labels: Mapping[str, Label] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._labels = labels_of([planned.job for planned in self.plan.jobs])
        for planned in self.plan.jobs:
            if planned.action is Action.RUN:
                self._to_do.add(planned.job.job_id)
            elif planned.action is not Action.UNSUPPORTED:
                self._counts["reused" if planned.action is Action.REUSE else "skipped"] += 1
        self._to_run = len(self._to_do)
        self._remaining = Remaining(self.plan.jobs, self.plan.nodes, self.processors)

    @property
    def total(self) -> int:
        """Jobs of the grid."""
        return len(self.plan.jobs)

    def label(self, job: Job) -> str:
        """Label of a job, as in its report."""
        return str(self._labels.get(job.job_id, job.label))

    def flags(self, job: Job) -> str:
        """Names of the flags of a job's row, "" if it has none."""
        return self.standing.flagged_as(job.job_id) if self.standing else ""

    @property
    def done(self) -> int:
        """Jobs that are terminal, reused ones included."""
        return sum(self._counts.values())

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node that joined, those that left again included."""
        return tuple(self._nodes.values())

    def node_name(self, node_id: str) -> str:
        """The name people know the node by."""
        node = self._nodes.get(node_id)
        return node.name if node else node_id

    def card_name(self, card: Card) -> str:
        """E.g. ``hpu-1/HPU3``."""
        return f"{self.node_name(card.node_id)}/{card.accelerator}{card.index}"

    def saw(self, event: events.Event) -> None:
        """Count an event."""
        if isinstance(event, events.NodeJoined):
            self._nodes[event.node.node_id] = event.node
            for card in event.node.cards:
                self._seats.setdefault(card, _Seat(card=card))
        elif isinstance(event, events.NodeLeft):
            for card in [card for card in self._seats if card.node_id == event.node_id]:
                self._workers.pop(self._seats.pop(card).worker_id, None)
        elif isinstance(event, events.WorkerReady):
            self._seat(event.worker_id, "idle", event.at)
        elif isinstance(event, events.WorkerStopped):
            self._seat(event.worker_id, "free", event.at)
            freed = self._workers.pop(event.worker_id, None)
            if freed in self._seats:
                self._seats[freed].worker_id = ""
        elif isinstance(event, events.AttemptEnded):
            self._attempts += 1
            self._remaining.end(event.outcome.attempt_id, event.at)
            for seat in self._seats_of.pop(event.outcome.attempt_id, ()):
                self._seat(seat.worker_id, "idle", event.at)
        elif isinstance(event, events.StopRequested):
            self._stopping = event.reason
            self.stop_requests += 1

    def did(self, command: events.Command, at: float) -> None:
        """Count a command that was carried out."""
        if isinstance(command, events.StartWorker):
            seat = self._seats.setdefault(command.card, _Seat(card=command.card))
            seat.worker_id, seat.is_overdue = command.worker_id, False
            self._workers[command.worker_id] = command.card
            self._seat(command.worker_id, "starting", at)
        elif isinstance(command, events.RunAttempt):
            self._first_at = at if self._first_at is None else self._first_at
            job, attempt_id = self.label(command.attempt.job), command.attempt.attempt_id
            alone = command.attempt.job.alone  # as are the others of its kind
            first = not alone and self._used.isdisjoint(command.worker_ids)
            self._used.update(command.worker_ids)
            self._remaining.begin(attempt_id, command.attempt.job_id, at, first=first)
            cards = [self._workers.get(worker_id) for worker_id in command.worker_ids]
            seats = [self._seats[card] for card in cards if card in self._seats]
            self._seats_of[attempt_id] = seats
            measure = command.attempt.job.measure
            warmup_s = measure.warmup_limit_s if measure.warmup else 0.0
            # Until the end of warm-up, what was timed may prove to be warm-up.
            measure_s = warmup_s + MEASURE_FACTOR * measure.time_limit_s
            for seat in seats:
                self._seat(seat.worker_id, "start", at, job, attempt_id)
                seat.allowances_s = {"warmup": warmup_s, "measure": measure_s}
        elif isinstance(command, events.RecordRow) and command.final:
            self.final_rows += 1
            if command.repeat:
                return
            self._counts[command.state.value] += 1
            self._to_do.discard(command.job.job_id)
            if command.attempt is None:
                self._remaining.drop(command.job.job_id)
            ran = command.attempt is not None and command.state is not State.NOT_STARTED
            self._jobs_run += ran
        elif isinstance(command, events.RunFinished):
            self._finished = True

    def measured(self, row: events.RecordRow, measurement: Measurement, at: float) -> None:
        """Count the row of an attempt."""
        metrics, attempt = measurement.metrics, row.attempt
        if attempt is not None:
            self._remaining.row(
                attempt.attempt_id,
                final=row.final,
                waited_s=measurement.queued_s or 0.0,
                load_s=measurement.load_s or 0.0,
            )
        if measurement.failure_class:
            self._failure_counts[measurement.failure_class] += 1
        if row.state in _FAILED and attempt is not None:
            self._failures.appendleft(
                FailedAttempt(
                    at=at,
                    job=self.label(attempt.job),
                    state=row.state.value,
                    failure_class=measurement.failure_class or "",
                    reason=" ".join(measurement.reason.split())[:REASON_LENGTH],
                    card=self.card_name(attempt.cards[0]),
                    final=row.final,
                )
            )
        if row.repeat:  # the work is counted once
            return
        if row.state is State.SUCCEEDED and row.final and metrics.throughput and metrics.measure_s:
            unit = metrics.throughput_unit
            self._work[unit] += metrics.throughput * metrics.measure_s
            self._timed_s[unit] += metrics.measure_s
            self._timed_jobs[unit] += 1

    def status(
        self,
        now: float,
        progress: Mapping[str, events.Progress],
        telemetry: Mapping[Card, CardTelemetry] | None = None,
        *,
        at: float | None = None,
    ) -> RunStatus:
        """Status at ``now``, by the last reports; ``at`` is the time of day, by default ``now``."""
        telemetry = telemetry or {}
        at = now if at is None else at
        for seat in self._seats.values():
            heard = progress.get(seat.worker_id)
            if heard is None or not seat.attempt_id or heard.attempt_id != seat.attempt_id:
                continue
            if heard.phase != seat.phase:
                # Counted from its first report here: clocks of other hosts may be wrong.
                seat.phase, seat.since = heard.phase, now
        cards = []
        for seat in sorted(
            self._seats.values(), key=lambda seat: (self.node_name(seat.card.node_id), seat.card)
        ):
            read = telemetry.get(seat.card, CardTelemetry())
            cards.append(
                CardStatus(
                    card=self.card_name(seat.card),
                    worker_id=seat.worker_id,
                    phase=seat.phase,
                    phase_age_s=round(max(0.0, now - seat.since), 1) if seat.worker_id else 0.0,
                    job=seat.job,
                    attempt_id=seat.attempt_id,
                    power_w=read.power_w,
                    temperature_c=read.temperature_c,
                    utilization_percent=read.utilization_percent,
                    memory_used_bytes=read.memory_used_bytes,
                )
            )
        self._waited = self._waited or bool(self.waiting)
        first_at = None if self._waited else self._first_at
        left = self._left(now)
        ranged = left is not None and left.high_s > left.low_s
        return RunStatus(
            run=self.run,
            at=at,
            started_at=at - (now - self.started_at),
            total=self.total,
            done=self.done,
            counts=dict(self._counts),
            attempts=self._attempts,
            emulated=any(node.emulated for node in self._nodes.values()),
            cards=tuple(cards),
            eta_s=left.middle_s if left else None,
            eta_low_s=left.low_s if left and ranged else None,
            eta_high_s=left.high_s if left and ranged else None,
            start=self.start,
            first_attempt_s=None if first_at is None else first_at - self.started_at,
            promised_low_s=self.plan.duration.low_s,
            promised_high_s=self.plan.duration.high_s,
            stopping=self._stopping,
            paused=self.paused,
            trouble=self.trouble,
            waiting=self.waiting,
            slow_cards=self.slow_cards,
            finished=self._finished,
            final_rows=self.final_rows,
            jobs_run=self._jobs_run,
            rates=tuple(
                Rate(unit=unit, per_s=self._work[unit] / self._timed_s[unit], jobs=jobs)
                for unit, jobs in sorted(self._timed_jobs.items(), reverse=True)
            ),
            failures=tuple(
                dataclasses.replace(failed, at=at - (now - failed.at)) for failed in self._failures
            ),
            failure_counts=dict(self._failure_counts),
            flag_counts=self.standing.flag_counts() if self.standing else {},
            repeats=self.standing.repeats if self.standing else 0,
            best=self.standing.best(self._labels) if self.standing else (),
            answers=self.answers(math.inf if self._finished else now),
        )

    def overdue(self, now: float) -> list[events.WorkerOverdue]:
        """The workers that have been in their phase for longer than its limit, each once.

        Time without a look (process halted, slow disk) does not count: reports are read after it.
        """
        pause_s = 0.0 if self._looked_at is None else now - self._looked_at - self.longest_pause_s
        self._looked_at = now
        late = []
        for seat in self._seats.values():
            seat.since = min(now, seat.since + max(0.0, pause_s))
            known = seat.phase in PHASE_LIMITS_S or seat.phase in _UNLIMITED
            phase = seat.phase if known else "measure"
            limit_s, age_s = self.limits_s.get(phase), now - seat.since
            if limit_s is None or not seat.worker_id or seat.is_overdue:
                continue
            limit_s += seat.allowances_s.get(phase, 0.0)
            if age_s > limit_s:
                seat.is_overdue = True
                starts = seat.phase == "starting"
                what = "did not come up" if starts else f"hung in {seat.phase}"
                reason = f"{what}: no progress for {age_s:.0f} s, the limit is {limit_s:.0f} s"
                late.append(events.WorkerOverdue(at=now, worker_id=seat.worker_id, reason=reason))
        return late

    def _seat(
        self, worker_id: str, phase: str, at: float, job: str = "", attempt_id: str = ""
    ) -> None:
        card = self._workers.get(worker_id)
        if card in self._seats:
            seat = self._seats[card]
            seat.phase, seat.since, seat.job, seat.attempt_id = phase, at, job, attempt_id

    def _left(self, now: float) -> Span | None:
        """Time left: by the plan until a job has ended, then by the estimates as those that ended
        correct them, as a range until a fifth has."""
        if not self._to_do and not self._remaining.running:
            return NOTHING
        for seat in self._seats.values():
            if seat.phase == "queued":
                self._remaining.waits(seat.attempt_id, now)
        repeats = 0.0
        if self.standing is not None and self._remaining.ended:
            # As many of the rows to come are flagged as of those so far.
            expected = self.standing.to_repeat * (1 + len(self._to_do) / self._remaining.ended)
            repeats = max(0.0, expected - self.standing.repeats)  # those of winners count, too
        middle_s = self._remaining.left_s(now, repeats)
        if middle_s is not None:
            factor = 2.0 if len(self._to_do) > 0.8 * self._to_run else 1.0
            return Span(middle_s / factor, middle_s, middle_s * factor)
        planned, over_s = self.plan.duration, now - self.started_at
        if over_s >= planned.high_s:
            return None
        low_s = max(0.0, planned.low_s - over_s)
        return Span(low_s, max(low_s, planned.middle_s - over_s), planned.high_s - over_s)
