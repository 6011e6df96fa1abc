"""The schedule where it is hard: five jobs a card, so that every end is near the end of the run.

Jobs of 1, 2, 4 and 8 cards on servers of eight; durations scatter around their estimates by a
lognormal factor of sigma 0 (estimates hold), 0.2 and 1 (two of three are off by up to 2.7 times).
Each turn is a seed: other jobs, other factors. The simulator runs them, and the durations that its
attempts had are then given to three others: a bound that no schedule can beat; the shortest
schedule that a long search has found (``best_known.py``), which knows all durations before it
begins; and the plain policy of the longest estimate first by first fit, which knows as little as
ours.

All four are charged the same: an attempt from its first rank's start to its last rank's end,
loading within, and for a gang the start of its fresh processes as our run had it, from the start of
the last of them until the gang began. That our gang's first cards wait for the last to be free is
charged to us alone, and so is the start of processes that run jobs of one card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.best_known import shortest
from benchmarks.contenders.simulate_night import Known, job_of, node_of
from benchmarks.figures import Goal, Line
from benchmarks.placement import bound, makespan
from benchmarks.scheduling import CARDS, shape
from benchmarks.setting import Setting, Takes
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.scheduler.simulator import SimulationSettings, simulate

TITLE = "Scheduling where it is hard: five jobs a card"
TAKES_S = Takes(whole=45, quick=5)
JOBS_A_CARD = 5
#: With the goal for our makespan over that of the best known schedule.
SIGMAS = {0.0: 1.01, 0.2: None, 1.0: 1.10}
APART = 10_000  # numbers between the first jobs of two seeds
FIRST_SEED = 100  # those below were looked at when the schedule's constants were chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Makespans of one seed's jobs, in seconds."""

    ours: float
    bound: float
    best_known: float
    longest_first: float


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    sizes = setting.sized({4: 5_000, 16: 500}, {4: 2_000}, {1: 50})  # nodes: tries of the search
    seeds = setting.sized(8, 4, 1)
    lines = []
    for nodes, tries in sizes.items():
        for sigma, wanted in SIGMAS.items():
            turns = [
                simulated(nodes, sigma, seed, tries)
                for seed in range(FIRST_SEED, FIRST_SEED + seeds)
            ]
            lines += _lines(nodes, sigma, wanted, turns)
    return lines, {
        "jobs": {f"{nodes} servers": nodes * CARDS * JOBS_A_CARD for nodes in sizes},
        "seeds": seeds,
        "orders that the search tries": {f"{n} servers": tries for n, tries in sizes.items()},
    }


def simulated(nodes: int, sigma: float, seed: int, tries: int) -> Turn:
    """Our run of one seed's jobs in the simulator, and what others make of the same durations."""
    numbers = range(seed * APART, seed * APART + nodes * CARDS * JOBS_A_CARD)
    settings = SimulationSettings(seed=seed, noise=sigma)
    planned = [PlannedJob(job=job_of(number), action=Action.RUN) for number in numbers]
    found = simulate(planned, [node_of(f"n{n}") for n in range(nodes)], Known(), settings=settings)
    took = {
        row.job.job_id: max(rank.ended_at for rank in row.outcome.ranks)
        - min(rank.started_at for rank in row.outcome.ranks)
        + found.gathered_s.get(row.job.job_id, 0.0)
        for row in found.rows
        if row.outcome is not None
    }
    jobs = [(each.job.cards, took[each.job.job_id]) for each in planned]
    by_estimate = sorted(zip(numbers, jobs, strict=True), key=lambda each: -shape(each[0])[2])
    longest_first = makespan([job for _, job in by_estimate], nodes, CARDS, "first fit")
    least = bound(jobs, nodes * CARDS)
    searched = shortest(jobs, nodes, CARDS, tries=tries, least=least, seed=seed)
    return Turn(
        ours=found.makespan_s,
        bound=least,
        best_known=min(searched, longest_first, found.makespan_s),
        longest_first=longest_first,
    )


def _lines(nodes: int, sigma: float, wanted: float | None, turns: Sequence[Turn]) -> list[Line]:
    over_bound = median(turn.ours / turn.bound for turn in turns)
    note = f"{over_bound:.3f} × a bound that no schedule can beat"
    goal = Goal() if wanted is None else Goal(kind="at most", value=wanted)
    best_known = [turn.best_known for turn in turns], goal
    others = {
        "the best known schedule (search with all durations)": best_known,
        "longest estimate first by first fit": ([turn.longest_first for turn in turns], Goal()),
    }
    return [
        Line(
            what=f"makespan, {nodes} servers, estimates off by sigma {sigma:g}",
            against=against,
            unit="h",
            ours=tuple(turn.ours / 3600 for turn in turns),
            theirs=tuple(seconds / 3600 for seconds in theirs),
            goal=goal,
            note=note if theirs is best_known[0] else "",
        )
        for against, (theirs, goal) in others.items()
    ]
