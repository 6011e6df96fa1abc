"""``nightgrid report`` from end to end, on a run written by the real store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measurement_factory import every_state

from orchestrator.cli.main import main
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
