"""The simulator: exact where it can be, replayable, and as strict as the night."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from schedule_cases import Fixed, job, node, planned

from orchestrator.cli.main import main
from orchestrator.core.events import Command, Event, NodeJoined, StopRequested
from orchestrator.core.job import MAX, Job, State
from orchestrator.core.plan import PlannedJob
from orchestrator.core.topology import Node
from orchestrator.scheduler.batch_size import most_trials
from orchestrator.scheduler.estimator import Estimate
from orchestrator.scheduler.invariants import InvariantViolated
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
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


class Spread:
    """Estimates from half a minute to ten minutes, by job."""

    def estimate(self, job: Job) -> Estimate:
        return Estimate(load_s=20.0, run_s=Random(job.dataset).uniform(30, 600))


def nodes(count: int) -> list[Node]:
    return [node(f"n{n}") for n in range(count)]


def states(result: SimulationResult) -> dict[str, State]:
    return {row.job.dataset: row.state for row in result.rows}


def test_one_job_takes_its_start_its_load_and_its_run() -> None:
    """Without noise the clock can be worked out by hand."""
    result = simulate(planned(job()), nodes(1), Fixed(run_s=100, load_s=10), settings=QUIET)
    assert result.makespan_s == 8 + 10 + 100
    assert (result.attempts, result.workers, result.bound_s) == (1, 1, 110)


def test_a_warm_worker_pays_start_and_load_once() -> None:
    """Three jobs of one model on one card."""
    jobs = planned(*[job(str(n)) for n in range(3)])
    result = simulate(jobs, [node(cards=1)], Fixed(run_s=100, load_s=10), settings=QUIET)
    assert result.makespan_s == 8 + 10 + 3 * 100


def test_gangs_pay_start_and_load_each_time() -> None:
    """Two gangs on the same two cards: the second waits for the first one's processes to go."""
    jobs = planned(job("a", cards=2), job("b", cards=2))
    result = simulate(jobs, [node(cards=2)], Fixed(run_s=100, load_s=10), settings=QUIET)
    assert result.makespan_s == 2 * (8 + 10 + 100) + 0.5


