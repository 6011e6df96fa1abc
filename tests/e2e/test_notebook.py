"""Nightgrid from Python: the objects of the commands, in a process that is somebody else's."""

from __future__ import annotations

import inspect
import logging
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
from command_line import Nightgrid, parsers
from core_cases import a_job
from example_grids import NOTEBOOK_GRID
from measurement_factory import Night

import nightgrid
import orchestrator
from nightgrid import Grid, Run, load, run
from orchestrator.core.errors import GridError, NightgridError, StoreError
from orchestrator.core.job import State
from orchestrator.core.plan import Action
from orchestrator.driver.options import RunOptions
from orchestrator.store.store import Store

VALUES = {
    "name": "tiny-run",
    "defaults": {"workload": "tiny", "model": "tiny-chatglm3", "precision": "fp32"},
    "measure": {"warmup": 0, "min_repeats": 2, "max_repeats": 2, "time_limit_s": 5}
    | {"repeat_flagged": 0},
    "experiments": [{"name": "sizes", "axes": {"batch_size": "1..2"}}],
}


pytestmark = pytest.mark.usefixtures("workplace")


@pytest.fixture
def night() -> Run:
    return run(Grid.from_dict(VALUES), in_process=True, quiet=True)


def test_importing_loads_nothing_heavy_and_what_is_offered_is_there() -> None:
    code = (
        "import sys, nightgrid\n"
        "assert not any(name.startswith('orchestrator.') for name in sys.modules)\n"
        "from nightgrid import Grid, Run, load, run\n"
        "heavy = {'torch', 'ray', 'transformers', 'pyarrow', 'pandas'} & set(sys.modules)\n"
        "sys.exit(','.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for package in (nightgrid, orchestrator):
        assert set(package.__all__) <= set(dir(package))
        assert all(getattr(package, name).__doc__ for name in package.__all__)
        with pytest.raises(AttributeError, match="nothing_of_that_name"):
            package.nothing_of_that_name  # noqa: B018 the access is what is tested
    assert set(nightgrid.__all__) == set(orchestrator.__all__)


def test_run_offers_what_the_command_offers() -> None:
    arguments = set(inspect.signature(run).parameters) - {"grid"}
    only_the_command = {"supervisor", "budget", "results_named"}
    assert arguments | only_the_command == {field.name for field in fields(RunOptions)}
    of_terminals = {"help", "json", "keep_imports", "no_restart", "notify", "verbose"}
    options = {action.dest for action in parsers()["run"]._actions} - of_terminals - {"grid"}
    renamed = {"run_name": "name", "deadline": "ends_at"}
    here = {renamed.get(option, option) for option in options} | {"results_address"}
    assert arguments == here


def test_a_grid_is_the_same_from_file_text_and_dict(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(NOTEBOOK_GRID)
    ids = [
        [job.job_id for job in grid.jobs()]
        for grid in (Grid.from_file(file), Grid.from_text(NOTEBOOK_GRID), Grid.from_dict(VALUES))
    ]
    assert ids[0] == ids[1] == ids[2] and len(ids[0]) == 2


def test_problems_of_a_dict_have_paths_and_no_lines() -> None:
    with pytest.raises(GridError) as caught:
        Grid.from_dict(VALUES | {"experiments": [{"name": "e", "precison": "fp32", "cards": 0}]})
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["experiments[0].precison", "experiments[0].cards"]
    assert "grid: experiments[0].precison: unknown key" in str(caught.value)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"name": "e", "batch_size": "1e1"}, r'"1e1"'),  # text of a dict stays text
        *((odd, "cannot be written as a file") for odd in ({1, 2}, float("nan"), object())),
    ],
)
def test_a_dict_that_no_file_could_hold_is_refused(odd: object, message: str) -> None:
    with pytest.raises(GridError, match=message):
        Grid.from_dict(VALUES | {"experiments": [odd]})


def test_plan_is_the_plan_of_the_command(tmp_path: Path, nightgrid: Nightgrid) -> None:
    grid = Grid.from_text(NOTEBOOK_GRID)
    (tmp_path / "grid.yaml").write_text(NOTEBOOK_GRID)
    printed = nightgrid("plan", "grid.yaml", "--emulate", "1x2", "--json").json["jobs"]
    planned = grid.plan(emulate="1x2").jobs
    assert [job["job_id"] for job in printed] == [item.job.job_id for item in planned]
    assert [job["estimate_s"] for job in printed] == [item.estimate_s for item in planned]
    assert not (tmp_path / "results").exists()


