"""``--deadline`` and ``--budget`` on the command line, and a run that keeps one."""

from __future__ import annotations

import time
from argparse import Namespace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from command_line import Nightgrid
from measurements import row
from patience import patience

from orchestrator.cli.remote import deadline_words
from orchestrator.core.deadline import parse_deadline
from orchestrator.core.errors import ClusterError
from orchestrator.core.job import State
from orchestrator.store.store import Store


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--deadline", "8"], "write 08:00"),
        (["--budget", "9"], "write 9h, 90m or 1h30m"),
        (["--deadline", "2020-01-01T08:00Z"], "is past"),
        (["--deadline", "08:00", "--budget", "9h"], "not allowed with"),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan", "simulate", "submit"])
def test_what_is_no_deadline_is_refused_before_anything_starts(
    command: str, arguments: list[str], why: str, nightgrid: Nightgrid
) -> None:
    assert why in nightgrid(command, "smoke", *arguments, code=2).err


def test_plan_and_simulation_say_what_should_be_measured_by_then(
    tmp_path: Path, nightgrid: Nightgrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = ("smoke", "--emulate", "1x1", "--results", tmp_path, "--budget")
    assert "all 20 jobs should be done by then" in nightgrid("plan", *grid, "9h").out
    assert "of 20 jobs should be measured by then, with" in nightgrid("plan", *grid, "90s").out
    forecast = nightgrid("plan", *grid, "90s", "--json").json["forecast"]
    assert 0 < forecast["reached"] <= forecast["measured"] < forecast["jobs"] == 20
    assert forecast["configurations"] == 4 and forecast["ends_after_s"] <= forecast["seconds"]
    assert nightgrid("simulate", *grid, "2m", "--json").json["makespan_s"] <= 120
    monkeypatch.setattr("orchestrator.driver.plan.usable_cores", lambda: (0, 1))
    together = ("smoke", "--emulate", "2x8", "--results", tmp_path, "--budget", "70s")
    printed = nightgrid("plan", *together).out  # 16 cards on two processors
    assert "likely not all 20 jobs are done by then: they take about" in printed


def test_a_cluster_is_sent_the_moment_to_the_second_and_not_the_time_of_day() -> None:
    """It may be in another time zone; a budget counts from when the run starts there."""
    now = datetime.now().astimezone()
    for moment in (parse_deadline("08:00", now), now + timedelta(hours=1, seconds=1)):
        option, sent = deadline_words(Namespace(deadline=moment, budget=None))
        assert option == "--deadline" and parse_deadline(sent, now) == moment
    assert deadline_words(Namespace(deadline=None, budget=5400.0)) == ["--budget", "5400s"]
    assert deadline_words(Namespace(deadline=None, budget=None)) == []


GRID = """\
name: short
experiments:
  - name: short
    workload: text-generation
    model: tiny-chatglm3
    accelerator: CPU
    prompts: 4
    output_tokens: 4
    measure: {repeat_flagged: 0, warmup: 1, min_repeats: 1, max_repeats: 2, time_limit_s: 0.2}
    axes: {precision: [fp32, bf16], batch_size: [1, 2, 4]}
"""


@pytest.fixture
def grid(workplace: Path) -> Path:
    (workplace / "short.yaml").write_text(GRID)
    return workplace / "short.yaml"


@pytest.mark.slow
def test_a_run_measures_first_cells_and_reports_before_its_deadline(
    grid: Path, nightgrid: Nightgrid
) -> None:
    began, budget_s = time.time(), round(patience(60))
    budget = ("--budget", f"{budget_s}s", "--results", grid.parent, "--quiet")
    printed = nightgrid("run", grid, "--in-process", *budget, code=None)
    assert "work ends at" in printed.out
    assert (grid.parent / "short" / "report.html").stat().st_mtime < began + budget_s
    rows = Store.existing(grid.parent, "short").measurements()
    assert sorted((row.precision, row.batch_size) for row in rows if row.final) == [
        (precision, size) for precision in ("bf16", "fp32") for size in (1, 2, 4)
    ]
    unmeasured = [row for row in rows if row.state is not State.SUCCEEDED]
    assert all("deadline" in row.reason for row in unmeasured)
    assert printed.code == (10 if unmeasured else 0)
    ran = sorted((row for row in rows if row.started_at), key=lambda row: row.started_at or 0)
    assert {row.batch_size for row in ran[:2]} <= {2}


@pytest.mark.slow
@pytest.mark.parametrize("cluster_lost", [False, True], ids=["it hangs", "its cluster is lost"])
def test_a_driver_that_cannot_report_has_another_process_do_it(
    cluster_lost: bool, grid: Path, nightgrid: Nightgrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = grid.parent / "short" / "report.html"

    def run_grid(*_: object) -> None:
        with Store(grid.parent, "short") as store:
            store.append(row())
        assert not page.exists()
        if not cluster_lost:
            deadline = time.monotonic() + patience(100)
            while not page.exists():
                assert time.monotonic() < deadline
                time.sleep(0.1)
        raise ClusterError("the executor keeps failing")

    monkeypatch.setattr("orchestrator.driver.run.run_grid", run_grid)
    monkeypatch.setattr("orchestrator.cli.run.LAST_S", 1000.0)
    budget = () if cluster_lost else ("--budget", "1001s")
    nightgrid("run", grid, "--results", grid.parent, *budget, code=3)
    assert page.exists()
