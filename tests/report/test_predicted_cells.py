"""Predicted cells on disk, in tables and on the page, and the command that makes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from command_line import Nightgrid
from measurement_factory import Night, printed

from orchestrator.core.job import Job, State
from orchestrator.core.measurement import Prediction
from orchestrator.grid.parser import parse_grid
from orchestrator.report.run_report import page_text, read_summary
from orchestrator.store import files as run_files
from orchestrator.store.history import read_predictions, table_of
from orchestrator.store.store import Store
from workloads.base import NOT_FINITE

GRID = """\
name: searched
defaults: {workload: text-generation, model: tiny-chatglm3, accelerator: HPU, output_tokens: 8}
experiments:
  - name: settings
    axes: {precision: [fp32, bf16], batch_size: [1, 2, 4, 8, 16, 32]}
"""
EVERY = 2  # of so many cells one is measured


def jobs() -> list[Job]:
    return list(parse_grid(GRID.encode(), "searched.yaml").jobs())


def write_run(results: Path, run: str = "searched", first: int = 0) -> Store:
    night = Night(run=run)
    for at, job in enumerate(jobs()):
        night.add(job, State.NOT_STARTED if (at + first) % EVERY else State.SUCCEEDED)
    store = Store(results, run)
    with store:
        store.append(*night.rows)
    return store


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "searched.yaml").write_text(GRID)
    write_run(tmp_path / "results")
    return tmp_path / "results"


def of_throughput(run: Path) -> dict[str, Prediction]:
    return {one.job_id: one for one in read_predictions(run) if one.figure == "throughput"}


def predict(nightgrid: Nightgrid, results: Path, *options: str) -> dict[str, Prediction]:
    grid = results.parent / "searched.yaml"
    words = ("predict", grid, "--emulate", "1x2", "--results", results, *options, "--json")
    printed, table = nightgrid(*words).json, of_throughput(results / "searched")
    assert {one["job_id"] for one in printed["predictions"]} == table.keys()
    return table


def test_the_command_fills_the_table_of_a_run(nightgrid: Nightgrid, results: Path) -> None:
    unmeasured = {job.job_id for at, job in enumerate(jobs()) if at % EVERY}
    predictions = predict(nightgrid, results)
    assert predictions.keys() == unmeasured
    assert {one.basis for one in predictions.values()} == {"6 measured, roofline prior"}
    assert all(one.low < one.value < one.high for one in predictions.values())
    table = pq.read_table(results / "searched" / run_files.PREDICTIONS)
    assert all(b"description" in field.metadata for field in table.schema)
    store = Store.existing(results, "searched")
    assert len(store.measurements()) == len(jobs())  # no prediction is among the rows


def test_earlier_runs_count_if_their_figures_are_true_and_of_the_same_devices(
    nightgrid: Nightgrid, results: Path
) -> None:
    other = write_run(results, "other", first=1)
    alone = predict(nightgrid, results, "--runs")
    both = predict(nightgrid, results)
    assert {one.earlier for one in alone.values()} == {0}
    assert {one.earlier for one in both.values()} == {6}
    assert all(both[name].log_deviation < alone[name].log_deviation for name in alone)
    rows = other.measurements()
    unlike = {
        "elsewhere": [replace(row, device_name="Gaudi9") for row in rows],
        "false": [replace(row, details={NOT_FINITE: "its logits"}) for row in rows],
    }
    for run, changed in unlike.items():
        with Store(results, run) as store:
            store.append(*changed)
        assert {one.earlier for one in predict(nightgrid, results, "--runs", run).values()} == {0}


def test_nothing_is_predicted_without_rows_and_a_damaged_file_is_left_out(
    nightgrid: Nightgrid, results: Path
) -> None:
    for content in (b"", b"no table"):
        (results / "searched" / run_files.PREDICTIONS).write_bytes(content)
        assert read_summary(Store.existing(results, "searched"))[0].predictions == ()
    grid = results.parent / "searched.yaml"
    words = ("predict", grid, "--emulate", "1x2", "--results", results.parent / "none")
    assert "no row in" in nightgrid(*words, code=4).err


def test_predicted_cells_are_hatched_and_rank_nowhere(nightgrid: Nightgrid, results: Path) -> None:
    store = Store.existing(results, "searched")
    before, rows = read_summary(store)
    assert "hatch" not in page_text(store, before, rows).split("</style>")[1]
    fast = [
        replace(one, value=1e9, low=9e8, high=1.1e9) for one in predict(nightgrid, results).values()
    ]
    store.write_file(run_files.PREDICTIONS, table_of(Prediction, fast))
    summary, rows = read_summary(store)
    page = page_text(store, summary, rows).split("</style>")[1]
    assert page.count('class="hatch"') == len(fast) and "PREDICTED" in page
    assert "±10% predicted" in page and "Predicted cells" in page
    text = printed(summary)
    assert "±10% predicted" in text
    assert summary.rankings == before.rankings and summary.fronts == before.fronts
    assert summary.effects == before.effects and summary.counts == before.counts
    ours, were = ((t.best, t.tied, t.top) for one in (summary, before) for t in one.tables)
    assert ours == were
    measured = next(job for job in jobs() if job.job_id == fast[0].job_id)  # since then
    with store:
        store.append(Night(run="searched").add(measured, attempt=2, recorded_at=2e9))
    shown = {one.job_id for one in read_summary(store)[0].predictions}
    assert shown == {one.job_id for one in fast[1:]}


@pytest.mark.parametrize("changes", [{"runs": 0.2}, {"high": 1e9}])
def test_cells_that_may_fail_or_give_anything_show_no_figure(
    nightgrid: Nightgrid, results: Path, changes: dict[str, Any]
) -> None:
    store = Store.existing(results, "searched")
    unlikely = [replace(one, **changes) for one in predict(nightgrid, results).values()]
    store.write_file(run_files.PREDICTIONS, table_of(Prediction, unlikely))
    summary, _ = read_summary(store)
    assert not summary.tables[0].predicted and len(summary.predictions) == len(unlikely)
