"""Clocks that are set while a run lasts: nothing but the deadline may notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from schedule_cases import Fixed, job, node, planned

from orchestrator.core.events import (
    ClockSet,
    Command,
    NodeJoined,
    RecordRow,
    RunAttempt,
    Tick,
    Wake,
    WorkerReady,
)
from orchestrator.core.job import State
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.scheduler.simulated_faults import WORKER_INFO
from orchestrator.util.host import CallAt

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE / "chaos"))

from chaos_clock import SteppedClock, stepped_clock  # noqa: E402

HOURS_S = 7200
PATIENCE_S = 120.0


# ---------------------------------------------------------------- a real driver


class Stepped:
    """A driver with workers, in a process whose time of day the test sets."""

    def __init__(self, home: Path, clock: SteppedClock) -> None:
        self.home = home
        self.set_clock = clock.step
        path = os.pathsep.join([str(HERE.parent), str(HERE), str(HERE / "ray")])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "stepped_driver.py"), str(home)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | clock.environment() | {"PYTHONPATH": path},
        )

    def status(self) -> dict[str, Any]:
        """The driver's last status."""
        try:
            status: dict[str, Any] = json.loads((self.home / "night" / "status.json").read_text())
        except OSError:
            return {"at": 0.0, "cards": []}
        return status

    def wait_for_status(self, offset_s: float) -> None:
        """Wait for a status of the time as it was set, with jobs on cards."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status = self.status()
            wrong_s = abs(status["at"] - time.time() - offset_s)
            if wrong_s < 60 and any(card["attempt_id"] for card in status["cards"]):
                return
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"no status after the clock was set: {status}"
            time.sleep(0.1)


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[Stepped]:
    """Ended with all its workers."""
    (tmp_path / "clock").mkdir()
    clock = stepped_clock(tmp_path / "clock")
    if clock is None:
        pytest.skip("there is no C compiler for the library that sets a process's clock")
    running = Stepped(tmp_path, clock)
    yield running
    if running.process.poll() is None:
        os.killpg(running.process.pid, 9)
        running.process.wait()


@pytest.mark.slow
def test_a_clock_that_is_set_by_hours_neither_kills_nor_stops_anything(stepped: Stepped) -> None:
    """Two hours forward, then two back, while jobs run: every job is measured at its first
    attempt, the status goes on, and rows know how long attempts really took."""
    stepped.wait_for_status(0)
    stepped.set_clock(HOURS_S)
    stepped.wait_for_status(HOURS_S)
    stepped.set_clock(-HOURS_S)
    stepped.wait_for_status(-HOURS_S)
    (stepped.home / "go-on").touch()
    output, _ = stepped.process.communicate(timeout=PATIENCE_S)
    rows = json.loads(output.splitlines()[-1])
    assert [(row["state"], row["attempt"]) for row in rows] == [("SUCCEEDED", 1)] * 4, output
    assert all(0.0 <= row["took_s"] < 3 * PATIENCE_S for row in rows), rows
    assert "this machine's clock was set forward by 2h00m" in output
    assert "this machine's clock was set back by 4h00m" in output


# ---------------------------------------------------------------- a deadline, a budget


def started(settings: ScheduleSettings) -> Schedule:
    """A schedule with two jobs of 100 s on one card, told that the time of day is 1e9."""
    schedule = Schedule(planned(job("a"), job("b")), settings, Fixed())
    schedule.handle(ClockSet(at=0.0, ahead_s=1e9))
    schedule.handle(NodeJoined(at=0.0, node=node(cards=1)))
    return schedule


def unrun(commands: list[Command]) -> list[State]:
    """The states of rows of jobs that did not run."""
    return [each.state for each in commands if isinstance(each, RecordRow) and not each.attempt]


def test_a_deadline_is_a_time_of_day() -> None:
    """Set forward beyond it, nothing more is started; set back, there is more time."""
    schedule = started(ScheduleSettings(work_until=1e9 + 1000))
    assert unrun(schedule.handle(Tick(at=1.0))) == []
    after = schedule.handle(ClockSet(at=2.0, ahead_s=1e9 + HOURS_S, by_s=HOURS_S))
    assert unrun(after) == [State.NOT_STARTED] * 2
    schedule = started(ScheduleSettings(work_until=1e9 + 1000))
    schedule.handle(ClockSet(at=2.0, ahead_s=1e9 - HOURS_S, by_s=-HOURS_S))
    assert unrun(schedule.handle(Tick(at=1200.0))) == []


def test_a_budget_is_a_length_of_time() -> None:
    """No clock that is set makes it longer or shorter."""
    for by_s in (HOURS_S, -HOURS_S):
        schedule = started(ScheduleSettings(work_until=1e9 + 1000, follow_clock=False))
        after = schedule.handle(ClockSet(at=2.0, ahead_s=1e9 + by_s, by_s=by_s))
        assert unrun([*after, *schedule.handle(Tick(at=3.0))]) == []
        assert unrun(schedule.handle(Tick(at=1001.0))) == [State.NOT_STARTED] * 2


def test_a_row_that_the_schedule_makes_has_the_time_of_day() -> None:
    """Of an attempt whose node went, nobody else can say when that was."""
    from orchestrator.core.events import NodeLeft

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
    """A timer that was started for two hours is due at once when the clock is set forward."""
    now, called = [1000.0], threading.Event()
    CallAt(1000.0 + HOURS_S, called.set, wall=lambda: now[0], look_every_s=0.01)
    assert not called.wait(0.1)
    now[0] += HOURS_S
    assert called.wait(PATIENCE_S)


def test_a_call_that_is_cancelled_never_comes() -> None:
    """However far the clock is set."""
    now, called = [1000.0], threading.Event()
    timer = CallAt(2000.0, called.set, wall=lambda: now[0], look_every_s=0.01)
    timer.cancel()
    now[0] = 3000.0
    assert not called.wait(0.2)
