"""Laws of the schedule, over random grids, clusters and histories of faults."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import job, node
from simulated_runs import (
    Scattered,
    check_rows,
    clusters,
    faults,
    grids,
    schedules,
    the_rest_of,
    thorough,
)

from orchestrator.core.events import StopRequested
from orchestrator.core.job import MAX, State
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Node
from orchestrator.scheduler.scheduler import ScheduleSettings
from orchestrator.scheduler.simulator import Faults, SimulationSettings, simulate


@thorough
@given(
    jobs=grids(),
    nodes=clusters(),
    faulty=faults(),
    how=schedules(),
    seed=st.integers(0, 2**32),
    joins=st.lists(st.tuples(st.floats(0, 3000), clusters()), max_size=2),
    given_back_at=st.one_of(st.none(), st.floats(0, 1000)),
    stop_at=st.one_of(st.none(), st.none(), st.floats(0, 4000)),
)
def test_every_run_ends_with_every_job_accounted_for(
    jobs: list[PlannedJob],
    nodes: list[Node],
    faulty: Faults,
    how: ScheduleSettings,
    seed: int,
    joins: list[tuple[float, list[Node]]],
    given_back_at: float | None,
    stop_at: float | None,
) -> None:
    late = tuple(
        (at, node(f"late{n}-{each.name}", accelerator=each.accelerator, cards=each.server_cards))
        for n, (at, group) in enumerate(joins)
        for each in group
    )
    if given_back_at is not None:
        late += tuple((given_back_at, rest) for each in nodes if (rest := the_rest_of(each)))
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


def test_gangs_get_a_server_that_others_give_back_card_by_card() -> None:
    jobs = [
        PlannedJob(job=job(str(n), cards=cards), action=Action.RUN)
        for n, cards in enumerate([8, 8, 4, 4, 4, 2, 2, 16] + [1] * 100)
    ]
    whole = [node(f"n{n}") for n in range(4)]
    parts = [
        (100.0, node("n0", node_id="n0+1", part_of="n0", card_indices=(0, 2, 5), server_cards=8)),
        (200.0, node("n0", node_id="n0+2", part_of="n0", card_indices=(1, 6), server_cards=8)),
        (100.0, node("n1", node_id="n1+1", part_of="n1", card_indices=(7,), server_cards=8)),
        (50.0, node("n2", node_id="n2+1", part_of="n2", card_indices=(0, 1, 2, 3), server_cards=8)),
    ]
    first = [
        node("n0", card_indices=(3, 4, 7), server_cards=8),
        node("n1", card_indices=(0, 1, 2, 3, 4, 5, 6), server_cards=8),
        node("n2", card_indices=(4, 5, 6, 7), server_cards=8),
        whole[3],
    ]
    settings = SimulationSettings(seed=1, noise=0.0)
    at_once = simulate(jobs, whole, Scattered(1), settings=settings)
    settings = SimulationSettings(seed=1, noise=0.0, joins=tuple(parts))
    result = simulate(jobs, first, Scattered(1), settings=settings)
    assert [row.state for row in result.rows] == [State.SUCCEEDED] * len(jobs)
    assert result.makespan_s <= 1.25 * at_once.makespan_s


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
@pytest.mark.parametrize("seed", range(3))
def test_a_bad_night_on_many_cards(seed: int) -> None:
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
