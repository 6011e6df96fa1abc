"""``nightgrid report`` from end to end, on a run written by the real store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measurement_factory import Night, a_job, every_state

from orchestrator.cli.main import main
from orchestrator.report.run_report import read_summary, write_page
from orchestrator.store.store import Store


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("results")
    with Store(directory, "smoke") as store:
        store.append(*every_state(items=1))
    return directory


def test_tables_and_page_by_default(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--results", str(results)]) == 0
    out = capsys.readouterr().out
    page = results / "smoke" / "report.html"
    assert "Best setting for each model and device" in out
    assert out.rstrip().endswith(f"page: {page.resolve()}")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("form", "start"),
    [
        ("terminal", "Run smoke"),
        ("md", "# Run smoke"),
        ("csv", "schema_version,"),
        ("json", "{"),
        ("html", "<!DOCTYPE html>"),
    ],
)
def test_every_format_to_screen_and_file(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, start: str
) -> None:
    options = ["report", "smoke", "--results", str(results), "--format", form, "--output"]
    assert main([*options, "-"]) == 0
    screen = capsys.readouterr().out
    assert screen.startswith(start)
    assert form != "json" or json.loads(screen)["run"] == "smoke"  # nothing else is on it
    file = tmp_path / "out" / f"report.{form}"
    assert main([*options, str(file)]) == 0
    assert file.read_text(encoding="utf-8").startswith(start)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_what_cannot_be_reported_is_said(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--results", str(results)]
    for options, words in (
        (["somke", *here], ["somke", "    smoke"]),  # the runs that exist
        (["--results", str(tmp_path)], ["nightgrid run"]),
        ([*here, "--format", "md", "--output", str(tmp_path)], ["cannot write"]),
    ):
        assert main(["report", *options]) == 4
        error = capsys.readouterr().err
        assert all(word in error for word in words)


def test_a_running_run_can_be_reported(tmp_path: Path) -> None:
    with Store(tmp_path, "live") as store:
        night = Night(run="live")
        store.append(night.add(a_job()))
        reader = Store(tmp_path, "live")
        page = write_page(reader, *read_summary(reader))
        store.append(night.add(a_job(batch_size=16)))
        assert "The only job has an answer" in page.read_text(encoding="utf-8")
        write_page(store, *read_summary(store, lean=True))
        assert "All 2 jobs have an answer" in page.read_text(encoding="utf-8")
