"""`nightgrid run` from the command line to rows and page, in this process, with a real workload."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_workload
from example_grids import GRID

from orchestrator.cli.main import main
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.status import RunStatus
from orchestrator.store.store import Store


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tiny workload is known, and the working directory is a fresh one."""
    tiny_workload.register(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("NIGHTGRID_RESULTS", raising=False)


@pytest.fixture
def nightgrid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a grid in this process; the exit code and what was printed."""

    def run(grid: str, *options: str, where: str = "--in-process") -> tuple[int, str]:
        path = tmp_path / "grid.yaml"
        path.write_text(grid)
        code = main(["run", str(path), *where.split(), *options])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_a_run_whose_page_finds_no_place_ends_with_its_answer(
    nightgrid: Callable[..., tuple[int, str]],
) -> None:
    Path("results/tiny-run/report.html").mkdir(parents=True)  # what no page can replace
    code, output = nightgrid(GRID)
    assert code == 0
    assert "the page was not written: cannot write" in output
    assert "`nightgrid report tiny-run` writes it later" in output


def rows(run: str = "tiny-run", results: str = "results") -> list[Measurement]:
    """The rows of a run in the order of recording."""
    return Store.existing(Path(results), run).measurements()


def test_a_grid_becomes_rows_a_table_and_a_page(nightgrid: Callable[..., tuple[int, str]]) -> None:
    code, output = nightgrid(GRID)
    assert code == 0
    done = rows()
    assert sorted(row.batch_size or 0 for row in done) == [1, 2]
    assert all(row.state is State.SUCCEEDED and row.emulated for row in done)
    assert all((row.metrics.generated_tokens_per_s or 0) > 0 for row in done)
    assert {row.jobs_before for row in done} == {0, 1}  # one warm worker
    run = Path("results/tiny-run").resolve()
    assert f"rows: {run / 'rows'}" in output
    assert f"page: {run / 'report.html'}" in output
    assert "tiny-run" in (run / "report.html").read_text()
    assert (run / "grid.yaml").read_text() == GRID
    status = RunStatus.from_json((run / "status.json").read_text())
    assert status.finished and status.done == status.total == 2
    assert json.loads((run / "status.json").read_text())["counts"] == {"SUCCEEDED": 2}


def test_a_grid_names_its_results_and_the_command_line_wins(
    nightgrid: Callable[..., tuple[int, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = f"results: shared/nights\n{GRID}"
    code, _ = nightgrid(grid)
    assert code == 0 and len(rows(results="shared/nights")) == 2 and not Path("results").exists()
    plan = ["plan", str(tmp_path / "grid.yaml"), "--emulate", "1x1"]
    assert main(plan) == 0 and "0 run, 2 reuse" in capsys.readouterr().out
    assert main([*plan, "--results", "elsewhere"]) == 0
    assert "2 run, 0 reuse" in capsys.readouterr().out
    Path("shared").rename("moved")
    assert main(["run", "--resume", "--results", "moved/nights", "--in-process"]) == 0
    assert "0 run, 2 reuse" in capsys.readouterr().out and not Path("shared").exists()


def test_the_second_run_measures_nothing(nightgrid: Callable[..., tuple[int, str]]) -> None:
    nightgrid(GRID)
    before = rows()
    code, output = nightgrid(GRID)
    assert code == 0
    assert rows() == before
    assert "0 run, 2 reuse" in output and "starting" not in output


def test_a_changed_grid_says_what_is_new_and_gone(
    nightgrid: Callable[..., tuple[int, str]],
) -> None:
    nightgrid(GRID)
    assert "grid changed" not in nightgrid(GRID)[1]
    code, output = nightgrid(GRID.replace("[1, 2]", "[2, 4]"))
    assert code == 0 and "1 run, 1 reuse" in output
    assert "grid changed since this run began: 1 job as before, 1 new, 1 gone" in output
    assert "new: 1 job of sizes" in output and "gone: 1 job of sizes" in output
    assert [row.batch_size for row in rows()] == [1, 2, 4]


@pytest.mark.parametrize("changed", ["[4, 8]", "[2, 4]"])
def test_an_altogether_other_grid_is_refused_the_run_of_another(
    nightgrid: Callable[..., tuple[int, str]], changed: str
) -> None:
    nightgrid(GRID)
    other = GRID.replace("name: tiny-run", "name: other").replace("[1, 2]", changed)
    code, output = nightgrid(other, "--run", "tiny-run")
    if changed == "[2, 4]":
        assert code == 0 and len(rows()) == 3
        return
    assert code == 2 and len(rows()) == 2
    assert "run 'tiny-run' was made by another grid, 'tiny-run', and has none of the" in output
    assert "--run with another name" in output
    assert Path("results/tiny-run/grid.yaml").read_text() == GRID


def test_a_run_whose_kept_grid_cannot_be_read_goes_on(
    nightgrid: Callable[..., tuple[int, str]],
) -> None:
    nightgrid(GRID)
    Path("results/tiny-run/grid.yaml").write_bytes(b"\xff: [")
    code, output = nightgrid(GRID.replace("name: tiny-run", "name: other"), "--run", "tiny-run")
    assert code == 0 and "0 run, 2 reuse" in output


def test_a_larger_grid_measures_only_what_is_new(nightgrid: Callable[..., tuple[int, str]]) -> None:
    nightgrid(GRID)
    code, output = nightgrid(GRID.replace("[1, 2]", "[1, 2, 4]"))
    assert code == 0 and "1 run, 2 reuse" in output
    assert [row.batch_size for row in rows()][-1] == 4 and len(rows()) == 3


def test_force_measures_all_anew(nightgrid: Callable[..., tuple[int, str]]) -> None:
    nightgrid(GRID)
    code, _ = nightgrid(GRID, "--force")
    assert code == 0
    assert sorted((row.batch_size, row.attempt_number) for row in rows()) == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
    assert len({row.attempt_id for row in rows()}) == 4


def test_failures_give_exit_code_10_and_are_retried_only_when_asked(
    nightgrid: Callable[..., tuple[int, str]],
) -> None:
    broken = GRID.replace("batch_size: [1, 2]", 'trouble: ["", missing]\n      batch_size: [1]')
    code, output = nightgrid(broken)
    assert code == 10
    assert "no dataset 'nix'" in output
    first = len(rows())
    code, output = nightgrid(broken)
    assert code == 10 and "0 run, 1 reuse, 1 skip" in output
    assert len(rows()) == first
    code, output = nightgrid(broken, "--retry-failed")
    assert code == 10 and "1 run, 1 reuse" in output
    failed = [row for row in rows() if row.state is State.FAILED]
    assert len(rows()) > first
    assert len({row.attempt_id for row in failed}) == len(failed)


@pytest.mark.parametrize(
    ("axis", "state"),
    [
        ('trouble: ["", python-oom]', State.OUT_OF_MEMORY),
        ("precision: [fp32, fp8]", State.UNSUPPORTED),
    ],
)
def test_what_cannot_be_had_is_an_answer(
    nightgrid: Callable[..., tuple[int, str]], axis: str, state: State
) -> None:
    code, _ = nightgrid(GRID.replace("batch_size: [1, 2]", f"{axis}\n      batch_size: [1]"))
    assert code == 0
    assert {row.state for row in rows() if row.final} == {State.SUCCEEDED, state}


@pytest.mark.parametrize(
    ("grid", "options", "where", "code", "message"),
    [
        (GRID.replace("fp32", "fp31"), [], "--in-process", 2, "fp31"),
        (GRID + "    cards: 3\n", [], "--in-process", 2, "3 HPU cards: there are 1"),
        (GRID, [], "--emulate nonsense", 2, "nonsense"),
        (GRID, ["--in-process"], "--emulate 1x1", 2, "--emulate cannot be combined"),
        (GRID, [], "--address 127.0.0.1:1", 3, "no Ray cluster answers"),
        (GRID, ["--run", "../elsewhere"], "--in-process", 4, "elsewhere"),
    ],
)
def test_what_is_refused_creates_nothing(
    nightgrid: Callable[..., tuple[int, str]],
    tmp_path: Path,
    grid: str,
    options: list[str],
    where: str,
    code: int,
    message: str,
) -> None:
    got, output = nightgrid(grid, *options, where=where)
    assert got == code
    assert message in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.yaml"]


def test_no_cluster_is_said_with_the_ways_to_have_one(
    nightgrid: Callable[..., tuple[int, str]],
) -> None:
    code, output = nightgrid(GRID, where="")
    assert code == 3
    assert "--emulate 2x8" in output


def test_a_run_that_another_driver_holds_is_refused(
    nightgrid: Callable[..., tuple[int, str]],
) -> None:
    with Store.open(Path("results"), "tiny-run"):
        code, output = nightgrid(GRID)
    assert code == 4
    assert str(os.getpid()) in output


def test_results_and_run_can_be_named(nightgrid: Callable[..., tuple[int, str]]) -> None:
    code, _ = nightgrid(GRID, "--results", "kept", "--run", "night-1")
    assert code == 0
    assert len(rows("night-1", "kept")) == 2 and not Path("results").exists()


def test_quiet_leaves_only_plan_and_report(nightgrid: Callable[..., tuple[int, str]]) -> None:
    _, loud = nightgrid(GRID)
    _, quiet = nightgrid(GRID, "--quiet", "--force")
    assert "on hpu-1/HPU0: " in loud
    assert "on hpu-1/HPU0: " not in quiet and "page: " in quiet


def test_a_stopped_run_is_taken_up_where_it_was(
    nightgrid: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tiny_workload.run

    def interrupting(*arguments: object) -> object:
        monkeypatch.setattr(tiny_workload, "run", original)
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tiny_workload, "run", interrupting)
    grid = GRID.replace("[1, 2]", "[1, 2, 4, 8]")
    code, output = nightgrid(grid)
    assert code == 10
    assert "stopping: SIGTERM received" in output
    states = [row.state for row in rows()]
    assert State.NOT_STARTED in states and State.SUCCEEDED in states
    code, _ = nightgrid(grid)
    assert code == 0
    newest = {row.job_id: row.state for row in rows() if row.final}
    assert len(newest) == 4 and set(newest.values()) == {State.SUCCEEDED}


@pytest.mark.slow
def test_text_generation_of_the_embedded_model(nightgrid: Callable[..., tuple[int, str]]) -> None:
    grid = """\
name: generation
defaults:
  model: tiny-chatglm3
  dataset: advertisegen-synthetic
  accelerator: HPU
  output_tokens: 4
  prompts: 4
measure: {warmup: 1, min_repeats: 2, max_repeats: 2, time_limit_s: 5}
experiments:
  - name: precision
    workload: text-generation
    axes:
      precision: [fp32, bf16]
      batch_size: [1, 4]
"""
    code, output = nightgrid(grid)
    assert code == 0
    measured = rows("generation")
    assert len(measured) == 4
    for row in measured:
        assert row.random_weights and row.synthetic_data and row.emulated
        assert row.metrics.repeats == 2 and row.metrics.ttft_s and row.items
    assert "tokens/s" in output and "Random weights" in output
