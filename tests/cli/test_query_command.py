"""``nightgrid query`` and ``nightgrid export``, on runs written by the real store."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Nightgrid
from measurements import row

from orchestrator.store.store import Store

duckdb = pytest.importorskip("duckdb")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: three jobs, of which one was measured twice, and two jobs."""
    directory = tmp_path_factory.mktemp("results")
    again = row(0, run="one", invocation_id="i2", recorded_at=5000.0)
    again = replace(again, metrics=replace(again.metrics, throughput=999.0))
    with Store(directory, "one") as store:
        store.append(*(row(number, run="one") for number in range(3)), again)
    with Store(directory, "two") as store:
        store.append(*(row(number, run="two", random_weights=True) for number in range(2)))
    return directory


class Queries:
    """Asks SQL over ``results``, and returns what JSON has."""

    def __init__(self, nightgrid: Nightgrid, results: Path) -> None:
        self.type, self.results = nightgrid, results

    def __call__(self, sql: str, *options: str) -> Any:
        return self.type("query", sql, "--json", "--results", self.results, *options).json

    def refusal(self, sql: str, *options: object, code: int = 2) -> str:
        options = options or ("--results", self.results)
        return self.type("query", sql, *options, code=code).err


@pytest.fixture
def query(nightgrid: Nightgrid, results: Path) -> Queries:
    return Queries(nightgrid, results)


def test_rows_of_all_runs_are_counted(query: Queries) -> None:
    sql = "select run, count(*) as n from rows group by run order by run"
    assert query(sql) == [{"run": "one", "n": 4}, {"run": "two", "n": 2}]
    assert query(sql, "--run", "two") == [{"run": "two", "n": 2}]