def test_one_seed_is_one_history() -> None:
    """The same seed replays exactly; another one does not."""

    def play(seed: int) -> SimulationResult:
        faults = Faults.at_rate(0.1, node_losses=(300.0,))
        settings = SimulationSettings(seed=seed, faults=faults)
        return simulate(mixed(60), nodes(3), Spread(), settings=settings)

    assert play(5) == play(5)
    assert play(5) != play(6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_no_schedule_beats_the_bound(seed: int) -> None:
    """And ours is near it on a mixed load."""
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


def test_events_that_come_together_cost_no_time() -> None:
    """Forty jobs of the same length end in the same moments on eight cards."""
    jobs = planned(*[job(str(n)) for n in range(40)])
    alone, together = (
        simulate(jobs, nodes(1), Fixed(), settings=replace(QUIET, gather_s=gather_s))
        for gather_s in (0.0, 0.01)
    )
    assert together.makespan_s == alone.makespan_s == 8 + 10 + 5 * 100


def test_out_of_memory_prunes_and_searches() -> None:
    """Sizes above 5 do not fit: what is larger is pruned or fails, ``max`` finds 5."""
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
    """The simulator's curve has one peak; the search ends there, or below where memory ends."""
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


def test_a_lost_node_costs_time_but_no_row() -> None:
    """Its attempts run again elsewhere, and what it reports late is kept apart."""
    jobs = mixed(40)
    sound = simulate(jobs, nodes(3), Spread(), settings=SimulationSettings())
    faults = Faults(node_losses=(200.0,), late_results=True)
    lossy = simulate(jobs, nodes(3), Spread(), settings=SimulationSettings(faults=faults))
    assert set(states(lossy).values()) == {State.SUCCEEDED}
    assert lossy.makespan_s > sound.makespan_s
    assert lossy.other_rows > lossy.attempts - 40 > 0  # each LOST, and the late ones


def test_a_node_that_joins_later_shortens_the_run() -> None:
    """It is used as soon as it is there."""
    jobs = mixed(80)
    alone = simulate(jobs, nodes(2), Spread())
    joined = simulate(
        jobs, nodes(2), Spread(), settings=SimulationSettings(joins=((500.0, node("late")),))
    )
    assert joined.makespan_s < 0.9 * alone.makespan_s


def test_a_poison_job_fails_and_the_others_do_not() -> None:
    """Jobs that crash wherever they run are given up; every card stays in use."""
    settings = SimulationSettings(seed=2, faults=Faults(poison=0.1))
    result = simulate(mixed(200), nodes(4), Spread(), settings=settings)
    found = set(states(result).values())
    assert found == {State.SUCCEEDED, State.FAILED}
    failed = sum(state is State.FAILED for state in states(result).values())
    assert 5 < failed < 40


def test_a_hang_ends_timed_out() -> None:
    """Every attempt hangs: each job is tried twice."""
    result = simulate(
        mixed(10), nodes(2), Spread(), settings=SimulationSettings(faults=Faults(hang=1.0))
    )
    assert set(states(result).values()) == {State.TIMED_OUT}
    assert result.attempts == 20


def test_a_stop_request_ends_the_run_early() -> None:
    """What had not begun is NOT_STARTED."""
    stop: Event = StopRequested(at=300.0, reason="morning")
    result = simulate(mixed(300), nodes(2), Spread(), extra_events=[stop])
    assert set(states(result).values()) == {State.SUCCEEDED, State.NOT_STARTED}
    assert result.makespan_s < 300 + 700


def test_a_run_that_does_not_end_is_reported() -> None:
    """A schedule that forgets to go on leaves nothing to happen: that is an error, not a hang."""

    class Forgetful(Schedule):
        def _assign(self) -> Iterator[Command]:
            return iter(())

    with pytest.raises(InvariantViolated, match="nothing will happen any more"):
        _with_schedule(Forgetful)


def test_too_many_events_are_reported() -> None:
    """A livelock ends at the limit, with the time it was reached."""
    with pytest.raises(InvariantViolated, match="no end after 50 events"):
        simulate(mixed(40), nodes(1), Spread(), settings=SimulationSettings(max_events=50))


def _with_schedule(kind: type[Schedule], settings: SimulationSettings | None = None) -> None:
    """Simulate with another schedule class."""
    from orchestrator.scheduler import simulator as module

    original = module.Schedule
    module.Schedule = kind  # type: ignore[misc]
    try:
        simulate(mixed(5), nodes(1), Spread(), settings=settings)
    finally:
        module.Schedule = original  # type: ignore[misc]


def calls_per_event(jobs: list[PlannedJob], count: int) -> float:
    """Python calls inside the schedule per event, over the middle of a run."""
    schedule_calls = 0
    events = 0

    class Counted(Schedule):
        def handle(self, event: Event) -> list:
            nonlocal events
            if isinstance(event, NodeJoined):
                return super().handle(event)
            events += 1
            sys.setprofile(count_call)
            try:
                return super().handle(event)
            finally:
                sys.setprofile(None)

    def count_call(_frame: object, kind: str, _argument: object) -> None:
        nonlocal schedule_calls
        schedule_calls += kind in ("call", "c_call")

    from orchestrator.scheduler import simulator as module

    original: Callable[..., Schedule] = module.Schedule
    module.Schedule = Counted  # type: ignore[misc]
    try:
        simulate(jobs, nodes(count), Spread())
    finally:
        module.Schedule = original  # type: ignore[misc,assignment]
    return schedule_calls / events


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [False, True], ids=["mixed", "one card"])
def test_the_cost_of_a_decision_does_not_grow_with_the_jobs(faulty: bool) -> None:
    """Counted in calls, not in seconds: eight times the jobs, about the same cost an event."""
    few, many = mixed(125), mixed(1000)
    if faulty:
        few = planned(*[job(str(n), model=f"m{n % 50}") for n in range(125)])
        many = planned(*[job(str(n), model=f"m{n % 50}") for n in range(1000)])
    assert calls_per_event(many, 4) < 1.3 * calls_per_event(few, 4)


def test_the_command_prints_makespan_bound_and_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``nightgrid simulate`` on a shipped grid, with accidents; it writes nothing."""
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
    """What, and what would be right."""
    with pytest.raises(SystemExit):
        main(["simulate", "grids/smoke.yaml", f"--faults={rate}"])
    assert "is not a number from 0 to 1" in capsys.readouterr().err


def test_settings_of_the_schedule_are_passed_on() -> None:
    """One worker at a time makes a slower start."""
    slow = simulate(
        mixed(20), nodes(2), Spread(), schedule_settings=ScheduleSettings(max_starting=1)
    )
    assert set(states(slow).values()) == {State.SUCCEEDED}
