"""A schedule with a deadline, and workers that do not come up or do not end."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import (
    Cluster,
    Fixed,
    busy_cluster,
    cluster_of,
    job,
    kinds,
    nodes,
    planned,
)

from orchestrator.core.events import RunAttempt, WorkerOverdue
from orchestrator.core.job import MAX, Job, State
from orchestrator.core.outcome import FailureClass
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.scheduler.deadline import anchors
from orchestrator.scheduler.estimator import Estimate, Estimator
from orchestrator.scheduler.scheduler import ScheduleSettings
from orchestrator.scheduler.simulator import SimulationResult, SimulationSettings, simulate
from orchestrator.scheduler.state import Phase

START = 1000.0  # when a ``Cluster`` begins


class Spread:
    """Half a minute to ten minutes by job, never more than 1.3 times what is foretold."""

    def estimate(self, job: Job) -> Estimate:
        random = Random(f"{job.model}{job.precision}{job.batch_size}")
        return Estimate(load_s=20.0, run_s=random.uniform(30, 600), margin=1.3)


def sweep(models: int, *, cards: tuple[int, ...] = (1,), seed: int = 0) -> list[PlannedJob]:
    """Six batch sizes in three precisions of each model."""
    random = Random(seed)
    jobs = []
    for number in range(models):
        width = random.choice(cards)
        jobs += [
            job(model=f"m{number}", precision=precision, batch_size=size, cards=width)
            for precision in ("fp32", "bf16", "int8")
            for size in (1, 2, 4, 8, 16, 32)
        ]
    return planned(*jobs)


def until(
    work_until: float, jobs: list[PlannedJob], servers: int = 2, **changes: object
) -> SimulationResult:
    """A simulated run of ``jobs`` with a deadline; the checker watches that it is kept."""
    how = ScheduleSettings(work_until=work_until)
    options = {"estimates": Spread(), "settings": SimulationSettings()} | changes
    return simulate(jobs, nodes(servers), schedule_settings=how, **options)  # type: ignore[arg-type]


def states(result: SimulationResult) -> Counter[State]:
    return Counter(row.state for row in result.rows)


def firsts_and_others(cluster: Cluster) -> list[bool]:
    """In the order in which attempts were started: whether each is an anchor's."""
    chosen = anchors(cluster.jobs)
    runs = [command.attempt for command in cluster.log if isinstance(command, RunAttempt)]
    return [attempt.job_id in chosen for attempt in runs]


def test_every_anchor_runs_before_any_refinement() -> None:
    cluster = cluster_of(*sweep(2), cards=1, work_until=START + 1e6)
    cluster.play_out()
    assert firsts_and_others(cluster) == [True] * 6 + [False] * 30


def test_gangs_that_refine_wait_for_anchors_of_one_card() -> None:
    """Else they would go first, being wide."""
    gangs = [job("wide", cards=2, batch_size=size) for size in (1, 2, 4)]
    singles = [job("narrow", model=f"m{n}") for n in range(4)]
    cluster = cluster_of(*gangs, *singles, cards=2, work_until=START + 1e6)
    cluster.play_out()
    assert firsts_and_others(cluster) == [True] * 5 + [False] * 2


def test_cards_do_not_wait_for_anchors() -> None:
    jobs = planned(*[job(batch_size=size) for size in (1, 2, 4, 8, 16, 32, 64, 128)])
    result = until(400.0, jobs, 1, estimates=Fixed(run_s=300.0))
    assert states(result) == {State.SUCCEEDED: 8}


def test_where_not_all_can_be_measured_short_jobs_go_first() -> None:
    """Half of the time for half of the jobs would be a quarter of what can be had."""
    jobs = sweep(12)
    whole = simulate(jobs, nodes(1), Spread())
    half = until(whole.makespan_s / 2, jobs, 1)
    assert states(half)[State.SUCCEEDED] > 0.55 * len(jobs)
    assert half.busy_fraction > 0.9


def test_what_cannot_end_in_time_is_not_started() -> None:
    lasting = Fixed(by_name={"long": 500.0, "short": 50.0})
    cluster = cluster_of(
        job("long"), job("short"), cards=2, estimates=lasting, work_until=START + 400
    )
    assert cluster.finals()["long"].state is State.NOT_STARTED
    assert "it takes about 510 s" in cluster.finals()["long"].reason
    assert "400 s are left before the deadline" in cluster.finals()["long"].reason
    cluster.play_out()
    assert cluster.finals()["short"].state is State.SUCCEEDED


