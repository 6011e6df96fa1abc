"""``--deadline`` and ``--budget`` on the command line, and a run that keeps one."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from datetime import datetime
from pathlib import Path

import pytest
from measurements import row
from patience import patience

from orchestrator.cli.main import main
from orchestrator.cli.remote import deadline_words
from orchestrator.core.deadline import parse_deadline
from orchestrator.core.errors import ClusterError
from orchestrator.core.job import State
from orchestrator.store.store import Store

GRIDS = Path(__file__).parents[2] / "grids"


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
    command: str, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([command, str(GRIDS / "smoke.yaml"), *arguments])
    assert refused.value.code == 2
    assert why in capsys.readouterr().err


def test_the_plan_says_what_should_be_measured_by_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", str(GRIDS / "smoke.yaml"), "--emulate", "1x1", "--results", str(tmp_path)]
    assert main([*plan, "--budget", "9h"]) == 0
    assert "all 20 jobs should be done by then" in capsys.readouterr().out
    assert main([*plan, "--budget", "90s"]) == 0
    assert "of 20 jobs should be measured by then, with" in capsys.readouterr().out
    assert main([*plan, "--budget", "90s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["forecast"]
    assert 0 < found["reached"] <= found["measured"] < found["jobs"] == 20
    assert found["configurations"] == 4 and found["ends_after_s"] <= found["seconds"]


def test_the_simulation_keeps_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--emulate", "1x1", "--results", str(tmp_path), "--budget", "2m", "--json"]
    assert main(["simulate", str(GRIDS / "smoke.yaml"), *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["makespan_s"] <= 120


def test_a_cluster_is_sent_the_moment_and_not_the_time_of_day() -> None:
    moment = parse_deadline("08:00", datetime.now().astimezone())
    option, text = deadline_words(Namespace(deadline=moment, budget=None))
    assert option == "--deadline"
    assert parse_deadline(text, datetime.now().astimezone()) == moment
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
    measure: {warmup: 1, min_repeats: 1, max_repeats: 2, time_limit_s: 1}
    axes: {precision: [fp32, bf16], batch_size: [1, 2, 4]}
"""


@pytest.mark.slow
def test_a_run_measures_first_cells_and_reports_before_its_deadline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "short.yaml"
    grid.write_text(GRID)
    began, budget_s = time.time(), round(patience(60))
    budget = ["--budget", f"{budget_s}s"]
    arguments = ["--in-process", "--results", str(tmp_path), "--quiet", *budget]
    code = main(["run", str(grid), *arguments])
    assert "work ends at" in capsys.readouterr().out
    assert (tmp_path / "short" / "report.html").stat().st_mtime < began + budget_s
    rows = Store.existing(tmp_path, "short").measurements()
    assert sorted((row.precision, row.batch_size) for row in rows if row.final) == [
        (precision, size) for precision in ("bf16", "fp32") for size in (1, 2, 4)
    ]
    unmeasured = [row for row in rows if row.state is not State.SUCCEEDED]
    assert all("deadline" in row.reason for row in unmeasured)
    assert code == (10 if unmeasured else 0)
    ran = sorted((row for row in rows if row.started_at), key=lambda row: row.started_at or 0)
    assert {row.batch_size for row in ran[:2]} <= {2}


def filled(results: Path) -> None:
    """A run that has just written a row."""
    with Store.open(results, "short") as store:
        store.append(row())


@pytest.mark.slow
@pytest.mark.parametrize("cluster_lost", [False, True], ids=["it hangs", "its cluster is lost"])
def test_a_driver_that_cannot_report_has_another_process_do_it(
    cluster_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = tmp_path / "short.yaml"
    grid.write_text(GRID)
    page = tmp_path / "short" / "report.html"

    def run_grid(*_: object) -> None:
        filled(tmp_path)
        assert not page.exists()
        if not cluster_lost:
            deadline = time.monotonic() + patience(100)
            while not page.exists():
                assert time.monotonic() < deadline
                time.sleep(0.1)
        raise ClusterError("the executor keeps failing")

    monkeypatch.setattr("orchestrator.driver.run.run_grid", run_grid)
    monkeypatch.setattr("orchestrator.cli.run.LAST_S", 1000.0)
    arguments = ["--results", str(tmp_path), *([] if cluster_lost else ["--budget", "1001s"])]
    assert main(["run", str(grid), *arguments]) == 3
    assert page.exists()