def test_a_copy_of_a_run_is_a_run_of_the_name_that_it_has_here(
    query: Queries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``nightgrid fetch one --as monday``."""
    for name, source in (("one", "one"), ("monday", "one")):
        shutil.copytree(query.results / source, tmp_path / name)
    query.results = tmp_path
    sql = "select run, count(*) as n from jobs group by run order by run"
    assert query(sql) == [{"run": "monday", "n": 3}, {"run": "one", "n": 3}]
    assert query(sql, "--run", "monday") == [{"run": "monday", "n": 3}]


def test_jobs_are_the_newest_final_rows(query: Queries, monkeypatch: pytest.MonkeyPatch) -> None:
    sql = "select throughput from jobs where run = 'one' order by throughput desc"
    monkeypatch.setattr(sys, "stdin", io.StringIO(sql))
    for typed in (sql, "-"):
        assert [line["throughput"] for line in query(typed)] == [999.0, 102.0, 101.0]


def test_samples_and_items_are_rows_of_their_own(query: Queries) -> None:
    sql = "select s.run, s.wall_s, s.step_s, i.latency_s from samples s join items i using (job_id)"
    (first,) = query(sql + " where s.run = 'two' and i.run = 'two' limit 1")
    assert first == {"run": "two", "wall_s": 1.0, "step_s": [0.01, 0.02], "latency_s": 0.5}


def test_values_of_every_kind_become_json(query: Queries) -> None:
    (answer,) = query(
        "select started_at, parameters, nodes, 'nan'::double as x, 1.5::decimal(4,2) as y "
        "from rows where run = 'two' order by started_at limit 1"
    )
    assert answer == {
        "started_at": "1970-01-01T00:16:30",
        "parameters": {"ignore_eos": "true", "output_tokens": "25"},
        "nodes": ["hpu-1"],
        "x": None,
        "y": 1.5,
    }


def test_csv_and_table(query: Queries, nightgrid: Nightgrid) -> None:
    sql = "select run, details, throughput from rows where run = 'two' order by throughput"
    printed = nightgrid("query", sql, "--csv", "--results", query.results)
    lines = list(csv.DictReader(io.StringIO(printed.out)))
    assert [line["throughput"] for line in lines] == ["100.0", "101.0"]
    assert json.loads(lines[0]["details"]) == {"note": "裤 ✓"}
    assert "2 rows" in nightgrid("query", sql, "--results", query.results).out


def test_columns_without_room_stand_on_lines_of_their_own(
    query: Queries, nightgrid: Nightgrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sql = "select * from jobs where run = 'two'"
    printed = nightgrid("query", sql, "--results", query.results)
    lines = [line.split() for line in printed.out.splitlines()]
    assert lines.count(["run", "two"]) == 2
    assert ["throughput", "100"] in lines and ["throughput", "101"] in lines


CHANGES = "is refused: a query reads rows and changes none"
VIEWS = "rows, jobs, samples and items"


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("drop view rows", CHANGES),
        ("delete from rows", CHANGES),
        ("select 1; drop table rows", CHANGES),
        ("merge into measurements using jobs on (true) when matched then delete", CHANGES),
        ("select nope from rows", VIEWS),
        ("selec", VIEWS),
        ("select * from read_csv('/etc/hostname')", VIEWS),
        ("copy rows to 'out.csv'", VIEWS),
        ("set enable_external_access = true", VIEWS),
        ("attach 'x.db'", VIEWS),
        ("select '\udc80'", "is no UTF-8"),
    ],
)
def test_a_statement_that_changes_rows_or_reaches_outside_is_refused(
    query: Queries, sql: str, message: str, workplace: Path
) -> None:
    assert message in query.refusal(sql)
    assert not list(workplace.iterdir())


@pytest.mark.parametrize(
    ("package", "words"),
    [("duckdb", ["query", "select 1"]), ("mlflow", ["export", "http://x", "--to", "mlflow"])],
)
def test_without_a_package_the_way_out_is_said(
    package: str,
    words: list[str],
    results: Path,
    nightgrid: Nightgrid,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    refused = nightgrid(*words, "--results", results, code=7)
    assert f"pip install {package}" in refused.err


def test_the_exported_dataset_opens_with_its_own_library_and_has_a_card(
    results: Path, tmp_path: Path, nightgrid: Nightgrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    directory = tmp_path / "dataset"
    options = ("--to", "datasets", "--results", results, "--json")
    written = nightgrid("export", directory, *options).json["written"]
    assert written == {"rows": 6, "samples": 6, "items": 24}
    card = (directory / "README.md").read_text(encoding="utf-8")
    assert "6 of 6 rows ran on emulated cards" in card
    assert "2 of 6 rows had random weights" in card
    assert "| `throughput` |" in card and "run `one`: 4 rows" in card
    datasets = pytest.importorskip("datasets")
    cache = str(tmp_path / "cache")
    read = {
        name: datasets.load_dataset(str(directory), name, split="train", cache_dir=cache)
        for name in ("rows", "samples", "items")
    }
    assert sorted(read["rows"]["throughput"]) == [100.0, 100.0, 101.0, 101.0, 102.0, 999.0]
    assert json.loads(read["rows"][0]["parameters"]) == {"ignore_eos": True, "output_tokens": 25}
    assert read["rows"][0]["started_at"].utctimetuple().tm_min == 16
    assert read["samples"][0]["step_s"] == [0.01, 0.02]
    assert set(read["items"]["job_id"]) == set(read["rows"]["job_id"])


def test_an_export_into_a_directory_of_the_same_name_is_read_and_not_an_older_one(
    results: Path, tmp_path: Path, nightgrid: Nightgrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``datasets`` caches by the directory's last name and the card."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    counts = []
    for parent, run in (("a", "one"), ("b", "two")):
        directory = tmp_path / parent / "exported"
        nightgrid("export", directory, "--to", "datasets", "--run", run, "--results", results)
        counts.append(len(datasets.load_dataset(str(directory), "rows", split="train")))
    assert counts == [4, 2]


def test_runs_without_raw_rows_export_too_and_not_into_a_directory_in_use(
    tmp_path: Path, nightgrid: Nightgrid
) -> None:
    with Store(tmp_path / "results", "bare") as store:
        store.append(row(0, samples=(), items=()))
    words = ("export", tmp_path / "out", "--to", "datasets", "--results", tmp_path / "results")
    nightgrid(*words)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["README.md", "rows"]
    assert "is not empty" in nightgrid(*words, code=4).err


class Tracking:
    """MLflow on this disk; a server needs packages that only it uses."""

    def __init__(self, directory: Path, nightgrid: Nightgrid) -> None:
        self.address = (directory / "tracking").as_uri()
        self.type = nightgrid

    def export(self, results: Path, code: int = 0, to: str = "") -> Any:
        options = ("--to", "mlflow", "--results", results, "--json")
        return self.type("export", to or self.address, *options, code=code)

    def runs(self, run: str) -> list[Any]:
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self.address)
        experiment = client.get_experiment_by_name(f"nightgrid/{run}")
        return client.search_runs([experiment.experiment_id])


@pytest.fixture
def tracking(workplace: Path, nightgrid: Nightgrid, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return Tracking(workplace, nightgrid)


def test_mlflow_gets_a_run_for_each_job_once(results: Path, tracking: Tracking) -> None:
    assert tracking.export(results).json["written"] == {"one": 3, "two": 2}
    assert tracking.export(results).json["written"] == {"one": 0, "two": 0}
    runs = tracking.runs("one")
    assert sorted(run.data.metrics["throughput"] for run in runs) == [101.0, 102.0, 999.0]
    (again,) = [run for run in runs if run.data.metrics["throughput"] == 999.0]
    assert again.data.params["precision"] == "bf16"
    assert again.data.params["parameters.output_tokens"] == "25"
    assert again.data.tags["emulated"] == "true" and again.info.status == "FINISHED"
    assert again.info.end_time - again.info.start_time == 9500


def test_mlflow_gets_the_rows_of_a_run_as_they_come(
    tracking: Tracking, nightgrid: Nightgrid
) -> None:
    Path("g.yaml").write_text(
        "name: live\nexperiments:\n  - {name: e, workload: tiny, model: tiny-chatglm3, "
        "accelerator: HPU, axes: {trouble: ['', unsupported]}}\n"
        "measure: {warmup: 0, min_repeats: 1, max_repeats: 1}\n"
    )
    trackers = ("--log-to", f"mlflow={tracking.address}", "--log-to", "mlflow=nowhere://x")
    printed = nightgrid("run", "g.yaml", "--in-process", "--quiet", "--results", "r", *trackers)
    assert f"every row is in MLflow at {tracking.address}" in printed.out
    assert "MLflow at nowhere://x: MLflow knows no such address" in printed.out
    states = sorted(run.data.tags["state"] for run in tracking.runs("live"))
    assert states == ["SUCCEEDED", "UNSUPPORTED"]
    assert tracking.export(Path("r")).json["written"] == {"live": 0}


def test_an_export_goes_on_after_a_row_that_mlflow_refuses(
    tracking: Tracking, tmp_path: Path
) -> None:
    odd = row(0, run="first", parameters={"no//name": 1})
    for run, rows in (("first", [odd, row(1), row(2)]), ("second", [row(3)])):
        with Store(tmp_path / "r", run) as store:
            store.append(*(replace(one, run=run) for one in rows))
    for written in ({"first": 2, "second": 1}, {"first": 0, "second": 0}):
        printed = tracking.export(tmp_path / "r", code=4)
        assert printed.json["written"] == written
        assert f"first: of its rows 1 set aside ({odd.job_id}): MLflow at file:" in printed.err
        assert "no//name" in printed.err
    # Each try made a run before its values were refused: none stays there as running.
    assert [run.info.status for run in tracking.runs("first")] == ["FINISHED"] * 2


@pytest.mark.parametrize(
    ("destination", "reason"),
    [
        ("sqlite:////there/m.db", "pip install mlflow, or name a server, http://HOST:5000"),
        ("./plain", "MLflow writes no plain directories any more; name a server"),
        ("there", "MLflow writes no plain directories any more; name a server"),
        ("foo://x", "MLflow knows no such address; name a server"),
        ("http://127.0.0.1:1", "no server answers there: [Errno 111] Connection refused"),
    ],
)
def test_an_export_that_mlflow_refuses_is_explained(
    destination: str,
    reason: str,
    results: Path,
    tracking: Tracking,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    assert reason in tracking.export(results, code=4, to=destination).err


@pytest.mark.parametrize(
    ("tracker", "reason"),
    [
        ("neptune", "no rows can be logged to 'neptune'; there is: mlflow, wandb"),
        (
            "mlflow",
            "give a server or database, mlflow=http://HOST:5000, or set MLFLOW_TRACKING_URI",
        ),
    ],
)
def test_a_tracker_is_refused_before_anything_starts(
    tracker: str,
    reason: str,
    workplace: Path,
    nightgrid: Nightgrid,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    refused = nightgrid("run", "smoke", "--in-process", "--log-to", tracker, code=4)
    assert reason in refused.err and not list(workplace.iterdir())