def test_the_margin_of_an_estimate_counts() -> None:
    class Unsure(Fixed):
        def estimate(self, job: Job) -> Estimate:
            return Estimate(load_s=0.0, run_s=100.0, margin=1.5)

    for left, state in ((149.0, State.NOT_STARTED), (170.0, State.SUCCEEDED)):
        cluster = cluster_of(job(), cards=1, estimates=Unsure(), work_until=START + left)
        cluster.play_out()
        assert cluster.finals()["a"].state is state


def test_a_reservation_is_given_up_when_its_gang_has_become_too_late() -> None:
    lasting = Fixed(by_name={"a": 100.0, "b": 90.0, "gang": 200.0, "c": 110.0}, load_s=0.0)
    jobs = planned(job("a"), job("b"), job("c", model="c"), job("gang", cards=2))
    cluster = busy_cluster(*jobs, cards=2, estimates=lasting, work_until=START + 400)
    cluster.ends(cluster.only(), State.FAILED, FailureClass.COLLECTIVE, took=20)
    cluster.stopped()
    cluster.ready()
    cluster.ends(cluster.run_of("a"), took=80)
    [reserved] = [p.placement.reservations for p in cluster.schedule.pools.values()]
    assert [r.record.job.dataset for r in reserved.values()] == ["gang"]
    assert [run.attempt.job.dataset for run in cluster.running.values()] == ["c"]
    cluster.tick(101)
    assert not reserved
    assert cluster.finals()["gang"].state is State.NOT_STARTED
    assert "after 1 attempts" in cluster.finals()["gang"].reason
    assert [run.attempt.job.dataset for run in cluster.running.values()] == ["c", "b"]


def test_a_search_goes_on_only_while_there_is_time_to_measure() -> None:
    cluster = busy_cluster(
        job(batch_size=MAX), cards=1, estimates=Fixed(run_s=90.0), work_until=START + 115
    )
    cluster.ends(cluster.only(), took=40)
    assert cluster.running
    cluster.ends(cluster.only(), took=60)
    assert cluster.finals()["a"].state is State.NOT_STARTED
    assert "got to batch size 4, too late" in cluster.finals()["a"].reason
    assert [row.final for row in cluster.rows] == [False, False, True]


def test_what_overruns_is_stopped_at_the_end_of_the_time() -> None:
    cluster = busy_cluster(job("slow"), job("next"), cards=1, work_until=START + 200)
    running = cluster.only()
    assert kinds(cluster.tick(200)) == ["RecordRow", "StopWorker"]
    cluster.ends(running, State.LOST, FailureClass.HANG, took=1)
    row = cluster.finals()[running.job.dataset]
    assert row.state is State.LOST
    assert row.reason.startswith("cut short: the deadline came")
    cluster.stopped()
    assert cluster.finished is not None


def test_estimates_get_better_within_the_run() -> None:
    jobs = planned(*[job(str(n), batch_size=2 ** (n % 6)) for n in range(300)])
    lasting = Fixed(run_s=150.0)
    learning = until(3000.0, jobs, 1, estimates=Estimator(), truth=lasting.estimate)
    assert states(learning)[State.LOST] == 0
    assert states(learning)[State.SUCCEEDED] > 0.85 * (3000 / 150) * 8


def test_what_waits_is_added_up_by_its_newest_estimates() -> None:
    jobs = [job(str(n), batch_size=2**n) for n in range(6)]
    cluster = busy_cluster(*jobs, cards=1, estimates=Estimator(), work_until=START + 1e6)
    [pool] = cluster.schedule.pools.values()
    before = pool.pending.card_seconds
    for _ in range(3):
        cluster.ends(cluster.only(), took=1)
    waiting = [record.duration for record in pool.records if record.phase is Phase.WAITING]
    assert len(waiting) == 2 and sum(waiting) < before
    assert pool.pending.card_seconds == pytest.approx(sum(waiting))


def overdue(cluster: Cluster, worker_id: str, reason: str = "no progress") -> list[str]:
    return kinds(cluster.see(WorkerOverdue(at=cluster.now, worker_id=worker_id, reason=reason)))


def test_a_worker_that_does_not_come_up_is_stopped_and_counts_against_its_card() -> None:
    cluster = cluster_of(job("a"), job("b"), cards=1, card_rest_s=5.0)
    for number in range(2):
        [worker] = cluster.starting
        assert overdue(cluster, worker) == ["StopWorker"]
        assert overdue(cluster, worker) == []
        cluster.stopped()
        assert not cluster.starting
        cluster.tick(5)
        assert len(cluster.starting) == 1 - number
    assert not cluster.rows
    cluster.tick(300)
    cluster.play_out()
    assert cluster.states() == {State.SUCCEEDED}


