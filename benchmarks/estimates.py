"""Frequency with which the promised range of a run's duration held: past runs, replayed.

Each run is foretold as `nightgrid plan` would have: from nothing; from what it had measured after a
third and two thirds of its jobs (what is left then, without a start, as when a run is gone on
with); and from an earlier run of the same jobs where there is one. Runs are taken in their order:
starts are foretold from those of earlier runs that came to their cards in the same way. Runs with
searched batch sizes are foretold as a whole only, since a part of a search is no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.contender import ROOT
from benchmarks.figures import Goal, Line
from benchmarks.past_runs import PastAttempt, PastRun, runs_in
from benchmarks.setting import Setting, Takes
from orchestrator.core.plan import Action, PlannedJob, Span
from orchestrator.planning.forecast import CLUSTER, Startup, work
from orchestrator.scheduler.estimator import Estimator

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
    found = cases(past for file in FILES for past in runs_in(ROOT / file))
    lines = [_line("of all", found)]
    for knowledge in (NOTHING_KNOWN, PARTLY_MEASURED, SAME_GRID):
        lines.append(_line(knowledge, [case for case in found if case.knowledge == knowledge]))
    return lines, {"runs": len({case.run for case in found})}


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
    estimator = Estimator.from_history([each.row for each in known], queued=False)
    return work(planned, past.nodes, estimator, past.processors or ASSUMED_PROCESSORS)
