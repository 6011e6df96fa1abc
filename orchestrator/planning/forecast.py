"""Forecasts of a run: how long it takes, and what is measured before a deadline. Pure.

A duration is the sum of start (a private Ray, workers, imports), loading and work, each a range
that holds nine of ten. Jobs take what the nearest rows say (``scheduler/estimator.py``), spread
evenly over the cards; emulated cards take turns on their host's processors and count only as many
as run at once. Ranges are added up as if all jobs were short or all long, since their errors are
correlated: a slow host slows all.

With a deadline the schedule is simulated with estimated durations (a second for ten thousand jobs).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from orchestrator.core.job import Job, State
from orchestrator.core.plan import NOTHING, Action, Plan, PlannedJob, Span
from orchestrator.core.topology import Node
from orchestrator.scheduler.deadline import anchors
from orchestrator.scheduler.estimator import PRIOR_START_S, Estimate, Estimator
from orchestrator.scheduler.scheduler import ScheduleSettings
from orchestrator.scheduler.simulator import SimulationSettings, simulate
from orchestrator.scheduler.state import Estimates

#: Factor between a start and the median of earlier ones.
START_FACTOR = 3.0
#: Extra time of the first job in a process, for first imports and use of libraries.
FIRST_USE = Span(0.0, 4.0, 20.0)

#: Share of rows with a flag that a repeat may clear, at most in nine of ten undisturbed runs.
OFTEN_FLAGGED = 0.1

PRIVATE, CLUSTER, IN_PROCESS = "private", "cluster", "in process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Facts about the time from the command to the first job, and the host's processors."""

    kind: str = PRIVATE  # a Ray of its own; else the cluster's, or none
    earlier_s: tuple[float, ...] = ()  # of earlier runs that came to their cards in the same way
    processors: int = 1  # on which emulated cards take turns
    load: float = 0.0  # programs that compute on these processors now

    @property
    def slowdown(self) -> float:
        """Slowdown of one more program under the present load; by its root, since the load also
        counts low-priority programs and those that wait for a disk."""
        return sqrt(max(1.0, (self.load + 1) / self.processors))

    def span(self, cards: int) -> Span:
        """Range of the time to the first job on so many cards; in process with ``FIRST_USE``."""
        if self.earlier_s:
            known = sorted(self.earlier_s)
            middle = known[len(known) // 2]
            low, high = min(known[0], middle / START_FACTOR), max(known[-1], middle * START_FACTOR)
            span = Span(low, middle, high)
        elif self.kind == PRIVATE:  # its head and nodes, torch's import, and a process a card
            span = Span(5.0 + 0.5 * cards, 12.0 + cards, 40.0 + 3.0 * cards)
        else:
            span = Span(1.0, 6.0, 25.0) if self.kind == IN_PROCESS else Span(3.0, 12.0, 60.0)
        return span + FIRST_USE if self.kind == IN_PROCESS else span


def duration(
    planned: Iterable[PlannedJob], nodes: Sequence[Node], estimator: Estimator, startup: Startup
) -> Span:
    """Range of seconds from the command to the last row on these nodes.

    Present load on this host slows its jobs: never the shortest time, since the load may end soon,
    and only the longest if rows or earlier starts, which had loads too, are known.
    """
    planned = list(planned)
    working = work(planned, nodes, estimator, startup.processors)
    if working == NOTHING:
        return NOTHING
    working = working.times(*_with_repeats(planned, nodes, startup))
    slowdown = startup.slowdown
    start = startup.span(_cards(nodes))
    start = start.times(1.0, 1.0 if startup.earlier_s else slowdown, slowdown)
    if any(node.emulated or node.accelerator.spec.host for node in nodes):
        working = working.times(1.0, 1.0 if estimator.knows_rows else slowdown, slowdown)
    return start + working


def most_repeats(planned: Iterable[PlannedJob], nodes: Sequence[Node]) -> int:
    """Most further measurements of flagged rows; those of emulated cards are not repeated."""
    emulated = {node.accelerator for node in nodes if node.emulated}
    jobs = (item.job for item in planned if item.action is Action.RUN)
    return sum(job.measure.repeat_flagged for job in jobs if job.accelerator not in emulated)


def _with_repeats(
    planned: Sequence[PlannedJob], nodes: Sequence[Node], startup: Startup
) -> tuple[float, float, float]:
    """Factors of the work with repeats: of every row on the processors of a loaded host."""
    jobs = sum(item.action is Action.RUN for item in planned)
    repeats = most_repeats(planned, nodes) / jobs
    on_host = any(node.accelerator.spec.host and not node.emulated for node in nodes)
    if on_host and startup.slowdown > 1.0:
        return 1.0, 1.0 + repeats, 1.0 + repeats
    return 1.0, 1.0, 1.0 + OFTEN_FLAGGED * repeats


def work(
    planned: Iterable[PlannedJob], nodes: Sequence[Node], estimator: Estimator, processors: int
) -> Span:
    """Range of seconds from the first attempt: kinds of card work in parallel, except emulated
    ones, which share processors."""
    jobs = [item.job for item in planned if item.action is Action.RUN]
    emulated = {node.accelerator for node in nodes if node.emulated}
    span = NOTHING
    if shared := [job for job in jobs if job.accelerator in emulated]:
        cards = _cards(node for node in nodes if node.emulated)
        span = _work(shared, cards, _turns(cards, processors), estimator)
    for kind in {job.accelerator for job in jobs} - emulated:
        cards = _cards(node for node in nodes if node.accelerator is kind)
        of_kind = [job for job in jobs if job.accelerator is kind]
        span = span.or_longer(_work(of_kind, cards, cards, estimator))
    return span


def _cards(nodes: Iterable[Node]) -> int:
    return max(1, sum(len(node.card_indices) for node in nodes))


def _turns(cards: int, processors: int) -> int:
    """Emulated cards that compute at once, with one processor free (``worker/cpu_slots.py``)."""
    threads = max(1, processors // cards)
    return max(1, min(cards, (processors - 1) // threads))


def _work(jobs: Sequence[Job], cards: int, at_once: int, estimator: Estimator) -> Span:
    """Range of seconds for these jobs, loading included, on ``cards``, ``at_once`` at a time."""
    total = longest = NOTHING
    loads: dict[object, tuple[Span, int]] = {}
    guesses: Counter[tuple[Span, int]] = Counter()
    for job in jobs:
        run, load = estimator.guess(job)
        guesses[run, min(job.cards, at_once)] += 1
        key = job.job_id if job.alone else (job.model, job.precision, job.engine)
        loads[key] = load, loads.get(key, (load, 0))[1] + 1
    for (run, width), count in guesses.items():
        longest = longest.or_longer(run)
        total += run.times(*[width * count] * 3)
    for load, count in loads.values():  # a model is loaded once, or on every card that has its jobs
        most = min(count, cards)
        total += load.times(1, sqrt(most), most)
    return total.times(*[1 / at_once] * 3).or_longer(longest)


class Remaining:
    """Card-seconds that a run's jobs still take: their estimates, corrected by those that ended.

    Estimates of one kind of job are off by the same factor, the machine's and the engine's: it is
    learned for all jobs, for each workload, engine and kind of card, and for each model and
    precision of those. Where few have ended a factor leans on the coarser one, by one job's weight.
    Of a process's first job, which imports and fills caches, a part counts, and of a job that took
    far longer than the others, which something disturbed, no more than would be usual.
    """

    def __init__(self, planned: Iterable[PlannedJob]) -> None:
        self._left: dict[str, tuple[Job, float]] = {}
        self._sums: dict[tuple[Hashable, ...], _Sums] = {}
        self.ended = 0  # with a duration
        self._ratios: list[float] = []  # ascending
        self._load_s, self._loads, self._alone = 0.0, 0, 0
        self.took_s = 0.0
        for item in planned:
            if item.action is Action.RUN and item.job.job_id not in self._left:
                run_s = max(item.estimate_s - item.load_s, _LEAST_S) * item.job.cards
                self._left[item.job.job_id] = item.job, run_s
                self._alone += item.job.alone
                for group in _groups(item.job):
                    sums = self._sums.setdefault(group, _Sums())
                    sums.left_s += run_s
                    sums.jobs += 1

    def __len__(self) -> int:
        return len(self._left)

    def take(
        self, job_id: str, run_s: float | None = None, load_s: float = 0.0, *, first: bool = False
    ) -> None:
        """Remove a job that ended; ``run_s`` are its card-seconds, None if it did not run, and
        ``first`` says that it was its process's first."""
        job, estimate_s = self._left.pop(job_id, (None, 0.0))
        if job is None:
            return
        if run_s is not None:
            run_s = max(FIRST_SHARE * run_s, run_s - FIRST_USE.high_s) if first else run_s
            insort(self._ratios, run_s / estimate_s)
            run_s = min(run_s, MOST_OVER * self._ratios[len(self._ratios) // 2] * estimate_s)
        self._alone -= job.alone
        for group in _groups(job):
            sums = self._sums[group]
            sums.left_s -= estimate_s
            if run_s is not None:
                sums.actual_s += run_s
                sums.estimated_s += estimate_s
        if run_s is not None:
            self.ended += 1
            if load_s > 0:
                self._load_s += load_s
                self._loads += 1
            self.took_s += run_s + load_s

    def left_s(self, running: Mapping[str, float]) -> float | None:
        """Card-seconds left, with those that running jobs have had so far; None before any job has
        ended."""
        if not self.ended:
            return None
        factors: dict[tuple[Hashable, ...], float] = {}
        for group, sums in sorted(self._sums.items(), key=lambda pair: len(pair[0])):
            parent = factors[group[:-1]] if group else 1.0
            weight_s = 0.0 if not group else (sums.left_s + sums.estimated_s) / sums.jobs
            estimated_s = sums.estimated_s + weight_s  # 0 if all jobs of the group ended unrun
            actual_s = sums.actual_s + parent * weight_s
            factors[group] = actual_s / estimated_s if estimated_s > 0 else parent
        left_s = sum(
            sums.left_s * factors[group] for group, sums in self._sums.items() if len(group) == 2
        )
        for job_id, had_s in running.items():
            job, estimate_s = self._left.get(job_id, (None, 0.0))
            if job is not None:
                expected_s = estimate_s * factors[_groups(job)[-1]]
                left_s -= expected_s - max(expected_s - had_s, _OVERRUN * had_s)
        fine = (sums for group, sums in self._sums.items() if len(group) == 2)
        new = sum(sums.left_s > 0 and not sums.estimated_s for sums in fine)  # models to load
        new += self._alone
        return max(0.0, left_s) + new * self._load_s / max(1, self._loads)


#: Least part of a first job's time that later ones take too; most of a job's over the median's.
FIRST_SHARE, MOST_OVER = 0.4, 3.0
#: Least seconds that a job is estimated to run, and share of its time that one goes on beyond it.
_LEAST_S, _OVERRUN = 0.1, 0.2


@dataclass(slots=True)
class _Sums:
    jobs: int = 0
    left_s: float = 0.0  # as estimated
    actual_s: float = 0.0  # of those that ended
    estimated_s: float = 0.0


def _groups(job: Job) -> tuple[tuple[Hashable, ...], ...]:
    """Groups of a job, each finer than the one before."""
    kind = (job.workload, job.engine, job.accelerator)
    return (), (kind,), (kind, (job.model, job.precision))


#: Most jobs to simulate: more take too long.
MOST_JOBS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Progress that a run is expected to make."""

    seconds: float  # for work
    jobs: int  # that the plan runs
    measured: int  # of those
    configurations: int  # without a measured cell so far
    reached: int  # of those: their first cell would be measured
    ends_after_s: float  # with the last row


class _Fixed:
    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates

    def estimate(self, job: Job) -> Estimate:
        return self._estimates.estimate(job)


def forecast(plan: Plan, estimates: Estimates, seconds: float) -> Forecast | None:
    """Simulate ``plan`` for so many seconds; None if it is too large."""
    to_run = [item for item in plan.jobs if item.action is Action.RUN]
    if len(to_run) > MOST_JOBS:
        return None
    result = simulate(
        plan.jobs,
        plan.nodes,
        _Fixed(estimates),
        settings=SimulationSettings(noise=0.0),
        schedule_settings=ScheduleSettings(work_until=seconds),
    )
    measured = {row.job.job_id for row in result.rows if row.state is State.SUCCEEDED}
    firsts = anchors(plan.jobs)
    return Forecast(
        seconds=seconds,
        jobs=len(to_run),
        measured=len(measured),
        configurations=len(firsts),
        reached=len(firsts & measured),
        ends_after_s=result.makespan_s,
    )


# Replicates from 2 on, each in a process that has run no other replicate.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateCost:
    """Additional work of the replicates from 2 on."""

    jobs: int
    card_seconds: float  # starts of processes included
    fresh_processes: int


def with_fresh_processes(planned: Iterable[PlannedJob]) -> list[PlannedJob]:
    """Add the start of each fresh process to the estimate of its first job: one per model and
    replicate from 2 on, none for jobs with processes of their own."""
    known: set[tuple[str, int] | None] = {None}
    result = []
    for item in planned:
        block = _block(item)
        if block not in known:
            known.add(block)
            item = replace(item, estimate_s=item.estimate_s + PRIOR_START_S)
        result.append(item)
    return result


def cost_of_replicates(plan: Plan) -> ReplicateCost | None:
    """Cost of the plan's further replicates; None if it has none."""
    again = [p for p in plan.jobs if p.action is Action.RUN and p.job.replicate > 1]
    if not again:
        return None
    alone = sum(item.job.cards for item in again if item.job.alone)
    return ReplicateCost(
        jobs=len(again),
        card_seconds=sum(item.estimate_s * item.job.cards for item in again),
        fresh_processes=alone + len({_block(item) for item in again if not item.job.alone}),
    )


def _block(item: PlannedJob) -> tuple[str, int] | None:
    """Residency key and number of a replicate from 2 on in a shared process, else None."""
    job = item.job
    if item.action is not Action.RUN or job.replicate == 1 or job.alone:
        return None
    return job.residency_key, job.replicate
