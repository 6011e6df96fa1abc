"""Forecasts of a run: how long it takes, and what is measured before a deadline. Pure.

A duration is the sum of start (a private Ray, workers, imports), loading and work, each a range
that holds nine of ten. Jobs take what the nearest rows say (``scheduler/estimator.py``), spread
evenly over the cards; emulated cards take turns on their host's processors and count only as many
as run at once. Ranges are added up as if all jobs were short or all long, since their errors are
correlated: a slow host slows all.

With a deadline the schedule is simulated with estimated durations (a second for ten thousand jobs).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
        elif self.kind == PRIVATE:  # its nodes, torch's import, and a process a card
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
    slowdown = startup.slowdown
    repeats = most_repeats(planned, nodes) / sum(item.action is Action.RUN for item in planned)
    on_host = any(node.accelerator.spec.host and not node.emulated for node in nodes)
    if on_host and slowdown > 1.0:  # every row of a loaded host's processors may be flagged
        working = working.times(1.0, 1.0 + repeats, 1.0 + repeats)
    else:
        working = working.times(1.0, 1.0, 1.0 + OFTEN_FLAGGED * repeats)
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
        span = _work(shared, cards, _at_once(nodes, processors), estimator)
    for kind in {job.accelerator for job in jobs} - emulated:
        cards = _cards(node for node in nodes if node.accelerator is kind)
        of_kind = [job for job in jobs if job.accelerator is kind]
        span = span.or_longer(_work(of_kind, cards, cards, estimator))
    return span


def _cards(nodes: Iterable[Node]) -> int:
    return max(1, sum(len(node.card_indices) for node in nodes))


def _at_once(nodes: Iterable[Node], processors: int) -> int:
    """Emulated cards that compute at once, with one processor free (``worker/cpu_slots.py``)."""
    cards = _cards(node for node in nodes if node.emulated)
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


#: Standard deviations of jobs from their estimates, in logarithms: a job from its like, the whole
#: run, a workload, engine, model or number of cards, another setting's value, a search for a batch
#: size (14 recorded ones took 0.7 to 42 times their estimates), and the extra time of a process's
#: first job. Fitted to recorded runs.
JOB, RUN, KIND, VALUE, SEARCH, FIRST = 0.3, 0.8, 0.6, 0.3, 1.2, 1.0
#: Deviations beyond which an error counts no more: something disturbed that job.
MOST_DEVIATIONS = 2.5
#: Most setting values with a factor of their own, the most frequent first.
MOST_VALUES = 40
#: Estimated extra seconds of a process's first job, for imports and caches.
FIRST_S = 3.0
#: Share of the time to load a process's first model that other models take, too; a server is a
#: process of its own each time.
FIRST_LOAD, SERVING = 0.3, "serving"
#: Steps towards the factor of starts that a first job tells.
_STEPS = 4
#: Jobs over which the number of busy cards is averaged, beside one a card.
MEMORY = 4
#: A job goes on for at least this share of the time that it has had; a search for less, since of
#: its trials the last ones lie beside its best size, and the longest are over.
OVERRUN, SEARCH_OVERRUN = 0.4, 0.2
#: Mean of sums over their likeliest value: jobs take far longer at times and never far shorter.
MEAN = 1.1
#: Least seconds that a job is estimated to run.
_LEAST_S = 0.1
#: Features of every job: the run, and being its process's first.
_RUN, _FIRST = range(2)
_KINDS = ("workload", "engine", "model", "cards")

_Vector = NDArray[np.float64]


class _Regression(NamedTuple):
    """Bayesian linear regression, one observation at a time."""

    weights: _Vector
    covariance: _Vector

    def learned(self, features: _Vector, observed: float) -> _Regression:
        """Correct the weights by an observation (a Kalman filter's step)."""
        shared = self.covariance @ features
        variance = JOB**2 + float(features @ shared)
        most = MOST_DEVIATIONS * sqrt(variance)
        error = max(-most, min(most, observed - float(features @ self.weights)))
        gain = shared / variance
        return _Regression(self.weights + gain * error, self.covariance - np.outer(gain, shared))


@dataclass(slots=True)
class _Running:
    job_id: str
    began: float
    first: bool  # of its process
    working: float  # since when; later than ``began`` if it waited for processors
    ended: float | None = None


class Remaining:
    """Time that a run's jobs still take, by their estimates and the jobs that ended.

    A job's seconds are its estimate times factors: one of the run, and one of each setting's value
    that some jobs have and others do not. Every job that ends corrects their logarithms, which
    priors hold near 0 until jobs say otherwise: a few jobs in int8 tell how long all jobs in int8
    take. The seconds that are left are divided by the cards that were busy of late; waits for
    processors, gaps between jobs and idle cards lower that number. A gang of emulated cards counts
    as those of them that compute at once on its host's processors.
    """

    def __init__(
        self, planned: Iterable[PlannedJob], nodes: Sequence[Node] = (), processors: int = 1
    ) -> None:
        to_run = {item.job.job_id: item for item in planned if item.action is Action.RUN}
        self._emulated = {node.accelerator for node in nodes if node.emulated}
        self._at_once = _at_once(nodes, processors)
        self._jobs = {job_id: item.job for job_id, item in to_run.items()}
        self._estimates = {
            job_id: max(item.estimate_s - item.load_s, _LEAST_S) for job_id, item in to_run.items()
        }
        together = _together(tuple(self._jobs.values()))
        most = sorted(together, key=len, reverse=True)[:MOST_VALUES]
        deviations = [RUN, FIRST, *(together[job_ids] for job_ids in most)]
        self._rows = np.zeros((len(self._jobs), len(deviations)))  # features by job
        self._rows[:, _RUN] = 1.0
        self._features = dict(zip(self._jobs, self._rows, strict=True))
        for place, job_ids in enumerate(most, start=_FIRST + 1):
            for job_id in job_ids:
                self._features[job_id][place] = 1.0
        self._factors = _Regression(np.zeros(len(deviations)), np.diag(np.square(deviations)))
        self._left = dict.fromkeys(self._jobs, 0.0)  # card-seconds, as predicted last
        self._left_s = 0.0  # their sum
        self._longest = ""  # the job of these that takes longest, and has not begun
        self._predict_at = 1  # jobs ended
        self.ended = 0  # jobs that ran, and their repeats
        self._ran_s = 0.0  # card-seconds of these without loading
        self._loads_s: list[float] = []  # of the first job of each model in each precision
        self._loaded: dict[Hashable, list[float]] = {}  # of others
        self._first_loads_s: dict[Hashable, float] = {}  # of a model in a precision
        self._loads: defaultdict[Hashable, float] = defaultdict(float)  # how often, on all cards
        self._cold_s: list[float] = []  # of the first job of each process
        self._running: dict[str, _Running] = {}  # by attempt
        self._earlier_s: dict[str, float] = {}  # of attempts before a job's last
        self._cards = 1  # most that had an attempt at a time
        self._busy_s, self._over_s = 0.0, 0.0  # card-seconds of work of late, and the time for them
        self._until: float | None = None  # the end of that time

    @property
    def running(self) -> int:
        """Attempts that run, or whose row is to come."""
        return len(self._running)

    def begin(self, attempt_id: str, job_id: str, at: float, *, first: bool = False) -> None:
        """Note an attempt's start; ``first``: of all in its process."""
        self._until = at if self._until is None else self._until
        self._running[attempt_id] = _Running(job_id, at, first, at)
        self._cards = max(self._cards, sum(self._width(r.job_id) for r in self._running.values()))

    def waits(self, attempt_id: str, now: float) -> None:
        """Note that an attempt waits for processors that others use."""
        if attempt_id in self._running:
            self._running[attempt_id].working = now

    def end(self, attempt_id: str, at: float) -> None:
        """Note an attempt's end; its row follows."""
        if attempt_id in self._running:
            self._running[attempt_id].ended = at

    def row(
        self, attempt_id: str, *, final: bool, waited_s: float = 0.0, load_s: float = 0.0
    ) -> None:
        """Learn from an attempt that ended, with its wait for processors and its time to load."""
        attempt = self._running.pop(attempt_id, None)
        job = self._jobs.get(attempt.job_id) if attempt is not None else None
        if attempt is None or job is None or self._until is None:
            return
        job_id = attempt.job_id
        if attempt.ended is None:  # lost with its node
            if final:
                self.drop(job_id)
            return
        worked_s = max(0.0, attempt.ended - attempt.began - waited_s)
        decay = 1 - 1 / (MEMORY + self._cards)
        self._busy_s = self._busy_s * decay + worked_s * self._width(job_id)
        self._over_s = self._over_s * decay + max(0.0, attempt.ended - self._until)
        self._until = max(self._until, attempt.ended)
        worked_s += self._earlier_s.pop(job_id, 0.0)
        if not final and job_id in self._left:
            self._earlier_s[job_id] = worked_s
            return
        self.drop(job_id)
        if worked_s <= 0:
            return
        run_s = max(worked_s - load_s, 0.1 * worked_s)
        self._learn(job_id, log(run_s / self._estimates[job_id]), first=attempt.first)
        key, cold = job.residency_key, attempt.first or not self._loads_s
        warm_s = load_s * (FIRST_LOAD if cold and job.workload != SERVING else 1.0)
        if key not in self._loaded:
            self._loaded[key] = []
            self._loads_s.append(warm_s)
            self._first_loads_s[key] = warm_s
        elif not attempt.first:
            self._loaded[key].append(load_s)
        self._loads[key] += min(1.0, warm_s / max(self._first_loads_s[key], 1e-3))
        if attempt.first:
            self._cold_s.append(load_s)
        self.ended += 1
        self._ran_s += run_s * self._width(job_id)

    def drop(self, job_id: str) -> None:
        """Remove a job that ended."""
        self._left_s -= self._left.pop(job_id, 0.0)

    def left_s(self, now: float, repeats: float = 0.0) -> float | None:
        """Seconds until all have ended, with so many repeats; None before any job has ended."""
        if not self.ended or self._until is None:
            return None
        if self.ended >= self._predict_at:
            self._predict()
        repeat_s = self._ran_s / self.ended
        left_s = self._left_s + repeats * repeat_s
        busy_s, longest_s = self._busy_s, 0.0
        begun = {attempt.job_id for attempt in self._running.values()}
        if self._longest in self._left and self._longest not in begun:
            longest_s = self._left[self._longest] / self._width(self._longest)
        for attempt in self._running.values():
            if attempt.ended is not None:
                continue
            width, had_s = self._width(attempt.job_id), max(0.0, now - attempt.working)
            expected_s = self._left.get(attempt.job_id, min(1.0, repeats) * repeat_s) / width
            left_s -= expected_s * width
            if attempt.first:
                expected_s *= self._start(attempt.job_id)
                expected_s += median_low(self._cold_s) if self._cold_s else 0.0
            busy_s += had_s * width
            overrun, job = OVERRUN, self._jobs.get(attempt.job_id)
            if job is not None and isinstance(job.batch_size, str):  # trials are parts of a job
                had_s += self._earlier_s.get(attempt.job_id, 0.0)
                overrun = SEARCH_OVERRUN
            rest_s = max(expected_s - had_s, overrun * had_s)
            left_s += rest_s * width
            longest_s = max(longest_s, rest_s)
        over_s = self._over_s + max(0.0, now - self._until)
        busy = min(busy_s / over_s, self._cards) if over_s > 0 else self._cards
        return max(0.0, left_s / busy, longest_s) * MEAN if busy > 0 else None

    def _predict(self) -> None:
        """Predict all jobs that are left, and when to do so again: each time a twentieth more has
        ended, so that a job costs little however many there are."""
        self._predict_at = self.ended + 1 + self.ended // 20
        load_s = median_low(self._loads_s)
        later_s = {key: sum(seen) / (1 + len(seen)) for key, seen in self._loaded.items()}
        # Models are loaded on as many cards as those that are done.
        to_come = {self._jobs[job_id].residency_key for job_id in self._left}
        done = [loads for key, loads in self._loads.items() if key not in to_come]
        often = max(1.0, median_low(done or self._loads.values()))
        loads_left = {key: max(0.0, often - self._loads.get(key, 0.0)) for key in to_come}
        every = np.exp(self._rows @ self._factors.weights).tolist()
        factors = dict(zip(self._jobs, every, strict=True))
        for job_id in self._left:
            job = self._jobs[job_id]
            key = job.residency_key
            loads = 1.0 if job.alone else min(1.0, loads_left[key])
            loads_left[key] -= loads
            loading_s = max(loads * load_s, later_s.get(key, 0.0))
            self._left[job_id] = factors[job_id] * self._estimates[job_id] + loading_s
            self._left[job_id] *= self._width(job_id)
        self._left_s = sum(self._left.values())
        begun = {attempt.job_id for attempt in self._running.values()}
        waiting = (job_id for job_id in self._left if job_id not in begun)
        self._longest = max(waiting, key=lambda it: self._left[it] / self._width(it), default="")

    def _learn(self, job_id: str, observed: float, *, first: bool) -> None:
        """Correct the factors by the logarithm of a job's time over its estimate.

        Seconds of a start are added to those of work, so the logarithm is not linear in their
        factor: it is taken as linear where the last step led (an iterated Kalman filter).
        """
        features, factors = self._features[job_id].copy(), self._factors
        for _ in range(_STEPS if first else 0):
            start = self._start(job_id)
            features[_FIRST] = share = 1 - 1 / start
            rest = log(start) - share * self._factors.weights[_FIRST]
            self._factors = factors.learned(features, observed - rest)
        if not first:
            self._factors = factors.learned(features, observed)

    def _start(self, job_id: str) -> float:
        """Factor of a job's time if it is its process's first."""
        extra_s = FIRST_S * exp(self._factors.weights[_FIRST])
        return 1 + extra_s / self._estimates[job_id]

    def _width(self, job_id: str) -> int:
        job = self._jobs.get(job_id)
        if job is None:
            return 1
        return min(job.cards, self._at_once) if job.accelerator in self._emulated else job.cards


def _together(jobs: Collection[Job]) -> dict[tuple[str, ...], float]:
    """Ids of the jobs that share values of settings which others do not have, with the prior
    standard deviation of the logarithm of their factor: values of the same jobs have one, since a
    workload's many settings would leave no place for those that vary within it."""
    sharing: dict[tuple[str, Hashable], list[str]] = {}
    names = ("workload", "engine", "model", "precision", "batch_size", "cards", "alone")
    for job in jobs:
        for value in (*((name, getattr(job, name)) for name in names), *job.parameters):
            sharing.setdefault(value, []).append(job.job_id)
    together: dict[tuple[str, ...], float] = {}
    for (name, content), job_ids in sharing.items():
        if 1 < len(job_ids) < len(jobs):
            searched = name == "batch_size" and isinstance(content, str)
            own = SEARCH if searched else KIND if name in _KINDS else VALUE
            together[tuple(job_ids)] = max(own, together.get(tuple(job_ids), 0.0))
    return together


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
    ends_after_s: float  # with the last row; more than ``seconds``: likely not all in time


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
    ends_after_s = result.makespan_s
    if len(measured) == len(to_run):  # the simulated cluster is there at once, with all its power
        ends_after_s = max(ends_after_s, plan.duration.middle_s)
    firsts = anchors(plan.jobs)
    return Forecast(
        seconds=seconds,
        jobs=len(to_run),
        measured=len(measured),
        configurations=len(firsts),
        reached=len(firsts & measured),
        ends_after_s=ends_after_s,
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
            item = replace(
                item,
                estimate_s=item.estimate_s + PRIOR_START_S,
                load_s=item.load_s + PRIOR_START_S,
            )
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
