"""Figures as PNG and PDF, their data as CSV, and the table in the shape that vendors publish."""

from __future__ import annotations

import csv
import io
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import Nightgrid
from measurement_factory import Night, a_job, every_state, precision_grid

from orchestrator.analysis.hardware import published_figures
from orchestrator.analysis.summary import summarize
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.export import lengths, to_vendor_csv
from orchestrator.report.figure_data import figure_csv, figure_records
from orchestrator.report.figures import MOST_PICTURES, pictures_of, standalone, write_pictures
from orchestrator.report.html import render
from orchestrator.store.store import Store

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("results")
    night = Night(emulated=False, run="real")
    for cards in (1, 2):
        precision_grid(night, cards=cards, sizes=(8, 32), precisions=("bf16",), items=3)
    for run, rows in (("real", night.rows), ("smoke", every_state(items=2))):
        with Store(directory, run) as store:
            store.append(*rows)
    return directory


@pytest.mark.slow
def test_every_figure_has_a_picture_and_its_data(
    results: Path, tmp_path: Path, nightgrid: Nightgrid
) -> None:
    pytest.importorskip("typst")
    directory = tmp_path / "figures"
    printed = nightgrid("report", "real", "--results", results, "--figures", directory)
    kinds = {"heat-map", "throughput-against-batch-size", "throughput-against-latency", "prompts",
             "scaling", "roofline", "cards"}  # fmt: skip
    pictures = {path.stem.rstrip("0123456789").rstrip("-") for path in directory.glob("*.png")}
    assert pictures == kinds
    tables = {path.stem for path in directory.glob("*.csv")}
    assert tables == kinds - {"heat-map"} | {
        "best-settings",
        "precision-by-batch-size",
        "published",
    }
    for path in directory.glob("*.png"):
        data = path.read_bytes()
        assert data.startswith(PNG) and len(data) > 5000, path.name
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF-"), path.name
    assert f"data: {len(tables)} tables" in printed.out
    assert not (results / "real" / "report.html").exists()


def test_hostile_and_odd_rows_are_drawn(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("typst")
    night = Night()
    for batch in (1, 2):
        night.add(a_job(model="$x_{$ <b> \x1b[31m\uffff", batch_size=batch))
        night.add(a_job(model="$x_{$ <b> \x1b[31m\uffff", batch_size=batch, precision="int8"))
    last = night.rows[-1]
    night.rows[-1] = replace(last, metrics=replace(last.metrics, throughput_low=-1e4))
    paths, left_out = write_pictures(summarize(night.rows), tmp_path)
    assert left_out == 0 and len(paths) >= 8


def test_pictures_hold_the_pages_drawings_in_literal_colours() -> None:
    rows = every_state(items=2)
    summary = summarize(rows, published=published_figures())
    page = render(summary, rows)
    for picture in pictures_of(summary)[0]:
        inner = picture.drawing.partition("</title>")[2]
        assert inner in page, picture.name
        alone = standalone(picture, "Beware: emulated cards")
        assert inner.removesuffix("</svg>") in alone and "Beware: emulated cards" in alone
        assert "var(" not in alone and "#1047a9" in alone
        ElementTree.fromstring(alone)


def test_without_typst_the_data_is_written_and_the_way_out_said(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nightgrid: Nightgrid
) -> None:
    monkeypatch.setitem(sys.modules, "typst", None)
    options = ("report", "real", "--results", results, "--figures")
    assert "pip install typst" in nightgrid(*options, tmp_path, code=7).err
    assert (tmp_path / "scaling.csv").exists()
    file = tmp_path / "afile"
    file.write_text("mine")
    refused = nightgrid(*options, file, code=4).err
    assert f"--figures {file}: a file has this name; give a folder's" in refused
    assert file.read_text() == "mine"


def test_figure_data_is_whole() -> None:
    rows = every_state(items=3)
    summary = summarize(rows, published=published_figures())
    data = {name: list(records) for name, records in figure_records(summary).items()}
    files = figure_csv(summary)
    assert len(data["precision-by-batch-size"]) == len(summary.rows)
    prompts = sum(len(row.items) for row in summary.rows if row.state is State.SUCCEEDED)
    assert len(data["prompts"]) == prompts
    spans = sum(len(lane.spans) for lane in summary.timeline.lanes)
    assert len(data["cards"]) == spans
    read = list(csv.DictReader(io.StringIO(files["throughput-against-batch-size.csv"])))
    by_job = {row.job_id: row for row in summary.rows}
    for line in read:
        assert float(line["throughput"]) == by_job[line["job_id"]].metrics.throughput
        assert line["emulated"] == "true"
    best = {line["job_id"] for line in read if line["best"] == "true"}
    assert best == {job_id for table in summary.tables for job_id in table.best}
    assert "roofline.csv" not in files and len(data["published"]) == len(published_figures())


def test_a_huge_grid_is_not_drawn_picture_by_picture() -> None:
    night = Night()
    for number in range(MOST_PICTURES + 5):
        night.add(a_job(model=f"model-{number}"))
    images, left_out = pictures_of(summarize(night.rows))
    assert sum(image.name.startswith("heat-map") for image in images) == MOST_PICTURES
    assert left_out == 5


def test_the_vendors_table_has_their_columns(results: Path, nightgrid: Nightgrid) -> None:
    printed = nightgrid("report", "real", "--results", results, "--format", "vendor")
    read = list(csv.DictReader(io.StringIO(printed.out)))
    batches = [(line["cards"], line["batch_size"]) for line in read]
    assert batches == [("1", "8"), ("1", "32"), ("2", "16"), ("2", "64")]
    assert {(line["device"], line["length_kind"]) for line in read} == {("Gaudi2", "mean")}
    (line,) = vendor_lines(Night().add(a_job()))
    assert line["emulated"] == line["random_weights"] == line["synthetic_data"] == "true"


def test_the_vendors_table_has_the_loads_of_a_served_model_and_no_row_that_ranks_nowhere() -> None:
    """Every load has a batch size of 1 for the grid; a vendor's is the requests in flight."""
    plain = Night(emulated=False).add(a_job())
    loads = [{"concurrency": 16}, {"concurrency": 4}, {"request_rate": 2.5}]
    rows = [
        replace(plain, job_id=f"load-{number}", parameters={"output_tokens": 128, **load})
        for number, load in enumerate(loads)
    ]
    assert [line["batch_size"] for line in vendor_lines(*rows)] == ["", "4", "16"]
    not_steady = replace(plain, warmup_end="limit")
    assert len(vendor_lines(plain)) == 1 and vendor_lines(not_steady) == []


def vendor_lines(*rows: Measurement) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_vendor_csv(summarize(rows)))))


def test_lengths_are_fixed_only_where_the_job_fixed_them() -> None:
    row = Night().add(a_job())
    fixed = {"input_tokens": 128, "output_tokens": 64, "ignore_eos": True}
    assert lengths(replace(row, parameters=fixed)) == (128, 64, "fixed")
    assert lengths(replace(row, parameters={**fixed, "ignore_eos": False}))[2] == "mean"
    assert lengths(replace(row, parameters={}, items=())) == (None, None, "")


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
