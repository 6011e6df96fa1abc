"""``nightgrid query`` and ``nightgrid export``, on runs written by the real store."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_workload
from measurements import row

from orchestrator.cli.main import main
from orchestrator.store.store import Store
from orchestrator.trackers.base import TRACKERS, tracked

duckdb = pytest.importorskip("duckdb")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: three jobs, of which one was measured twice, and two jobs."""
    directory = tmp_path_factory.mktemp("results")
    with Store.open(directory, "one") as store:
        for number in range(3):
            store.append(row(number, run="one"))
        again = row(0, run="one", invocation_id="i2", recorded_at=5000.0)
        faster = replace(again.metrics, throughput=999.0)
        store.append(replace(again, metrics=faster))
    with Store.open(directory, "two") as store:
        for number in range(2):
            store.append(row(number, run="two", random_weights=True))
    return directory


def asked(
    capsys: pytest.CaptureFixture[str], results: Path, sql: str, *options: str
) -> list[dict[str, object]]:
    """The JSON answer."""
    assert main(["query", sql, "--json", "--results", str(results), *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, list)
    return answer


def test_rows_of_all_runs_are_counted(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "select run, count(*) as n from rows group by run order by run"
    assert asked(capsys, results, sql) == [{"run": "one", "n": 4}, {"run": "two", "n": 2}]
    assert asked(capsys, results, sql, "--run", "two") == [{"run": "two", "n": 2}]


def test_jobs_are_the_newest_final_rows(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "select throughput from jobs where run = 'one' order by throughput desc"
    assert [line["throughput"] for line in asked(capsys, results, sql)] == [999.0, 102.0, 101.0]


def test_samples_and_items_are_rows_of_their_own(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sql = "select s.run, s.wall_s, s.step_s, i.latency_s from samples s join items i using (job_id)"
    (first, *_) = asked(capsys, results, sql + " where s.run = 'two' and i.run = 'two' limit 1")
    assert first == {"run": "two", "wall_s": 1.0, "step_s": [0.01, 0.02], "latency_s": 0.5}


def test_values_of_every_kind_become_json(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sql = (
        "select started_at, parameters, nodes, 'nan'::double as x, 1.5::decimal(4,2) as y "
        "from rows where run = 'two' order by started_at limit 1"
    )
    (answer,) = asked(capsys, results, sql)
    assert answer == {
        "started_at": "1970-01-01T00:16:30",
        "parameters": {"ignore_eos": "true", "output_tokens": "25"},
        "nodes": ["hpu-1"],
        "x": None,
        "y": 1.5,
    }


def test_csv_and_table(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "select run, details, throughput from rows where run = 'two' order by throughput"
    assert main(["query", sql, "--csv", "--results", str(results)]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["throughput"] for line in lines] == ["100.0", "101.0"]
    assert json.loads(lines[0]["details"]) == {"note": "裤 ✓"}
    assert main(["query", sql, "--results", str(results)]) == 0
    assert "2 rows" in capsys.readouterr().out


def test_columns_without_room_stand_on_lines_of_their_own(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["query", "select * from jobs where run = 'two'", "--results", str(results)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines.count(["run", "two"]) == 2
    assert ["throughput", "100"] in lines and ["throughput", "101"] in lines


@pytest.mark.parametrize(
    "sql",
    [
        "drop view rows",
        "delete from rows",
        "select 1; drop table rows",
        "merge into measurements using jobs on (true) when matched then delete",
    ],
)
def test_a_statement_that_changes_rows_is_refused(
    results: Path, capsys: pytest.CaptureFixture[str], sql: str
) -> None:
    assert main(["query", sql, "--results", str(results)]) == 2
    assert "is refused: a query reads rows and changes none" in capsys.readouterr().err


def test_a_statement_from_standard_input(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("select count(*) as n from jobs"))
    assert asked(capsys, results, "-") == [{"n": 5}]


@pytest.mark.parametrize(
    "sql",
    [
        "select nope from rows",
        "selec",
        "select * from read_csv('/etc/hostname')",
        "copy rows to 'out.csv'",
        "set enable_external_access = true",
        "attach 'x.db'",
    ],
)
def test_a_refused_statement_says_what_there_is(
    results: Path,
    capsys: pytest.CaptureFixture[str],
    sql: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["query", sql, "--results", str(results)]) == 2
    assert "rows, jobs, samples and items" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_duckdb_the_way_out_is_said(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert main(["query", "select 1", "--results", str(results)]) == 7
    assert "pip install 'nightgrid[query]'" in capsys.readouterr().err


def test_no_runs_and_unknown_runs(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["query", "select 1", "--results", str(tmp_path)]) == 4
    assert "there are no runs" in capsys.readouterr().err
    assert main(["query", "select 1", "--results", str(results), "--run", "onee"]) == 4
    assert "\n    one" in capsys.readouterr().err


def test_a_damaged_file_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 1):
        with Store.open(tmp_path, "torn") as store:
            store.append(row(number))
            path = store.to_parquet()
    assert path is not None
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["query", "select count(*) from rows", "--csv", "--results", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1] == "1" and path.name in captured.err


def test_the_exported_dataset_opens_with_its_own_library(
    results: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    directory = tmp_path / "dataset"
    options = ["--to", "datasets", "--results", str(results), "--json"]
    assert main(["export", str(directory), *options]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == {"rows": 6, "samples": 6, "items": 24}
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


def test_the_card_says_what_is_not_real(results: Path, tmp_path: Path) -> None:
    directory = tmp_path / "dataset"
    assert main(["export", str(directory), "--to", "datasets", "--results", str(results)]) == 0
    card = (directory / "README.md").read_text(encoding="utf-8")
    assert "6 of 6 rows ran on emulated cards" in card
    assert "2 of 6 rows had random weights" in card
    assert "| `throughput` |" in card and "run `one`: 4 rows" in card


def test_a_directory_in_use_is_not_written_into(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("precious", encoding="utf-8")
    assert main(["export", str(tmp_path), "--to", "datasets", "--results", str(results)]) == 4
    assert "is not empty" in capsys.readouterr().err


def test_runs_without_raw_rows_export_too(tmp_path: Path) -> None:
    with Store.open(tmp_path / "results", "bare") as store:
        store.append(row(0, samples=(), items=()))
    options = ["--to", "datasets", "--results", str(tmp_path / "results")]
    assert main(["export", str(tmp_path / "out"), *options]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["README.md", "rows"]


@pytest.fixture()
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tracking address on this disk; a server needs packages that only it uses."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    return (tmp_path / "tracking").as_uri()


def test_mlflow_gets_a_run_for_each_job_once(
    results: Path, tracking: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient

    options = ["export", tracking, "--to", "mlflow", "--results", str(results), "--json"]
    assert main(options) == 0
    assert json.loads(capsys.readouterr().out)["written"] == {"one": 3, "two": 2}
    assert main(options) == 0
    assert json.loads(capsys.readouterr().out)["written"] == {"one": 0, "two": 0}
    client = MlflowClient(tracking_uri=tracking)
    experiment = client.get_experiment_by_name("nightgrid/one")
    found = client.search_runs([experiment.experiment_id])
    assert sorted(run.data.metrics["throughput"] for run in found) == [101.0, 102.0, 999.0]
    (again,) = [run for run in found if run.data.metrics["throughput"] == 999.0]
    assert again.data.params["precision"] == "bf16"
    assert again.data.params["parameters.output_tokens"] == "25"
    assert again.data.tags["emulated"] == "true" and again.info.status == "FINISHED"
    assert again.info.end_time - again.info.start_time == 9500


def test_mlflow_gets_the_rows_of_a_run_as_they_come(
    tracking: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlflow import MlflowClient

    tiny_workload.register(monkeypatch)
    text = (
        "name: live\nexperiments:\n  - {name: e, workload: tiny, model: tiny-chatglm3, "
        "accelerator: HPU, axes: {trouble: ['', unsupported]}}\n"
        "measure: {warmup: 0, min_repeats: 1, max_repeats: 1}\n"
    )
    (tmp_path / "g.yaml").write_text(text, encoding="utf-8")
    run = ["run", "g.yaml", "--in-process", "--quiet", "--results", str(tmp_path / "r")]
    assert main([*run, "--log-to", f"mlflow={tracking}", "--log-to", "mlflow=nowhere://x"]) == 0
    said = capsys.readouterr().out
    assert f"every row is in MLflow at {tracking}" in said
    assert "MLflow at nowhere://x: MLflow knows no such address" in said
    client = MlflowClient(tracking_uri=tracking)
    experiment = client.get_experiment_by_name("nightgrid/live")
    found = client.search_runs([experiment.experiment_id])
    assert sorted(run.data.tags["state"] for run in found) == ["SUCCEEDED", "UNSUPPORTED"]
    assert main(["export", tracking, "--to", "mlflow", "--results", str(tmp_path / "r")]) == 0
    assert "0 new jobs of live" in capsys.readouterr().out


def test_an_export_goes_on_after_a_row_that_mlflow_refuses(
    tracking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = row(0, run="first", parameters={"no//name": 1})
    for run, rows in (("first", [odd, row(1), row(2)]), ("second", [row(3)])):
        with Store.open(tmp_path / "r", run) as store:
            for each in rows:
                store.append(replace(each, run=run))
    options = ["export", tracking, "--to", "mlflow", "--results", str(tmp_path / "r"), "--json"]
    for written in ({"first": 2, "second": 1}, {"first": 0, "second": 0}):
        assert main(options) == 4
        told = capsys.readouterr()
        assert json.loads(told.out)["written"] == written
        assert f"first: of its rows 1 set aside ({odd.job_id}): MLflow at file:" in told.err
        assert "no//name" in told.err


def test_a_run_that_mlflow_refuses_leaves_nothing_behind(tracking: str, tmp_path: Path) -> None:
    """Each try makes a run before its values are refused: it must not stay there as running."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    connection = TRACKERS["mlflow"].connect(tracking, "odd", tmp_path)
    refused = replace(tracked(row(0)), parameters={"no//name": "1"})
    with pytest.raises(MlflowException, match="no//name"):
        connection.write(refused)
    assert not connection.has(refused.attempt)
    client = MlflowClient(tracking_uri=tracking)
    experiment = client.get_experiment_by_name("nightgrid/odd")
    assert client.search_runs([experiment.experiment_id]) == []


@pytest.mark.parametrize(
    ("destination", "told"),
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
    told: str,
    results: Path,
    tracking: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    assert main(["export", destination, "--to", "mlflow", "--results", str(results)]) == 4
    assert told in capsys.readouterr().err


def test_a_tracker_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, told in (
        ("neptune", "no rows can be logged to 'neptune'; there is: mlflow, wandb"),
        (
            "mlflow",
            "give a server or database, mlflow=http://HOST:5000, or set MLFLOW_TRACKING_URI",
        ),
    ):
        command = ["run", "smoke", "--in-process", "--results", str(tmp_path / "r")]
        assert main([*command, "--log-to", name]) == 4
        assert told in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_without_mlflow_the_way_out_is_said(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert main(["export", "http://x", "--to", "mlflow", "--results", str(results)]) == 7
    assert "nightgrid[mlflow]" in capsys.readouterr().err
