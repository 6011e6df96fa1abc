"""Parts of the report: a run under way, curves, findings, forms of a model, images, profiles."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver_cases import STATUS
from measurement_factory import Night, a_job, precision_grid, printed
from measurements import row

from orchestrator.analysis.hardware import published_figures
from orchestrator.analysis.summary import Summary, Table, summarize
from orchestrator.core.measurement import Measurement
from orchestrator.report import svg
from orchestrator.report.blocks import Section
from orchestrator.report.charts import clipped, throughput_curve
from orchestrator.report.export import to_json
from orchestrator.report.html import MOST_BYTES, images_of, profiles_of, render
from orchestrator.report.run_report import page_text, read_summary, write_page
from orchestrator.report.sections import sections
from orchestrator.report.text import to_markdown
from orchestrator.store.reader import with_raw
from orchestrator.store.store import Store

# ---------------------------------------------------------------- a run under way


@pytest.mark.parametrize(
    ("changes", "silent_s", "sentence"),
    [
        ({}, 1, "Under way: 17 of 48 jobs done, 1 running, about 2 min 10 s left."),
        (
            {"eta_low_s": 60.0, "eta_high_s": 600.0},
            1,
            "Under way: 17 of 48 jobs done, 1 running, 1 min 00 s to 10 min 00 s left.",
        ),
        (
            {"stopping": "SIGTERM received"},
            1,
            "Under way: 17 of 48 jobs done, 1 running, stopping: SIGTERM received.",
        ),
        (
            {"waiting": "other (on h) has the cards", "cards": (), "eta_s": None},
            1,
            "Under way: 17 of 48 jobs done, waiting: other (on h) has the cards.",
        ),
        (
            {},
            3600,
            "Not finished: 17 of 48 jobs done. The driver has been silent for 1 h 00 min, since "
            "2023-11-14 22:14:25 UTC.",
        ),
        (
            {"driver_died": True},
            1,
            "Not finished: 17 of 48 jobs done. Its driver died; the same `nightgrid run` resumes "
            "it. Last heard of at 2023-11-14 22:14:25 UTC.",
        ),
    ],
)
def test_a_run_under_way_says_how_far_it_is(
    changes: dict[str, Any], silent_s: float, sentence: str
) -> None:
    summary = summarize([], status=replace(STATUS, **changes), silent_s=silent_s)
    assert summary.verdict == sentence
    assert ('class="verdict open"' in render(summary, [])) is (silent_s > 1)


def test_a_row_that_cannot_be_read_is_counted_against_the_plan() -> None:
    night = Night()
    for size in range(1, 20):
        night.add(a_job(batch_size=size), items=0)

    def verdict(planned: int) -> str:
        status = replace(STATUS, total=planned, finished=True)
        return summarize(night.rows, ["rows/x.parquet (torn)"], status=status).verdict

    one = "1 job of 20 planned have no row; 1 file could not be read; 19 measured."
    assert verdict(20) == one
    assert verdict(19) == verdict(3) == "All 19 jobs have an answer; 19 measured."


def test_the_page_of_a_run_under_way(tmp_path: Path) -> None:
    with Store(tmp_path, "live") as store:
        night = Night(run="live")
        store.append(night.add(a_job()))
        page = write_page(store, *read_summary(store)).read_text(encoding="utf-8")
        assert "The only job has an answer" in page
        store.append(night.add(a_job(batch_size=16)))
        page = write_page(store, *read_summary(store, lean=True)).read_text(encoding="utf-8")
        assert "All 2 jobs have an answer" in page
        store.write_file("status.json", STATUS.to_json())
        text = write_page(store, *read_summary(store, lean=True)).read_text(encoding="utf-8")
        assert "17 of 48 jobs done" in text and 'aria-valuenow="17"' in text
        assert "hpu-1/HPU0" in text
        store.write_file("status.json", "{")
        summary, _ = read_summary(store)
        assert summary.underway is None


# ---------------------------------------------------------------- curves and findings


def one_table(**last: float) -> Table:
    """A table of three batch sizes, of which the last has this interval."""
    night = Night()
    precision_grid(night, sizes=(1, 2, 4), precisions=("bf16",))
    *others, end = night.rows
    (table,) = summarize([*others, replace(end, metrics=replace(end.metrics, **last))]).tables
    return table


def test_error_bars_stay_inside_the_figure() -> None:
    wild = one_table(throughput_low=-1e5, throughput_high=1e6)
    assert not clipped(one_table()) and clipped(wild)
    drawn = throughput_curve(wild, "title")
    (bars,) = re.findall(r'class="bar" d="([^"]+)"', drawn)
    assert "l3 4l3-4" in bars and "l3-4l3 4" in bars
    heights = [float(y) for y in re.findall(r"M[\d.]+ (-?[\d.]+)V", bars)]
    heights += [float(y) for y in re.findall(r"V(-?[\d.]+)", bars)]
    assert all(svg.TOP <= y <= svg.HEIGHT - svg.BOTTOM for y in heights)
    tick = max(float(t.replace(",", "")) for t in re.findall(r'"end">([\d.,]+)<', drawn))
    assert tick < 2000, "the curve is not pressed down by one interval"


def test_terminal_and_markdown_tell_the_findings() -> None:
    night = Night(emulated=False)
    for cards in (1, 2):
        precision_grid(night, cards=cards, sizes=(8, 32), precisions=("bf16", "int8"))
    summary = summarize(night.rows, published=published_figures(), status=STATUS, silent_s=1.0)
    text = printed(summary, 80)
    assert max(map(len, text.splitlines())) <= 80
    for form in (text, to_markdown(summary)):
        assert "Under way: 17 of 48 jobs done" in " ".join(form.split())
        for title in ("What each technique buys", "Scaling over cards", "Share of the card's lim"):
            assert title in form
    document = json.loads(to_json(summary))
    assert document["underway"]["done"] == 17
    assert {line["after"] for line in document["figures"]["techniques"]} == {"int8"}
    assert len(document["figures"]["published"]) == len(published_figures())


# ---------------------------------------------------------------- forms of one model


def rows_of_forms() -> list[Measurement]:
    """A model quantised by a step of the run, as itself and in int8, and a row that is neither."""
    night = Night(emulated=False)
    made = {"save_model": "small", "method": "static", "numbers": "int8", "sparsity": "none"}
    forms = (
        ("trained", "fp32", {"quality_of": "trained"}, 4_000_000),
        ("small", "int8", {"quality_of": "trained", "calibration": "ranges"}, 1_000_000),
        ("another", "fp32", {}, 4_000_000),
    )
    night.add(a_job(workload="quantization", model="trained"), parameters=made)
    for model, precision, parameters, weight_bytes in forms:
        night.add(
            a_job(model=model, precision=precision),
            parameters=parameters,
            weight_bytes=weight_bytes,
            workload_metrics={"quality_top1_agreement": 0.97, "quality_kl": 0.001},
        )
    return night.rows


def forms(summary: Summary) -> Section | None:
    return next((one for one in sections(summary) if one.id == "forms"), None)


def test_each_form_says_how_it_was_made_and_what_it_is_worth() -> None:
    summary = summarize(rows_of_forms())
    section = forms(summary)
    assert section is not None
    trained, small = section.table.rows
    assert trained[:2] == ("trained", "")
    assert small[:2] == ("small", "quantization of trained: method static, numbers int8")
    assert small[2].startswith("int8 ") and small[2].endswith("calibration ranges")
    assert small[3:6] == ("977 KiB", "0.9700", "0.001000")
    assert "±" in small[7] and "trained in fp32" in section.note
    assert 'id="forms"' in render(summary, summary.rows)
    assert "Forms of one model" in to_markdown(summary)
    plain = summarize(rows_of_forms()[-1:])
    assert forms(plain) is None and 'id="forms"' not in render(plain, plain.rows)


# ---------------------------------------------------------------- images

#: A red point.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


def page_of(directory: Path, *rows: Measurement) -> tuple[Store, str]:
    with Store(directory, "night") as store:
        store.append(*rows)
    return store, page_text(store, *read_summary(store))


def test_the_page_shows_the_first_image_of_each_job(tmp_path: Path) -> None:
    first = row(0, image=PNG, random_weights=True)
    store, page = page_of(tmp_path / "with", first, row(1))
    assert f'src="data:image/png;base64,{base64.b64encode(PNG).decode()}"' in page
    assert 'id="images"' in page and "Random weights: they mean nothing" in page
    assert 'id="images"' not in page_of(tmp_path / "without", row(1))[1]
    assert [one.image for one in store.measurements()] == [PNG, None]
    lean = store.measurements(samples=False)
    assert [one.image for one in lean] == [None, None]
    assert [one.image for one in with_raw(store.tables_path, lean, "items", "image")] == [PNG, None]


def test_a_page_carries_so_many_bytes_of_images_and_nothing_else() -> None:
    """Rows come from files that anybody may have written."""
    odd = [row(0, image=b"<script>alert(1)</script>"), row(1, image=b""), row(2)]
    assert images_of(odd)["shown"] == []
    large = PNG + bytes(MOST_BYTES // 2)
    rows = [row(number, image=large) for number in range(3)] + [row(3, image=PNG)]
    images = images_of(rows)
    assert [row.job_id for row, _ in images["shown"]] == [rows[0].job_id, rows[3].job_id]
    assert images["left_out"] == 2 and images["random_weights"] is False


# ---------------------------------------------------------------- profiles

DETAILS = {
    "profile": "2 untimed steps, 4 ms each of operators",
    "profile_operators": "aten::mm 75.0% (4 calls a step); aten::<b> 25.0% (1 calls a step)",
    "profile_copies": "2.0% of the time, 2048 bytes a step",
    "profile_launches": "5 operators a step",
    "profile_trace_bytes": "1234",
}


def test_the_page_links_the_trace_of_each_profile(tmp_path: Path) -> None:
    """Rows come from files that anybody may have written: another place is not linked."""
    first = row(0, details=DETAILS)
    _, page = page_of(tmp_path / "with", first, row(1))
    assert f'<a href="trace-{first.attempt_id}.json.gz" download>' in page
    assert "<li>aten::mm 75.0% (4 calls a step)</li><li>aten::&lt;b&gt; 25.0%" in page
    assert "copies: 2.0% of the time" in page
    assert 'id="profiles"' not in page_of(tmp_path / "without", row(1))[1]
    left_out = {"profile_trace_bytes": "99 are above 10: the trace is left out"}
    odd = [row(0, details=DETAILS | left_out), row(1, details=DETAILS, attempt_id="../../evil")]
    assert [one["trace"] for one in profiles_of(odd)] == ["", ""]
