"""`nightgrid run` from the command line to rows and page, in this process, with a real workload."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_workload
from command_line import Nightgrid
from example_grids import GRID

from orchestrator.analysis.flags import Raised, every_flag
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.status import RunStatus
from orchestrator.driver import standing
from orchestrator.store.disk import digest
from orchestrator.store.store import Store

pytestmark = pytest.mark.usefixtures("workplace")

#: Run a grid, and return what is printed.
Run = Callable[..., str]


@pytest.fixture
def run(nightgrid: Nightgrid) -> Run:
    def run(grid: str, *options: str, where: str = "--in-process", code: int = 0) -> str:
        Path("grid.yaml").write_text(grid)
        return nightgrid("run", "grid.yaml", *where.split(), *options, code=code).all

    return run


def rows(run: str = "tiny-run", results: str = "results") -> list[Measurement]:
    return Store.existing(Path(results), run).measurements()


def test_a_run_whose_page_finds_no_place_ends_with_its_answer(run: Run) -> None:
    Path("results/tiny-run/report.html").mkdir(parents=True)  # what no page can replace
    printed = run(GRID)
    assert "the page was not written: cannot write" in printed
    assert "`nightgrid report tiny-run` writes it later" in printed


def test_a_grid_becomes_rows_a_table_and_a_page(run: Run) -> None:
    printed = run(GRID)
    done = rows()
    assert sorted(row.batch_size or 0 for row in done) == [1, 2]
    assert all(row.state is State.SUCCEEDED and row.emulated for row in done)
    assert all((row.metrics.generated_tokens_per_s or 0) > 0 for row in done)
    assert {row.jobs_before for row in done} == {0, 1}  # one warm worker
    directory = Path("results/tiny-run").resolve()
    assert f"rows: {directory / 'rows'}" in printed
    assert f"page: {directory / 'report.html'}" in printed
    assert "tiny-run" in (directory / "report.html").read_text()
    assert (directory / "grid.yaml").read_text() == GRID
    status = RunStatus.from_json((directory / "status.json").read_text())
    assert status.finished and status.done == status.total == 2
    assert json.loads((directory / "status.json").read_text())["counts"] == {"SUCCEEDED": 2}


def test_a_grid_names_its_results_and_the_command_line_wins(run: Run, nightgrid: Nightgrid) -> None:
    run(f"results: shared/nights\n{GRID}")
    assert len(rows(results="shared/nights")) == 2 and not Path("results").exists()
    plan = ("plan", "grid.yaml", "--emulate", "1x1")
    assert "0 run, 2 reuse" in nightgrid(*plan).out
    assert "2 run, 0 reuse" in nightgrid(*plan, "--results", "elsewhere").out
    Path("shared").rename("moved")
    resumed = nightgrid("run", "--resume", "--results", "moved/nights", "--in-process")
    assert "0 run, 2 reuse" in resumed.out and not Path("shared").exists()


def test_flagged_rows_are_measured_again_where_nothing_else_is_to_run(
    run: Run, monkeypatch
) -> None:
    """They came to nothing: no card had joined when the schedule looked for one."""
    run(GRID)
    [flag] = (flag for flag in every_flag() if flag.name == "disturbed")
    disturbed = Raised(flag=flag, reason="as if")
    monkeypatch.setattr(standing, "raised_on", lambda rows: [(disturbed,) for _ in rows])
    run(GRID, "--retry-flagged")
    assert sorted(row.batch_size or 0 for row in rows()) == [1, 1, 2, 2]


def test_only_what_is_new_is_measured_and_the_change_is_named(run: Run) -> None:
    run(GRID)
    before, page = rows(), Path("results/tiny-run/report.html")
    foreign = Path("results/tiny-run/rows", f"x-1-{digest(b'PAR1')}.parquet")
    foreign.write_bytes(b"PAR1")
    page.unlink()
    again = run(GRID)
    assert rows() == before and foreign.name in again and page.exists()
    assert "0 run, 2 reuse" in again and "starting" not in again and "grid changed" not in again
    changed = run(GRID.replace("[1, 2]", "[2, 4]"))
    assert "1 run, 1 reuse" in changed
    assert "grid changed since this run began: 1 job as before, 1 new, 1 gone" in changed
    assert "new: 1 job of sizes" in changed and "gone: 1 job of sizes" in changed
    assert sorted(row.batch_size or 0 for row in rows()) == [1, 2, 4]
    larger = run(GRID.replace("[1, 2]", "[1, 2, 4, 8]"))
    assert "1 run, 3 reuse" in larger and len(rows()) == 4


def test_an_altogether_other_grid_is_refused_the_run_of_another(run: Run) -> None:
    run(GRID)
    other = GRID.replace("name: tiny-run", "name: other")
    printed = run(other.replace("[1, 2]", "[4, 8]"), "--run", "tiny-run", code=2)
    assert "run 'tiny-run' was made by another grid, 'tiny-run', and has none of the" in printed
    assert "--run with another name" in printed
    assert len(rows()) == 2 and Path("results/tiny-run/grid.yaml").read_text() == GRID
    run(other.replace("[1, 2]", "[2, 4]"), "--run", "tiny-run")  # it shares a job
    assert len(rows()) == 3
    Path("results/tiny-run/grid.yaml").write_bytes(b"\xff: [")  # which cannot be compared
    assert "0 run, 2 reuse" in run(other, "--run", "tiny-run")


def test_a_run_belongs_to_its_submitter(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def came_from(submitter: str) -> None:
        monkeypatch.setenv("NIGHTGRID_SUBMITTER", submitter)

    came_from("anna@laptop")
    run(GRID)
    before, kept = rows(), Path("results/tiny-run/grid.yaml")
    other = GRID.replace("[1, 2]", "[4]")
    for grid in (GRID, other):
        came_from("ben@desk")
        refused = run(grid, code=2)
        assert "run 'tiny-run' belongs to anna@laptop and its grid 'tiny-run'" in refused
        assert "is sent by ben@desk" in refused and "--run tiny-run-ben" in refused
    came_from("anna@desk")  # who may be the same person, if it is the same grid
    assert "belongs to anna@laptop" in run(other, code=2)
    assert rows() == before and kept.read_text() == GRID
    assert "0 run, 2 reuse" in run(GRID)
    came_from("ben@desk")
    assert "1 run" in run(other, "--resume") and kept.read_text() == other


def test_a_changed_grid_is_noticed_wherever_its_files_are(run: Run) -> None:
    """The working directory of a Ray job has the files of the grid that is sent, no others."""
    text = '{"content": "A", "summary": "B"}\n' * 4
    for name in ("first", "second"):
        Path(f"{name}.jsonl").write_text(text)
    grid = GRID.replace("advertisegen-synthetic", "first.jsonl")
    run(grid)
    Path("first.jsonl").unlink()
    changed = run(grid.replace("first", "second"))
    assert "grid changed since this run began: 0 jobs as before, 2 new, 2 gone" in changed


def test_force_measures_all_anew_with_new_numbers_and_quiet_says_less(run: Run) -> None:
    assert "on hpu-1/HPU0: " in run(GRID)
    quiet = run(GRID, "--quiet", "--force")
    assert "on hpu-1/HPU0: " not in quiet and "page: " in quiet
    attempts = sorted((row.batch_size, row.attempt_number) for row in rows())
    assert attempts == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert len({row.attempt_id for row in rows()}) == 4


def test_failures_give_exit_code_10_and_are_retried_only_when_asked(run: Run) -> None:
    broken = GRID.replace("batch_size: [1, 2]", 'trouble: ["", missing]\n      batch_size: [1]')
    assert "no dataset 'nix'" in run(broken, code=10)
    first = len(rows())
    assert "0 run, 1 reuse, 1 skip" in run(broken, code=10)
    assert len(rows()) == first
    assert "1 run, 1 reuse" in run(broken, "--retry-failed", code=10)
    failed = [row for row in rows() if row.state is State.FAILED]
    assert len(rows()) > first
    assert len({row.attempt_id for row in failed}) == len(failed)


def test_what_cannot_be_had_is_an_answer(run: Run) -> None:
    axes = 'trouble: ["", python-oom]\n      precision: [fp32, fp8]\n      batch_size: [1]'
    run(GRID.replace("batch_size: [1, 2]", axes))
    states = {State.SUCCEEDED, State.OUT_OF_MEMORY, State.UNSUPPORTED}
    assert {row.state for row in rows() if row.final} == states


def test_nothing_measured_is_no_success(run: Run) -> None:
    """A grid of which nothing exists here, say for want of a package, looks like one that is done
    to a script that knows only exit code 0."""
    nothing = GRID.replace("precision: fp32", "precision: fp8")
    for _ in ("first", "again"):
        run(nothing, code=10)
    assert {row.state for row in rows()} == {State.UNSUPPORTED}


@pytest.mark.parametrize(
    ("grid", "where", "code", "message"),
    [
        (GRID.replace("fp32", "fp31"), "--in-process", 2, "fp31"),
        (GRID + "    cards: 3\n", "--in-process", 2, "3 HPU cards: there are 1"),
        (GRID, "--emulate nonsense", 2, "nonsense"),
        (GRID, "--emulate 1x1 --in-process", 2, "--emulate cannot be combined"),
        (GRID, "--address 127.0.0.1:1", 3, "no Ray cluster answers"),
    ],
)
def test_what_is_refused_creates_nothing(
    run: Run, grid: str, where: str, code: int, message: str
) -> None:
    assert message in run(grid, where=where, code=code)
    assert [path.name for path in Path().iterdir()] == ["grid.yaml"]


def test_a_run_that_another_driver_holds_is_refused(run: Run) -> None:
    with Store(Path("results"), "tiny-run"):
        assert str(os.getpid()) in run(GRID, code=4)


def test_a_stopped_run_is_taken_up_where_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tiny_workload.run

    def interrupting(*arguments: object) -> object:
        monkeypatch.setattr(tiny_workload, "run", original)
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tiny_workload, "run", interrupting)
    grid = GRID.replace("[1, 2]", "[1, 2, 4, 8]")
    assert "stopping: SIGTERM received" in run(grid, code=10)
    states = [row.state for row in rows()]
    assert State.NOT_STARTED in states and State.SUCCEEDED in states
    run(grid)
    newest = {row.job_id: row.state for row in rows() if row.final}
    assert len(newest) == 4 and set(newest.values()) == {State.SUCCEEDED}
