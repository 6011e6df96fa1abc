"""Frequency with which the promised range of a run's duration held: past runs, replayed.

Each run is foretold as `nightgrid plan` would have: from nothing; from what it had measured after a
third and two thirds of its jobs (what is left then, without a start, as when a run is gone on
with); and from an earlier run of the same jobs where there is one. Runs are taken in their order:
starts are foretold from those of earlier runs that came to their cards in the same way. Runs with
searched batch sizes are foretold as a whole only, since a part of a search is no plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.contender import ROOT
from benchmarks.figures import Goal, Line
from benchmarks.past_runs import PastAttempt, PastRun, runs_in
from benchmarks.setting import Setting, Takes
from orchestrator.core.plan import Action, PlannedJob, Span
from orchestrator.planning.forecast import CLUSTER, Remaining, Startup, work
from orchestrator.planning.planner import estimator_for

TITLE = "Estimates: how often the promised range of a run's duration held"
TAKES_S = Takes(whole=1, quick=1)
FILES = ("results/past_runs/rows.parquet", "results/h100/grids.parquet")
NOTHING_KNOWN = "nothing known"
PARTLY_MEASURED = "part of the grid measured"
SAME_GRID = "the same grid measured before"
#: Fewest attempts of a run that is foretold in parts.
FEWEST = 6
STARTS = 10  # of earlier runs
ASSUMED_PROCESSORS = 2  # of rows that do not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A promise, and how long it took."""

    run: str
    knowledge: str
    promised: Span
    took_s: float

    @property
    def held(self) -> bool:
        """Return whether it took as long as was promised."""
        return self.promised.low_s <= self.took_s <= self.promised.high_s

    @property
    def width(self) -> float:
        """The longest promised time over the shortest."""
        return self.promised.high_s / max(self.promised.low_s, 1e-3)


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    runs = [past for file in FILES for past in runs_in(ROOT / file)]
    found = cases(runs)
    lines = [_of_left(runs), _line("of all", found)]
    for knowledge in (NOTHING_KNOWN, PARTLY_MEASURED, SAME_GRID):
        lines.append(_line(knowledge, [case for case in found if case.knowledge == knowledge]))
    return lines, {"runs": len({case.run for case in found})}


#: Fewest jobs of a run whose time left is replayed, and the factor within which it should lie.
FEWEST_LEFT, FACTOR = 8, 2.0
#: Seconds between two looks, and seconds before the end with the last one.
EVERY_S, LAST_S = 1.0, 10.0


def times_left(past: PastRun) -> list[float]:
    """Time left as foretold over what it was, each second of a run, from a tenth of its jobs on
    until ten seconds are left."""
    estimator = estimator_for((), past.nodes)
    jobs = {attempt.job.job_id: attempt.job for attempt in past.attempts}
    if len(jobs) < FEWEST_LEFT:
        return []
    estimates = {job_id: estimator.estimate(job) for job_id, job in jobs.items()}
    planned = [
        PlannedJob(
            job=job,
            action=Action.RUN,
            estimate_s=estimates[job_id].total_s,
            load_s=estimates[job_id].load_s,
        )
        for job_id, job in jobs.items()
    ]
    remaining = Remaining(planned, past.nodes, past.processors or ASSUMED_PROCESSORS)
    first_ends: dict[str, float] = {}
    for each in past.attempts:
        if each.row.final:
            first_ends.setdefault(each.job.job_id, each.ended_s)
    repeated = Counter(
        each.job.job_id
        for each in past.attempts
        if each.ended_s > first_ends.get(each.job.job_id, past.span_s)
    )
    moments = [(each.began_s, True, number) for number, each in enumerate(past.attempts)]
    moments += [(each.ended_s, False, number) for number, each in enumerate(past.attempts)]
    ratios: list[float] = []
    ended: set[str] = set()
    used: set[str] = set()  # cards that had an attempt
    queued: dict[str, float] = {}  # attempts that run, with the end of their wait for processors
    flagged, repeats, look = 0, 0, 0.0
    for at, begins, number in sorted(moments):
        while look < min(at, past.span_s - LAST_S):
            for attempt_id, until in queued.items():
                if look < until:
                    remaining.waits(attempt_id, look)
            to_come = flagged * len(jobs) / max(1, len(ended)) - repeats
            left_s = remaining.left_s(look, max(0.0, to_come))
            if left_s is not None and len(ended) >= len(jobs) / 10:
                ratios.append(left_s / (past.span_s - look))
            look += EVERY_S
        each, attempt_id = past.attempts[number], str(number)
        job_id, waited_s = each.job.job_id, each.row.queued_s or 0.0
        if begins:
            first = not each.job.alone and used.isdisjoint(each.places)
            used.update(each.places)
            queued[attempt_id] = at + waited_s
            remaining.begin(attempt_id, job_id, at, first=first)
            continue
        del queued[attempt_id]
        remaining.end(attempt_id, at)
        load_s = each.row.load_s or 0.0
        remaining.row(attempt_id, final=each.row.final, waited_s=waited_s, load_s=load_s)
        if job_id in ended:
            repeats += 1
        elif each.row.final:
            ended.add(job_id)
            flagged += repeated[job_id] > 0
    return ratios


