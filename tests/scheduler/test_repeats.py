"""Flagged rows are measured again at the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partialmethod
from math import inf
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import Fixed, busy_cluster, job, node, planned
from simulated_runs import Scattered, check_rows, clusters, grids, thorough

from orchestrator.core.events import (
    Command,
    Event,
    NodeJoined,
    RecordRow,
    RunAttempt,
    StartWorker,
    Tick,
)
from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.outcome import FailureClass
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Node
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.scheduler.simulator import Faults, SimulationSettings, simulate
from orchestrator.scheduler.state import Phase
from workloads.base import MeasureSettings


@dataclass
class Judge:
    """Flags the first rows of jobs of these names, or all their rows; later names matter more."""

    flagged: Collection[str]
    always: bool = False
    seen: list[RecordRow] = field(default_factory=list)

    def flags(self, row: RecordRow) -> str:
        self.seen.append(row)
        first = not row.repeat or self.always
        return "disturbed" if first and row.job.dataset in self.flagged else ""

    def replaces(self, row: RecordRow) -> bool:
        return not (self.always and row.job.dataset in self.flagged)

    def in_order(self, job_ids: Collection[str]) -> list[str]:
        return sorted(job_ids, key=lambda job_id: NAMES[job_id], reverse=True)


def named(name: str, **changes: object) -> Job:
    this = job(name, **changes)
    NAMES[this.job_id] = name
    return this


NAMES: dict[str, str] = {}


def names_of(rows: Collection[RecordRow]) -> list[tuple[str, bool, int]]:
    return [(row.job.dataset, row.final, row.repeat) for row in rows]


def test_flagged_rows_are_repeated_when_nothing_else_waits_and_what_matters_comes_first() -> None:
    jobs = [named(name) for name in "abcd"]
    cluster = busy_cluster(*jobs, cards=1, judge=Judge("ac"))
    cluster.play_out()
    repeats = [("c", True, 1), ("a", True, 1)]
    assert sorted(names_of(cluster.rows)[:4]) == [(name, True, 0) for name in "abcd"]
    assert names_of(cluster.rows)[4:] == repeats
    assert cluster.schedule.counts()[State.SUCCEEDED] == 4
    ids = [row.attempt.attempt_id for row in cluster.rows if row.attempt]
    assert len(set(ids)) == len(ids) == 6
    assert "flagged: disturbed" in cluster.rows[-1].reason


def test_a_free_card_repeats_while_another_still_runs_its_job() -> None:
    long = Fixed(by_name={"b": 1000.0})
    cluster = busy_cluster(named("a"), named("b"), cards=2, judge=Judge("a"), estimates=long)
    cluster.ends(cluster.run_of("a"))
    assert cluster.run_of("a").number == 2 and cluster.run_of("b").number == 1


def test_a_repeat_that_has_not_begun_goes_back_when_other_work_comes() -> None:
    fresh = {"isolation": "process"}
    cluster = busy_cluster(named("a", **fresh), named("b", **fresh), cards=2, judge=Judge("a"))
    cluster.ends(cluster.run_of("a"))  # its repeat waits for a process of its own
    cluster.ends(cluster.run_of("b"), State.FAILED, FailureClass.CRASH)
    attempts = [(one.job.dataset, one.number) for one in cluster.play_out()]
    assert attempts[0] == ("b", 2) and attempts[-1][0] == "a" and len(attempts) == 2


@pytest.mark.parametrize("end", [FailureClass.CRASH, FailureClass.OUT_OF_MEMORY, State.TIMED_OUT])
def test_a_repeat_that_fails_leaves_the_first_row_final_and_is_not_retried(end: object) -> None:
    cluster = busy_cluster(named("a"), cards=1, judge=Judge("a"))
    cluster.ends(cluster.only())
    cluster.play_out(end)  # type: ignore[arg-type]
    assert names_of(cluster.rows) == [("a", True, 0), ("a", False, 1)]
    assert "that row stands" in cluster.rows[-1].reason
    assert cluster.schedule.counts()[State.SUCCEEDED] == 1


def test_a_repeat_that_is_no_better_is_not_final_and_is_repeated_only_as_often_as_is_set() -> None:
    often = {"measure": MeasureSettings(repeat_flagged=2)}
    cluster = busy_cluster(named("a", **often), cards=1, judge=Judge("a", always=True))
    cluster.play_out()
    assert names_of(cluster.rows) == [("a", True, 0), ("a", False, 1), ("a", False, 2)]


def test_none_are_repeated_after_a_stop() -> None:
    stopped = busy_cluster(named("a"), cards=1, judge=Judge("a"))
    stopped.stop_request()
    stopped.play_out()
    assert names_of(stopped.rows) == [("a", True, 0)]


def test_a_job_whose_saving_others_load_is_not_repeated() -> None:
    saver, loader = named("a"), named("b")
    jobs = [*planned(saver), PlannedJob(job=loader, action=Action.RUN, needs=(saver.job_id,))]
    cluster = busy_cluster(*jobs, cards=1, judge=Judge("ab"))
    cluster.play_out()
    assert names_of(cluster.rows) == [("a", True, 0), ("b", True, 0), ("b", True, 1)]


def test_a_repeat_comes_before_the_workers_stop_when_only_a_hopeless_job_waited() -> None:
    """The last job that waits ends at the moment in which no cards are left for it to wait for."""
    hopeless = named("b", accelerator=Accelerator.GPU)
    waits = PlannedJob(job=named("c"), action=Action.RUN, needs=(hopeless.job_id,))
    jobs = [*planned(named("a"), hopeless), waits]
    how = ScheduleSettings(wait_for_nodes_s=1000.0)
    settings = SimulationSettings(faults=Faults(flagged=1.0))
    result = simulate(jobs, [node()], Fixed(), settings=settings, schedule_settings=how)
    assert result.repeats == 1 and result.workers == 1


def test_flagged_rows_of_an_earlier_driver_are_repeated_too() -> None:
    reused = PlannedJob(job=named("a"), action=Action.REUSE)
    again = {reused.job.job_id: 1}
    cluster = busy_cluster(
        reused, named("b"), cards=1, judge=Judge("a"), again=again,
        attempts_before={reused.job.job_id: 3},
    )  # fmt: skip
    cluster.play_out()
    assert names_of(cluster.rows) == [("b", True, 0), ("a", True, 1)]
    assert cluster.rows[-1].attempt is not None and cluster.rows[-1].attempt.number == 4
    assert sum(cluster.schedule.counts().values()) == 1


def test_where_all_rows_are_reused_flagged_ones_wait_for_the_first_node() -> None:
    reused = PlannedJob(job=named("a"), action=Action.REUSE)
    schedule = Schedule(
        [reused], ScheduleSettings(), Fixed(), judge=Judge("a"), again={reused.job.job_id: 1}
    )
    schedule.handle(Tick(at=0.0))
    assert not schedule.finished
    commands = schedule.handle(NodeJoined(at=1.0, node=node())) + schedule.handle(Tick(at=1.0))
    assert any(isinstance(command, StartWorker) for command in commands)


def test_flagged_rows_are_not_waited_for_longer_than_other_jobs() -> None:
    reused = PlannedJob(job=named("a"), action=Action.REUSE)
    schedule = Schedule(
        [reused], ScheduleSettings(), Fixed(), judge=Judge("a"), again={reused.job.job_id: 1}
    )
    rows = []
    for at in range(0, 1200, 10):
        commands = schedule.handle(Tick(at=float(at)))
        rows += [command.row for command in commands if isinstance(command, RecordRow)]
    assert schedule.finished and rows == []


def repeats_come_last(
    schedule: Schedule, handle: Callable[..., list[Command]], event: Event
) -> list[Command]:
    def waiting(kind: Accelerator) -> set[str]:
        records = schedule.pools[kind].records
        return {r.job_id for r in records if r.state is None and r.phase is not Phase.LEASED}

    before = {kind: waiting(kind) for kind in schedule.pools}
    measured = {r.job_id for p in schedule.pools.values() for r in p.records if r.state}
    commands = handle(schedule, event)
    for command in commands:
        if isinstance(command, RunAttempt) and command.attempt.job_id in measured:
            kind = command.attempt.job.accelerator
            assert not before[kind] & waiting(kind), f"a repeat begins: {command}"
    return commands


@thorough
@given(
    jobs=grids(),
    nodes=clusters(),
    share=st.sampled_from([0.2, 1.0]),
    crash=st.sampled_from([0.0, 0.2]),
    until=st.sampled_from([inf, 500.0, 2000.0]),
    seed=st.integers(0, 2**32),
)
def test_each_job_has_one_final_row_and_at_most_its_repeats_before_the_deadline(
    jobs: list[PlannedJob], nodes: list[Node], share: float, crash: float, until: float, seed: int
) -> None:
    """The simulator checks that none begins late; none begins while other work waits, too."""
    faults = Faults(flagged=share, crash=crash, start_failure=crash, node_losses=(300.0,))
    how = ScheduleSettings(work_until=until)
    settings = SimulationSettings(seed=seed, noise=0.3, faults=faults, max_events=60_000)
    with patch.object(Schedule, "handle", partialmethod(repeats_come_last, Schedule.handle)):
        result = simulate(jobs, nodes, Scattered(seed), settings=settings, schedule_settings=how)
    check_rows(jobs, result)
    most = sum(p.job.measure.repeat_flagged for p in jobs if p.action is Action.RUN)
    assert result.repeats <= most
    none = [replace(p, job=replace(p.job, measure=MeasureSettings(repeat_flagged=0))) for p in jobs]
    quiet = simulate(none, nodes, Scattered(seed), settings=settings, schedule_settings=how)
    assert quiet.repeats == 0
