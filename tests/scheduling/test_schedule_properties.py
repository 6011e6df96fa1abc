"""Laws of the schedule, over random grids, clusters and histories of faults.

Each example is a whole simulated run in which every command is checked (``invariants.py``):
nothing oversubscribed, nothing lost, one final row a job, fresh processes where they are due, rows
before reuse, and an end. A failing example prints the seed that replays it.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import job, node
from simulated_runs import Scattered, check_rows, clusters, faults, grids, schedules, thorough

from orchestrator.domain.events import StopRequested
from orchestrator.domain.job import MAX, State
from orchestrator.domain.topology import Node
from orchestrator.planning.plan import Action, PlannedJob
from orchestrator.scheduling.schedule import ScheduleSettings
from orchestrator.scheduling.simulate import Faults, SimulationSettings, simulate


@thorough
@given(
    jobs=grids(),
    nodes=clusters(),
    faulty=faults(),
    how=schedules(),
    seed=st.integers(0, 2**32),
    joins=st.lists(st.tuples(st.floats(0, 3000), clusters()), max_size=2),
    stop_at=st.one_of(st.none(), st.none(), st.floats(0, 4000)),
)
def test_every_run_ends_with_every_job_accounted_for(
    jobs: list[PlannedJob],
    nodes: list[Node],
    faulty: Faults,
    how: ScheduleSettings,
    seed: int,
    joins: list[tuple[float, list[Node]]],
    stop_at: float | None,
) -> None:
    """Whatever is asked for, whatever breaks, whoever joins, and whenever it is stopped."""
    late = tuple(
        (at, node(f"late{n}-{each.name}", accelerator=each.accelerator, cards=each.server_cards))
        for n, (at, group) in enumerate(joins)
        for each in group
    )
    stops = [] if stop_at is None else [StopRequested(at=stop_at, reason="morning")]
    result = simulate(
        jobs,
        nodes,
        Scattered(seed),
        settings=SimulationSettings(
            seed=seed, noise=0.3, faults=faulty, joins=late, max_events=60_000
        ),
        schedule_settings=how,
        extra_events=stops,
    )
    check_rows(jobs, result)


@st.composite
def sound_runs(draw: st.DrawFn) -> tuple[list[PlannedJob], list[Node], int]:
    """Jobs that every server can hold, on equal servers."""
    servers = draw(st.integers(1, 4))
    random = Random(draw(st.integers(0, 2**32)))
    widths = draw(st.sampled_from([(1,), (1, 2), (1, 1, 1, 1, 8), (1, 2, 4, 8), (8,)]))
    jobs = [
        PlannedJob(
            job=job(str(n), cards=random.choice(widths), model=random.choice("abc")),
            action=Action.RUN,
        )
        for n in range(draw(st.integers(1, 60)))
    ]
    return jobs, [node(f"n{n}") for n in range(servers)], random.randrange(2**32)


@thorough
@given(run=sound_runs())
def test_sound_runs_succeed_within_twice_the_bound(
    run: tuple[list[PlannedJob], list[Node], int],
) -> None:
    """With no fault and exact estimates every job succeeds, none waits behind idle cards, and
    the makespan keeps the guarantee of list scheduling: no starvation of gangs or of others."""
    jobs, nodes, seed = run
    start, load = 8.0, 10.0
    result = simulate(
        jobs, nodes, Scattered(seed, load), settings=SimulationSettings(seed=seed, noise=0.0)
    )
    assert {row.state for row in result.rows} == {State.SUCCEEDED}
    assert result.makespan_s <= 2 * result.bound_s + 3 * (start + load)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_bad_night_on_many_cards(seed: int) -> None:
    """Hundreds of jobs on 64 cards, with lost nodes and faults of all kinds: all accounted for."""
    random = Random(seed)
    jobs = [
        PlannedJob(
            job=job(
                str(n),
                model=f"m{random.randrange(12)}",
                cards=random.choice([1, 1, 1, 2, 4, 8, 16]),
                batch_size=random.choice([1, 4, 16, 64, MAX]),
                isolation=random.choice(["warm", "warm", "process"]),
            ),
            action=Action.RUN,
        )
        for n in range(400)
    ]
    losses = tuple(sorted(random.uniform(0, 4000) for _ in range(5)))
    result = simulate(
        jobs,
        [node(f"n{n}") for n in range(8)],
        Scattered(seed),
        settings=SimulationSettings(
            seed=seed,
            noise=0.4,
            faults=Faults.at_rate(0.03, node_losses=losses),
            max_events=200_000,
        ),
    )
    check_rows(jobs, result)
    succeeded = sum(row.state is State.SUCCEEDED for row in result.rows)
    assert succeeded > 0.9 * len(jobs)
