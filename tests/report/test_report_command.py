"""``nightgrid report`` from end to end, on a run written by the real store."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Nightgrid
from measurement_factory import every_state

from orchestrator.store.store import Store


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("results")
    with Store(directory, "smoke") as store:
        store.append(*every_state(items=1))
    return directory


def test_tables_and_page_by_default(results: Path, nightgrid: Nightgrid) -> None:
    out = nightgrid("report", "--results", results).out
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
    results: Path, tmp_path: Path, nightgrid: Nightgrid, form: str, start: str
) -> None:
    options = ("report", "smoke", "--results", results, "--format", form, "--output")
    screen = nightgrid(*options, "-")
    assert screen.out.startswith(start)
    assert form != "json" or screen.json["run"] == "smoke"  # nothing else is on it
    file = tmp_path / "out" / f"report.{form}"
    nightgrid(*options, file)
    assert file.read_text(encoding="utf-8").startswith(start)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
