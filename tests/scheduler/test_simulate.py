"""The simulator: exact where it can be, replayable, and as strict as the night."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
from schedule_cases import Fixed, Spread, job, node, nodes, numbered, planned

from orchestrator.cli.main import main
from orchestrator.core.events import Command, Event, NodeJoined
from orchestrator.core.job import MAX, Job, State
from orchestrator.core.plan import PlannedJob
from orchestrator.scheduler.batch_size import most_trials
from orchestrator.scheduler.invariants import InvariantViolated
from orchestrator.scheduler.scheduler import Schedule
from orchestrator.scheduler.simulated_faults import true_rate
from orchestrator.scheduler.simulator import Faults, SimulationResult, SimulationSettings, simulate

QUIET = SimulationSettings(noise=0.0, start_s=8.0, stop_s=0.5)


def mixed(count: int, seed: int = 0) -> list[PlannedJob]:
    """Jobs of 1, 2, 4 and 8 cards and a dozen models."""
    random = Random(seed)
    return planned(
        *[
            job(str(n), cards=random.choice([1, 2, 4, 8]), model=f"m{random.randrange(12)}")
            for n in range(count)
        ]
    )


def states(result: SimulationResult) -> dict[str, State]:
    return {row.job.dataset: row.state for row in result.rows}


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


def test_one_seed_is_one_history() -> None:
    def play(seed: int) -> SimulationResult:
        faults = Faults.at_rate(0.1, node_losses=(300.0,))
        settings = SimulationSettings(seed=seed, faults=faults)
        return simulate(mixed(60), nodes(3), Spread(), settings=settings)

    assert play(5) == play(5)
    assert play(5) != play(6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_schedule_beats_the_bound(seed: int) -> None:
    settings = SimulationSettings(seed=seed)
    result = simulate(mixed(600, seed), nodes(8), Spread(), settings=settings)
    assert result.work_bound_s <= result.bound_s <= result.makespan_s
    assert result.ratio < 1.05
    assert 0.9 < result.busy_fraction <= 1.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gather_s", [0.01, 30.0])
def test_events_that_come_together_break_no_law(seed: int, gather_s: float) -> None:
    """Cards are given out once for all of them, also where nodes and workers are lost in the same
    moment: every job has one final row."""
    losses = tuple(300.0 * (number + 1) for number in range(3))
    faults = replace(Faults.at_rate(0.1, node_losses=losses), stuck=0.05)
    settings = SimulationSettings(seed=seed, faults=faults, gather_s=gather_s)
    result = simulate(mixed(80, seed), nodes(3), Spread(), settings=settings)
    assert len(result.rows) == 80 and result.faults


def test_out_of_memory_prunes_and_searches() -> None:
    sweep = [job("sweep", batch_size=size) for size in (1, 2, 4, 8, 16, 32)]
    jobs = planned(*sweep, job("most", batch_size=MAX))
    settings = SimulationSettings(faults=Faults(fits_up_to=5), noise=0.0)
    result = simulate(jobs, [node(cards=1)], Fixed(), settings=settings)
    by_size = {row.job.batch_size: row for row in result.rows}
    assert [by_size[n].state for n in (1, 2, 4, 8)] == [State.SUCCEEDED] * 3 + [State.OUT_OF_MEMORY]
    assert by_size[16].state is by_size[32].state is State.PRUNED
    found = by_size[MAX].attempt
    assert found is not None and found.job.batch_size == 5


def test_best_is_found_among_the_sizes_that_fit() -> None:
    jobs = planned(*(job(f"w{n}", batch_size="best(cap=512)") for n in range(12)))
    result = simulate(jobs, [node(cards=4)], Fixed(), settings=SimulationSettings(noise=0.05))
    for row in result.rows:
        assert row.state is State.SUCCEEDED and row.attempt is not None
        sizes = [replace(row.attempt.job, batch_size=2**power) for power in range(10)]
        assert true_rate(row.attempt.job) >= 0.95 * max(map(true_rate, sizes))
    assert result.other_rows <= 12 * most_trials(512)
    faults = Faults(fits_up_to=3)
    result = simulate(jobs, [node(cards=4)], Fixed(), settings=SimulationSettings(faults=faults))
    assert {row.attempt.job.batch_size for row in result.rows if row.attempt} == {2}


def test_a_run_that_does_not_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "handle", lambda *_: [])
    with pytest.raises(InvariantViolated, match="nothing will happen any more"):
        simulate(mixed(5), nodes(1), Spread())


def test_too_many_events_are_reported() -> None:
    with pytest.raises(InvariantViolated, match="no end after 50 events"):
        simulate(mixed(40), nodes(1), Spread(), settings=SimulationSettings(max_events=50))


def calls_per_event(jobs: list[PlannedJob], count: int) -> float:
    """Python calls inside the schedule per event, over the middle of a run."""
    calls = events = 0
    handle = Schedule.handle

    def counted(schedule: Schedule, event: Event) -> list[Command]:
        nonlocal events
        if isinstance(event, NodeJoined):
            return handle(schedule, event)
        events += 1
        sys.setprofile(count_call)
        try:
            return handle(schedule, event)
        finally:
            sys.setprofile(None)

    def count_call(_frame: object, kind: str, _argument: object) -> None:
        nonlocal calls
        calls += kind in ("call", "c_call")

    with patch.object(Schedule, "handle", counted):
        simulate(jobs, nodes(count), Spread())
    return calls / events


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gangs", "one card"])
def test_the_cost_of_a_decision_does_not_grow_with_the_jobs(kind: str) -> None:
    """Counted in calls, not in seconds: eight times the jobs, about the same cost an event."""
    few, many = (
        mixed(count)
        if kind == "gangs"
        else planned(*[job(str(n), model=f"m{n % 50}") for n in range(count)])
        for count in (125, 1000)
    )
    assert calls_per_event(many, 4) < 1.3 * calls_per_event(few, 4)


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


@pytest.mark.parametrize("rate", ["-1", "2", "many"])
def test_the_command_refuses_a_rate_that_is_none(
    rate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "grids/smoke.yaml", f"--faults={rate}"])
    assert "is not a number from 0 to 1" in capsys.readouterr().err