def _of_left(runs: Iterable[PastRun]) -> Line:
    """Share of the runs whose time left was within the factor nine times of ten."""
    replayed = [ratios for past in runs if (ratios := times_left(past))]

    def held(ratios: Sequence[float]) -> float:
        return sum(1 / FACTOR <= ratio <= FACTOR for ratio in ratios) / len(ratios)

    every = [ratio for ratios in replayed for ratio in ratios]
    return Line(
        what=f"runs whose time left was within a factor of {FACTOR:g}, nine times of ten",
        against="",
        unit="%",
        ours=(100 * sum(held(ratios) >= 0.9 for ratios in replayed) / len(replayed),),
        goal=Goal(kind="at least", value=90.0),
        note=f"{len(replayed)} runs, from a tenth of their jobs on; {held(every):.0%} of "
        f"{len(every)} moments",
    )


def _line(what: str, found: Sequence[Case]) -> Line:
    off = sorted(case.took_s / case.promised.middle_s for case in found)
    return Line(
        what=f"promises that held, {what}",
        against="",
        unit="%",
        ours=(100 * sum(case.held for case in found) / len(found),),
        goal=Goal(kind="at least", value=90.0),
        note=f"{len(found)} promises; longest over shortest {median(c.width for c in found):.0f}, "
        f"time taken over the likeliest {median(off):.2f} (medians)",
    )


def cases(runs: Iterable[PastRun]) -> list[Case]:
    """Every promise that can be replayed, in the runs' order."""
    found: list[Case] = []
    earlier: list[PastRun] = []
    for past in sorted(runs, key=lambda each: each.began):
        found += _cases(past, earlier)
        earlier.append(past)
    return found


def _cases(past: PastRun, earlier: Sequence[PastRun]) -> Iterator[Case]:
    name = f"{past.source}, {past.name}, {past.began:.0f}"
    attempts = sorted(past.attempts, key=lambda each: each.ended_s)
    start = startup(past, earlier).span(sum(len(node.card_indices) for node in past.nodes))
    whole_s = (past.lead_s or 0.0) + past.span_s + past.tail_s

    def whole(knowledge: str, known: Sequence[PastAttempt]) -> Case:
        promised = left(past, attempts, known)
        if past.lead_s is not None:
            promised += start
        return Case(run=name, knowledge=knowledge, promised=promised, took_s=whole_s)

    yield whole(NOTHING_KNOWN, ())
    jobs = {attempt.job.job_id for attempt in attempts}
    same = [each for each in earlier if {a.job.job_id for a in each.attempts} == jobs]
    if same:
        yield whole(SAME_GRID, same[-1].attempts)
    searched = any(isinstance(attempt.job.batch_size, str) for attempt in attempts)
    if searched or len(attempts) < FEWEST:
        return
    for known in (len(attempts) // 3, 2 * len(attempts) // 3):
        yield Case(
            run=name,
            knowledge=PARTLY_MEASURED,
            promised=left(past, attempts[known:], attempts[:known]),
            took_s=past.span_s - attempts[known - 1].ended_s,
        )


def startup(past: PastRun, earlier: Iterable[PastRun]) -> Startup:
    """Knowledge of a run's start, from the runs before it."""
    starts = [
        each.lead_s
        for each in earlier
        if each.lead_s is not None and (each.source, each.start) == (past.source, past.start)
    ]
    return Startup(kind=past.start or CLUSTER, earlier_s=tuple(starts[-STARTS:]))


def left(past: PastRun, attempts: Sequence[PastAttempt], known: Sequence[PastAttempt]) -> Span:
    """The range for these attempts' jobs, without a start, when others are known."""
    jobs = {attempt.job.job_id: attempt.job for attempt in attempts}
    planned = [PlannedJob(job=job, action=Action.RUN) for job in jobs.values()]
    rows = [each.row for each in known]
    estimator = estimator_for(rows, past.nodes, queued=False)
    return work(planned, past.nodes, estimator, past.processors or ASSUMED_PROCESSORS)
