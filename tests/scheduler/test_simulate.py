"""The simulator, exact where it can be and replayable; and laws of the schedule by simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import Fixed, job, node, nodes, numbered, planned
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

from orchestrator.cli.main import main
from orchestrator.core.events import StopRequested
from orchestrator.core.job import Job, State
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Node
from orchestrator.scheduler.invariants import InvariantViolated
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.scheduler.simulator import Faults, SimulationSettings, simulate

QUIET = SimulationSettings(noise=0.0, start_s=8.0, stop_s=0.5)


@pytest.mark.parametrize("gather_s", [0.0, 0.01])
@pytest.mark.parametrize(
    ("jobs", "cards", "makespan_s"),
    [
        (numbered(1), 8, 8 + 10 + 100),
        (numbered(3), 1, 8 + 10 + 3 * 100),
        (numbered(40), 8, 8 + 10 + 5 * 100),
        (numbered(2, cards=2), 2, 2 * (8 + 10 + 100) + 0.5),
    ],
    ids=["one job", "a warm worker", "jobs that end together", "gangs, each with fresh workers"],
)
def test_starts_and_loads_are_paid_as_often_as_they_happen(
    jobs: list[Job], cards: int, makespan_s: float, gather_s: float
) -> None:
    settings = replace(QUIET, gather_s=gather_s)
    estimates = Fixed(run_s=100, load_s=10)
    result = simulate(planned(*jobs), nodes(1, cards), estimates, settings=settings)
    assert result.makespan_s == makespan_s
    assert result.attempts == len(jobs)
    assert len(jobs) > 1 or (result.workers, result.bound_s) == (1, 110)


def test_a_run_that_does_not_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "handle", lambda *_: [])
    with pytest.raises(InvariantViolated, match="nothing will happen any more"):
        simulate(planned(job()), nodes(1), Fixed())


def test_too_many_events_are_reported() -> None:
    how = SimulationSettings(max_events=50)
    with pytest.raises(InvariantViolated, match="no end after 50 events"):
        simulate(planned(*numbered(40)), nodes(1), Fixed(), settings=how)


def test_the_command_prints_makespan_bound_and_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = Path(__file__).parents[2] / "grids" / "smoke.yaml"
    arguments = ["simulate", str(grid), "--emulate", "4x8", "--faults", "0.1", "--seed", "4"]
    assert main([*arguments, "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for word in ("makespan", "lower bound", "cards busy", "faults", "nothing was run"):
        assert word in printed
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- laws over random runs


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
    gather_s=st.sampled_from([0.0, 0.0, 0.01, 30.0]),
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
    gather_s: float,
) -> None:
    """Also where events come together, for all of which cards are given out once."""
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
            seed=seed,
            noise=0.3,
            faults=faulty,
            joins=late,
            gather_s=gather_s,
            max_events=60_000,
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
    assert result.work_bound_s <= result.bound_s <= result.makespan_s
    assert result.makespan_s <= 2 * result.bound_s + 3 * (start + load)