def test_a_run_has_its_rows_and_a_second_one_measures_nothing(
    night: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert capsys.readouterr().out == ""  # it is quiet
    assert night.ok and dict(night.states) == {State.SUCCEEDED: 2}
    assert sorted(row.batch_size or 0 for row in night.rows) == [1, 2]
    assert night.plan is not None
    assert all(item.action is Action.RUN for item in night.plan.jobs)
    assert night.path == Path("results/tiny-run").resolve()
    assert Store.existing(Path("results"), "tiny-run").measurements() == list(night.attempts)
    again = run(Grid.from_text(NOTEBOOK_GRID), in_process=True)
    assert again.rows == night.rows
    assert "0 run, 2 reuse" in capsys.readouterr().out


def test_a_failed_job_is_a_row_and_no_exception() -> None:
    broken = VALUES | {"experiments": [{"name": "e", "trouble": "missing"}]}
    failed = run(Grid.from_dict(broken), in_process=True, quiet=True)
    assert not failed.ok and dict(failed.states) == {State.FAILED: 1} and failed.best is None
    assert "no dataset 'nix'" in failed.rows[0].reason


def test_frames_have_a_line_a_job(night: Run, nightgrid: Nightgrid) -> None:
    throughput = [row.metrics.throughput for row in night.rows]
    frame = night.to_pandas()
    assert list(frame["throughput"]) == pytest.approx(throughput)
    assert list(frame["state"]) == ["SUCCEEDED", "SUCCEEDED"]
    assert night.to_polars()["throughput"].to_list() == pytest.approx(throughput)
    assert set(night.to_polars().columns) == set(frame.columns)
    seconds = [row.started_at for row in night.rows]
    for started in (frame["started_at"], night.to_polars()["started_at"]):
        assert [moment.timestamp() for moment in started] == pytest.approx(seconds, abs=1e-5)
    table = night.table()
    assert table["throughput"].to_pylist() == throughput and "samples" in table.column_names
    nightgrid("report", "tiny-run", "--format", "csv", "--output", "rows.csv")
    assert Path("rows.csv").read_text().splitlines()[0].split(",") == list(frame.columns)


def test_all_attempts_can_be_had(night: Run) -> None:
    anew = run(Grid.from_text(NOTEBOOK_GRID), in_process=True, quiet=True, force=True)
    assert len(anew.rows) == 2 and len(anew.attempts) == anew.table(every=True).num_rows == 4
    assert len(anew.to_pandas(every=True)) == len(anew.records(every=True)) == 4


def test_to_dict_is_what_report_json_prints(night: Run, nightgrid: Nightgrid) -> None:
    assert nightgrid("report", "tiny-run", "--json").json == night.to_dict()


def test_load_takes_a_name_a_path_or_nothing(night: Run, tmp_path: Path) -> None:
    for loaded in (load("tiny-run"), load(night.path), load(), load(results=tmp_path / "results")):
        assert loaded.rows == night.rows and loaded.plan is None
    with pytest.raises(StoreError, match=r"no run 'tiny'.*\n    tiny-run"):
        load("tiny")
    with pytest.raises(StoreError, match=r"no directory .*nowhere.*nightgrid run GRID"):
        load(results="nowhere")


def test_report_compare_and_query(night: Run) -> None:
    page = night.report()
    assert page == night.path / "report.html" and "tiny-run" in page.read_text()
    comparison = night.compare("tiny-run", allow=["flags"])  # made up, so faster than can be
    assert len(comparison.changes) == 2
    assert not any(change.significant for change in comparison.changes)
    assert night.query("select count(*) from jobs").rows == ((2,),)
    answer = night.query("select batch_size, started_at from jobs order by batch_size")
    assert answer.to_pandas()["batch_size"].tolist() == [1, 2]
    assert answer.to_pandas()["started_at"].dtype.kind == "M"
    assert answer.to_arrow().column_names == ["batch_size", "started_at"]
    assert night.query("select batch_size from jobs where false").to_pandas().empty


def test_the_best_is_the_winner_with_its_verdict() -> None:
    rows = Night(run="ranked")
    for size in (1, 8):
        rows.add(a_job(batch_size=size))
    with Store(Path("results"), "ranked") as store:
        store.append(*rows.rows)
    ranked = load("ranked")
    best, (ranking,) = ranked.best, ranked.summary.rankings
    assert best is not None and best.row is ranking.fastest
    assert best.verdict == ranking.verdict.value
    assert best.label == ranked.summary.chosen(best.row) and best.reason


def test_notebooks_show_what_the_commands_print(night: Run) -> None:
    shown = night._repr_html_()
    assert night.summary.verdict in shown and "Emulated cards" in shown
    hostile = VALUES | {"name": "g", "experiments": [{"name": "<img src=x>", "precision": "fp8"}]}
    shown = Grid.from_dict(hostile).plan(emulate="1x1")._repr_html_()
    assert "<img" not in shown and "&lt;img src=x&gt;" in shown and "unsupported" in shown


def test_representations_are_one_line(night: Run) -> None:
    """A grid of a million jobs must not print a million jobs."""
    grid = Grid.from_text(NOTEBOOK_GRID)
    assert repr(grid) == "<Grid 'tiny-run': 2 jobs on HPU>"
    assert repr(grid.plan(emulate="1x1")).startswith("<Plan of 'tiny-run': 0 run, 2 reuse")
    assert repr(night).startswith("<Run 'tiny-run' at ") and "\n" not in repr(night)


def test_the_process_is_left_as_it_was_and_any_thread_may_run() -> None:
    """Outside the main thread no signal handler can be set, and none is tried."""

    def state() -> tuple[object, ...]:
        root = logging.getLogger()
        handlers = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
        return (*handlers, root.level, *root.handlers)

    before = state()
    assert run(Grid.from_dict(VALUES), in_process=True, quiet=True).ok
    assert state() == before
    with ThreadPoolExecutor() as threads:
        again = threads.submit(run, Grid.from_dict(VALUES), in_process=True, force=True, quiet=True)
        assert again.result().ok


def test_errors_are_those_of_the_command() -> None:
    no_card = r"no cluster to run on: this machine has no HPU card .*give --emulate 2x8"
    with pytest.raises(NightgridError, match=no_card):
        run(Grid.from_dict(VALUES))
    with pytest.raises(NightgridError, match="--emulate cannot be combined"):
        run(Grid.from_dict(VALUES), emulate="1x1", in_process=True)
