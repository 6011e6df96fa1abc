"""A report of a run that is under way, and the new figures on the page."""

from __future__ import annotations

import re
from pathlib import Path

from measurement_factory import Night, a_job, precision_grid

from orchestrator.analysis.hardware import reference
from orchestrator.analysis.summary import Table, summarize, underway_of
from orchestrator.core.status import CardStatus, RunStatus
from orchestrator.report import svg
from orchestrator.report.charts import clipped, throughput_curve
from orchestrator.report.run_report import read_summary, write_page
from orchestrator.store.store import Store


def a_status(**changes: object) -> RunStatus:
    """A run with 12 of 48 jobs done."""
    card = CardStatus(card="hpu-1/HPU3", phase="measure", phase_age_s=4.0, job="b", attempt_id="x")
    known: dict[str, object] = {
        "run": "live",
        "at": 1000.0,
        "started_at": 0.0,
        "total": 48,
        "done": 12,
        "counts": {"SUCCEEDED": 12},
        "attempts": 12,
        "emulated": True,
        "cards": (card, CardStatus(card="hpu-1/HPU4")),
        "eta_s": 3000.0,
    }
    return RunStatus(**{**known, **changes})  # type: ignore[arg-type]


def test_a_run_under_way_says_how_far_it_is() -> None:
    underway = underway_of(a_status(), 1001.0)
    assert underway is not None
    assert underway.sentence == (
        "Under way: 12 of 48 jobs done, 1 running, about 50 min 00 s left."
    )


def test_a_silent_driver_is_named() -> None:
    underway = underway_of(a_status(), 1000.0 + 3600)
    assert underway is not None and underway.stale
    assert underway.sentence.startswith("Not finished: 12 of 48 jobs done. The driver has been si")


def test_a_finished_or_unknown_run_is_told_by_its_rows() -> None:
    assert underway_of(a_status(finished=True), 1e9) is None
    assert underway_of(None, 0.0) is None


def test_a_row_that_cannot_be_read_is_counted_against_the_plan() -> None:
    night = Night()
    for size in range(1, 20):
        night.add(a_job(batch_size=size), items=0)
    told = summarize(night.rows, ["rows/x.parquet (torn)"], planned=20).verdict
    assert told == "1 job of 20 planned have no row; 1 file could not be read; 19 measured."
    assert summarize(night.rows, planned=19).verdict == "All 19 jobs have an answer; 19 measured."
    assert summarize(night.rows, planned=3).verdict.startswith("All 19")


def test_the_page_of_a_run_under_way(tmp_path: Path) -> None:
    with Store.open(tmp_path, "live") as store:
        store.append(Night(run="live").add(a_job()))
        store.write_file("status.json", a_status().to_json())
        text = write_page(store, *read_summary(store, lean=True)).read_text(encoding="utf-8")
        assert "12 of 48 jobs done" in text and 'aria-valuenow="12"' in text
        assert "hpu-1/HPU3" in text
        store.write_file("status.json", "{")
        summary, _ = read_summary(store)
        assert summary.underway is None


def one_table(low: float | None = None, high: float | None = None) -> Table:
    night = Night()
    precision_grid(night, sizes=(1, 2, 4), precisions=("bf16",))
    from dataclasses import replace

    last = night.rows[-1]
    if low is not None:
        metrics = replace(last.metrics, throughput_low=low, throughput_high=high)
        night.rows[-1] = replace(last, metrics=metrics)
    (table,) = summarize(night.rows).tables
    return table


def test_error_bars_stay_inside_the_figure() -> None:
    plain, wild = one_table(), one_table(-1e5, 1e6)
    assert not clipped(plain) and clipped(wild)
    drawn = throughput_curve(wild, "title")
    bars = re.findall(r'class="bar" d="([^"]+)"', drawn)
    assert "l3 4l3-4" in bars[0] and "l3-4l3 4" in bars[0]
    heights = [float(y) for _, y in re.findall(r"M([\d.]+) (-?[\d.]+)V", bars[0])]
    heights += [float(y) for y in re.findall(r"V(-?[\d.]+)", bars[0])]
    floor = svg.HEIGHT - svg.BOTTOM
    assert all(svg.TOP <= y <= floor for y in heights)
    tick = max(float(t.replace(",", "")) for t in re.findall(r'"end">([\d.,]+)<', drawn))
    assert tick < 2000, "the curve is not pressed down by one interval"


def test_terminal_and_markdown_tell_the_findings() -> None:
    import io
    import json

    from rich.console import Console

    from orchestrator.report.export import to_json
    from orchestrator.report.text import print_summary, to_markdown

    night = Night(emulated=False)
    for cards in (1, 2):
        precision_grid(night, cards=cards, sizes=(8, 32), precisions=("bf16", "int8"))
    summary = summarize(night.rows, reference=reference(), underway=underway_of(a_status(), 1001.0))
    file = io.StringIO()
    print_summary(summary, Console(file=file, width=80))
    assert max(map(len, file.getvalue().splitlines())) <= 80
    for text in (file.getvalue(), to_markdown(summary)):
        assert "Under way: 12 of 48 jobs done" in " ".join(text.split())
        for title in ("What each technique buys", "Scaling over cards", "Share of the card's lim"):
            assert title in text
    document = json.loads(to_json(summary))
    assert document["underway"]["done"] == 12
    assert {line["after"] for line in document["figures"]["techniques"]} == {"int8"}
    assert len(document["figures"]["published"]) == len(reference().published)