def test_a_card_whose_process_does_not_end_is_not_used_and_nobody_waits_for_it() -> None:
    cluster = busy_cluster(job("a"), cards=2, stop_patience_s=120.0)
    stuck = cluster.only()
    [worker] = cluster.up
    overdue(cluster, worker, "hung in measure")
    assert kinds(cluster.tick(119)) == []
    commands = cluster.tick(1)
    assert kinds(commands) == ["RecordRow", "StartWorker"]
    assert cluster.rows[0].state is State.LOST
    assert "hung in measure; its worker" in cluster.rows[0].reason
    cluster.running.pop(stuck.attempt_id)
    cluster.ready()
    assert cluster.only().cards != stuck.cards
    cluster.stopped(worker)
    assert stuck.cards[0] in {
        slot.card
        for pool in cluster.schedule.pools.values()
        for server in pool.servers.values()
        for slot in server.slots.values()
        if slot.usable
    }


def test_after_a_request_to_end_nobody_is_woken_for_jobs_that_will_not_run() -> None:
    cluster = busy_cluster(job("a"), job("b"), cards=1, work_until=START + 1000)
    cluster.stop_request()
    for _ in range(20):
        cluster.tick(45)
    assert all(at > cluster.now for at in cluster.wakes[-1:])
    assert len(cluster.wakes) < 12
    assert kinds(cluster.tick(100)) == ["StopWorker"]


# ---------------------------------------------------------------- anchors


def technique_of(this: Job) -> tuple[object, ...]:
    """The parts of a configuration, spelt out."""
    techniques = tuple(pair for pair in this.parameters if pair[0] != "output_tokens")
    fixed = (this.model, this.workload, this.dataset, this.precision, this.engine, this.isolation)
    return (*fixed, this.accelerator, this.cards, techniques)


@st.composite
def grids(draw: st.DrawFn) -> list[PlannedJob]:
    """Up to sixty jobs of up to a dozen configurations, some measured or not to be run."""
    random = Random(draw(st.integers(0, 2**32)))
    jobs = []
    for _ in range(draw(st.integers(0, 60))):
        parameters = [("attention", random.choice(["sdpa", "eager"]))]
        if random.random() < 0.5:
            parameters.append(("output_tokens", random.choice([16, 128])))
        this = job(
            model=random.choice("abc"),
            precision=random.choice(["fp32", "bf16"]),
            cards=random.choice([1, 1, 2]),
            batch_size=random.choice([1, 2, 4, 8, 16, MAX]),
            parameters=tuple(parameters),
        )
        action = random.choice([Action.RUN] * 6 + [Action.REUSE, Action.SKIP, Action.UNSUPPORTED])
        jobs.append(PlannedJob(job=this, action=action))
    unique = {each.job.job_id: each for each in jobs}
    return list(unique.values())


@given(grid=grids(), seed=st.integers(0, 2**32))
def test_every_configuration_has_one_anchor_until_a_cell_is_measured(
    grid: list[PlannedJob], seed: int
) -> None:
    chosen = anchors(grid)
    of = {each.job.job_id: each for each in grid}
    assert all(of[job_id].action is Action.RUN for job_id in chosen)
    by_configuration: dict[object, list[PlannedJob]] = {}
    for each in grid:
        by_configuration.setdefault(technique_of(each.job), []).append(each)
    for cells in by_configuration.values():
        to_run = [each for each in cells if each.action is Action.RUN]
        measured = any(each.action is Action.REUSE for each in cells)
        found = [each for each in to_run if each.job.job_id in chosen]
        assert len(found) == bool(to_run and not measured)
    shuffled = grid[:]
    Random(seed).shuffle(shuffled)
    assert anchors(shuffled) == chosen


def sizes(chosen: frozenset[str], *jobs: Job) -> list[object]:
    return sorted((j.batch_size for j in jobs if j.job_id in chosen), key=str)


def test_the_anchor_is_the_middle_batch_size_and_never_a_search() -> None:
    """Neither the slowest nor the one that may not fit."""
    jobs = [job(batch_size=size) for size in (1, 2, 4, 8, 16, 32, 64, MAX)]
    assert sizes(anchors(planned(*jobs)), *jobs) == [8]


def test_anchors_can_be_compared_with_each_other() -> None:
    wide = [job(precision="bf16", batch_size=size) for size in (1, 2, 4, 8, 16)]
    others = [job(precision=p, batch_size=1) for p in ("fp32", "int8", "int4")]
    assert sizes(anchors(planned(*wide, *others)), *wide, *others) == [1, 1, 1, 1]


def test_what_an_anchor_needs_goes_as_early() -> None:
    train = [job("train", batch_size=size) for size in (1, 2, 4)]
    use = job("use", batch_size=16)
    grid = [*planned(*train), PlannedJob(job=use, action=Action.RUN, needs=(train[2].job_id,))]
    assert anchors(grid) == {use.job_id, train[1].job_id, train[2].job_id}
