"""The clock may be set while a run goes on: only a deadline may notice."""

from __future__ import annotations

import threading

import pytest
from driver_cases import plan
from schedule_cases import Fixed, job, node, planned

from orchestrator.core.events import (
    ClockSet,
    Command,
    NodeJoined,
    NodeLeft,
    RecordRow,
    RunAttempt,
    Tick,
    Wake,
    WorkerReady,
)
from orchestrator.core.job import State
from orchestrator.driver.board import Board
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.scheduler.simulated_faults import WORKER_INFO
from orchestrator.util.host import CallAt, Interval
from orchestrator.watch.live import event_line

HOURS_S = 7200
PATIENCE_S = 120.0


def started(settings: ScheduleSettings) -> Schedule:
    schedule = Schedule(planned(job("a"), job("b")), settings, Fixed())
    schedule.handle(ClockSet(at=0.0, ahead_s=1e9))
    schedule.handle(NodeJoined(at=0.0, node=node(cards=1)))
    return schedule


def unrun(commands: list[Command]) -> list[State]:
    return [each.state for each in commands if isinstance(each, RecordRow) and not each.attempt]


def test_a_deadline_is_a_time_of_day() -> None:
    schedule = started(ScheduleSettings(work_until=1e9 + 1000))
    assert unrun(schedule.handle(Tick(at=1.0))) == []
    after = schedule.handle(ClockSet(at=2.0, ahead_s=1e9 + HOURS_S, by_s=HOURS_S))
    assert unrun(after) == [State.NOT_STARTED] * 2
    schedule = started(ScheduleSettings(work_until=1e9 + 1000))
    schedule.handle(ClockSet(at=2.0, ahead_s=1e9 - HOURS_S, by_s=-HOURS_S))
    assert unrun(schedule.handle(Tick(at=1200.0))) == []


def test_a_budget_is_a_length_of_time() -> None:
    for by_s in (HOURS_S, -HOURS_S):
        schedule = started(ScheduleSettings(work_until=1e9 + 1000, follow_clock=False))
        after = schedule.handle(ClockSet(at=2.0, ahead_s=1e9 + by_s, by_s=by_s))
        assert unrun([*after, *schedule.handle(Tick(at=3.0))]) == []
        assert unrun(schedule.handle(Tick(at=1001.0))) == [State.NOT_STARTED] * 2


def test_a_row_that_the_schedule_makes_has_the_time_of_day() -> None:
    schedule = started(ScheduleSettings())
    (start,) = [c for c in schedule.handle(Tick(at=1.0)) if not isinstance(c, Wake)]
    commands = schedule.handle(
        WorkerReady(at=9.0, worker_id=start.worker_id, info=WORKER_INFO)  # type: ignore[union-attr]
    )
    assert any(isinstance(each, RunAttempt) for each in commands)
    schedule.handle(ClockSet(at=10.0, ahead_s=2e9, by_s=1e9))
    commands = schedule.handle(NodeLeft(at=12.0, node_id="n1", reason="gone"))
    (row,) = [each for each in commands if isinstance(each, RecordRow)]
    assert row.outcome is not None and row.outcome.ranks[0].ended_at == 2e9 + 12.0


def test_a_call_comes_at_its_time_of_day_though_the_clock_is_set() -> None:
    now, called = [1000.0], threading.Event()
    cancelled = threading.Event()
    CallAt(1000.0 + HOURS_S, called.set, wall=lambda: now[0], look_every_s=0.01)
    CallAt(2000.0, cancelled.set, wall=lambda: now[0], look_every_s=0.01).cancel()
    assert not called.wait(0.1)
    now[0] += HOURS_S
    assert called.wait(PATIENCE_S) and not cancelled.wait(0.1)


def test_what_lasts_is_not_measured_by_a_clock_that_is_set(monkeypatch) -> None:
    lasted = Interval()
    monkeypatch.setattr("time.time", lambda: lasted.started_at - HOURS_S)
    assert 0 <= lasted.until_now() - lasted.started_at < PATIENCE_S


@pytest.mark.parametrize(("by_s", "words"), [(7200.0, "forward by 2h00m"), (-60.0, "back by 1m")])
def test_a_clock_that_is_set_is_told(by_s: float, words: str) -> None:
    board = Board(run="night", plan=plan(), started_at=0.0)
    assert words in event_line(ClockSet(at=1.0, ahead_s=0.0, by_s=by_s), board)
