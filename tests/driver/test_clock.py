"""Searches for batch sizes by real workers, while the clock is set: only a deadline may notice."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from patience import patience
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
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.scheduler.simulated_faults import WORKER_INFO
from orchestrator.util.host import CallAt

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE / "chaos"))

from chaos_clock import stepped_clock  # noqa: E402

HOURS_S = 7200
PATIENCE_S = 120.0
CAP = 24
CARD_MEMORY_BYTES = 90 * 10**6


# ---------------------------------------------------------------- a real driver


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a driver with workers on small cards, whose clock is set by hours twice."""
    home = tmp_path_factory.mktemp("searches")
    clock = stepped_clock(home)
    sizes = {goal: {goal: {"cap": CAP, "tolerance": 0.25}} for goal in ("max", "best")}
    defaults = {"workload": "text-generation", "model": "tiny-chatglm3", "accelerator": "HPU"}
    lengths = {"input_tokens": 256, "output_tokens": 2, "ignore_eos": True, "prompts": 1}
    grid = {
        "name": "night",
        "defaults": {**defaults, **lengths, "precision": "fp32"},
        "measure": {"warmup": 0, "min_repeats": 1, "max_repeats": 1, "time_limit_s": 5},
        "experiments": [{"name": goal, "batch_size": size} for goal, size in sizes.items()],
    }
    (home / "grid.yaml").write_text(json.dumps(grid))
    paths = [str(HERE.parent), str(HERE), str(HERE / "chaos")]
    done = subprocess.run(
        [sys.executable, str(HERE / "stepped_driver.py"), str(home), str(home / "grid.yaml")],
        capture_output=True,
        text=True,
        timeout=patience(240),
        env=os.environ
        | (clock.environment() if clock is not None else {})
        | {"PYTHONPATH": os.pathsep.join(paths), "CARD_MEMORY_BYTES": str(CARD_MEMORY_BYTES)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def rows(output: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(output[-1])
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")), reason="needs a C compiler to set a clock"
)
def test_a_clock_that_is_set_by_hours_neither_kills_nor_stops_anything(
    output: list[str], rows: list[dict[str, Any]]
) -> None:
    assert {row["state"] for row in rows} == {"SUCCEEDED", "OUT_OF_MEMORY"}
    assert all(0.0 <= row["took_s"] < PATIENCE_S for row in rows), rows
    assert any("this machine's clock was set forward by 2h00m" in line for line in output)
    assert any("this machine's clock was set back by 4h00m" in line for line in output)


def of(rows: list[dict[str, Any]], goal: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    mine = [row for row in rows if row["asked"].startswith(goal)]
    (final,) = [row for row in mine if row["final"]]
    return final, [row for row in mine if not row["final"]]


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_found(rows: list[dict[str, Any]]) -> None:
    """What did not fit was refused by the kernel and ended as OUT_OF_MEMORY."""
    final, tried = of(rows, "max")
    assert final["state"] == "SUCCEEDED"
    fits, refused = (
        [row["batch_size"] for row in tried if row["state"] == state]
        for state in ("SUCCEEDED", "OUT_OF_MEMORY")
    )
    assert refused and len(fits) + len(refused) == len(tried)
    assert max(fits) == final["batch_size"] < min(refused) <= 1.25 * max(fits) + 1
    told = re.search(r"batch size (\d+) fits and (\d+) does not.*\((\d+) probes\)", final["reason"])
    assert told is not None, final["reason"]
    assert [int(number) for number in told.groups()] == [max(fits), min(refused), len(tried)]


@pytest.mark.slow
def test_the_fastest_batch_is_one_that_fits(rows: list[dict[str, Any]]) -> None:
    final, tried = of(rows, "best")
    assert final["state"] == "SUCCEEDED"
    assert {row["state"] for row in tried} <= {"SUCCEEDED", "OUT_OF_MEMORY"}
    fits = {row["batch_size"] for row in tried if row["state"] == "SUCCEEDED"}
    assert final["batch_size"] in fits and len(fits) >= 2
    assert f"batch size {final['batch_size']} is the fastest of" in final["reason"]


# ---------------------------------------------------------------- a deadline, a budget


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
