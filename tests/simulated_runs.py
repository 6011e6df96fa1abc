"""Clusters, grids, faults and settings drawn for simulated runs, and the law all of them obey."""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from schedule_cases import job, node

from orchestrator.core.job import MAX, Accelerator, Job
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Node
from orchestrator.scheduler.estimator import Estimate
from orchestrator.scheduler.scheduler import ScheduleSettings
from orchestrator.scheduler.simulator import Faults, SimulationResult
from workloads.base import MeasureSettings

#: Whole runs are slow examples; the time limit of the suite is per test, not per example.
#: ``NIGHTGRID_EXAMPLES=5000`` looks longer, `make quick` shorter.
thorough = settings(
    max_examples=int(os.environ.get("NIGHTGRID_EXAMPLES", settings.default.max_examples)),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Scattered:
    """Estimates drawn once per job, from seconds to an hour."""

    def __init__(self, seed: int, load_s: float = 10.0, sigma: float = 1.0) -> None:
        self.seed, self.load_s, self.sigma = seed, load_s, sigma

    def estimate(self, job: Job) -> Estimate:
        random = Random(f"{self.seed}{job.dataset}")
        return Estimate(load_s=self.load_s, run_s=60 * random.lognormvariate(0, self.sigma))


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    """One to four servers of either kind, whole or shared with others."""
    nodes = []
    for number in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([1, 2, 4, 8]))
        mine = draw(st.sampled_from([size, size, max(1, size - 1)]))
        kind = draw(st.sampled_from([Accelerator.HPU, Accelerator.HPU, Accelerator.GPU]))
        nodes.append(
            node(f"n{number}", accelerator=kind, card_indices=tuple(range(mine)), server_cards=size)
        )
    return nodes


def the_rest_of(part: Node) -> Node | None:
    """The cards of the node's server that are not among its own, as a further part of it."""
    rest = tuple(n for n in range(part.server_cards) if n not in part.card_indices)
    if not rest:
        return None
    return replace(part, node_id=f"{part.node_id}+1", part_of=part.node_id, card_indices=rest)


@st.composite
def grids(draw: st.DrawFn) -> list[PlannedJob]:
    """Up to forty jobs of every sort; also some that no card set can ever hold, and in half of the
    grids jobs that need any others, themselves, or what is not there."""
    count = draw(st.integers(0, 40))
    random = Random(draw(st.integers(0, 2**32)))
    jobs = []
    for number in range(count):
        action = random.choice([Action.RUN] * 12 + [Action.UNSUPPORTED, Action.REUSE])
        this = job(
            str(number // random.choice([1, 3])),
            model=random.choice(["m1", "m2", "m3"]),
            accelerator=random.choice([Accelerator.HPU] * 3 + [Accelerator.GPU]),
            cards=random.choice([1] * 6 + [2, 2, 3, 4, 8, 16]),
            batch_size=random.choice([1, 2, 4, 8, 16, 32, MAX, "best(cap=32)", "max(cap=7)"]),
            isolation=random.choice(["warm"] * 4 + ["process"]),
            measure=MeasureSettings(repeat_flagged=random.choice([0, 1, 1, 3])),
        )
        jobs.append(PlannedJob(job=this, action=action, reason="as drawn"))
    if draw(st.booleans()):
        jobs = _with_needs(jobs, random, circles=draw(st.booleans()))
    replicates = draw(st.sampled_from([1, 1, 2, 3]))
    return jobs + [
        replace(planned, job=replace(planned.job, replicate=number))
        for number in range(2, replicates + 1)
        for planned in jobs[: draw(st.integers(0, 20))]
    ]


def _with_needs(jobs: list[PlannedJob], random: Random, *, circles: bool) -> list[PlannedJob]:
    ids = list(dict.fromkeys(planned.job.job_id for planned in jobs))
    needs: dict[str, tuple[str, ...]] = {}
    for number, job_id in enumerate(ids):
        known = ids if circles else ids[:number]
        count = min(len(known), random.choice([0, 0, 1, 1, 2, 3]))
        nobody = ["nobody"] * (random.random() < 0.03)
        needs[job_id] = (*random.sample(known, count), *nobody)
    needy = [replace(planned, needs=needs[planned.job.job_id]) for planned in jobs]
    random.shuffle(needy)
    return needy


@st.composite
def faults(draw: st.DrawFn) -> Faults:
    """Anything from a quiet night to one in which most attempts fail."""
    rates = st.sampled_from([0.0, 0.0, 0.02, 0.2, 0.7])
    return Faults(
        crash=draw(rates),
        hang=draw(rates),
        error=draw(rates),
        start_failure=draw(rates),
        poison=draw(rates),
        bad_cards=draw(rates),
        no_start=draw(st.sampled_from([0.0, 0.0, 0.1])),
        stuck=draw(st.sampled_from([0.0, 0.0, 0.1])),
        stuck_s=draw(st.sampled_from([None, 100.0, 600.0])),
        node_losses=tuple(sorted(draw(st.lists(st.floats(0, 2000), max_size=4)))),
        rejoin_after_s=draw(st.sampled_from([None, 30.0, 600.0])),
        late_results=draw(st.booleans()),
        fits_up_to=draw(st.sampled_from([None, 0, 1, 5, 16])),
        flagged=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
    )


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleSettings:
    """Settings at their edges."""
    return ScheduleSettings(
        card_failures=draw(st.sampled_from([1, 2, 50])),
        card_job_failures=draw(st.sampled_from([1, 3, 50])),
        card_readmissions=draw(st.sampled_from([0, 2])),
        max_start_failures=draw(st.sampled_from([1, 5])),
        wait_for_nodes_s=draw(st.sampled_from([0.0, 60.0])),
        breaker_failures=draw(st.sampled_from([2, 5, 10_000])),
        finish_running=draw(st.booleans()),
        work_until=draw(st.one_of(st.just(inf), st.floats(0, 4000))),
        stop_s=draw(st.sampled_from([0.0, 30.0])),
        stop_patience_s=draw(st.sampled_from([0.0, 120.0])),
        seed=draw(st.integers(0, 3)),
    )


def check_rows(jobs: list[PlannedJob], result: SimulationResult) -> None:
    """Every job that is to have a row has one final row, and no other job has one."""
    wanted = {p.job.job_id for p in jobs if p.action in (Action.RUN, Action.UNSUPPORTED)}
    assert sorted(row.job.job_id for row in result.rows) == sorted(wanted)
