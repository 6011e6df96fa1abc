"""The report in a terminal, as Markdown, CSV and JSON; and how numbers and hostile text are put."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurement_factory import HOSTILE, Night, a_job, every_state, printed

from orchestrator.analysis.summary import STATES, Summary, summarize
from orchestrator.core.job import State
from orchestrator.report.export import to_csv, to_json
from orchestrator.report.html import render
from orchestrator.report.text import MOST_TABLES, to_markdown
from orchestrator.util import format as units


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarize(every_state(items=1))


@pytest.mark.parametrize("width", [80, 60, 120])
def test_no_line_is_wider_than_the_terminal(summary: Summary, width: int) -> None:
    assert max(map(len, printed(summary, width).splitlines())) <= width


def test_a_failure_writes_no_control_codes(summary: Summary) -> None:
    text = printed(summary, colour=True)
    assert "\x1b[31mansi" not in text
    assert "\\x1b[31mansi" in text and "[red]markup[/red]" in text
    assert not set(printed(summary)) & set("\x1b\x00")


@pytest.mark.parametrize("form", [printed, to_markdown, lambda one: render(one, one.rows)])
def test_every_form_shows_every_state_and_figure(
    summary: Summary, form: Callable[[Summary], str]
) -> None:
    text = form(summary)
    for state in State:
        if state.terminal and state is not State.SUCCEEDED:
            assert STATES[state].short in text
    for row in summary.rows:
        if row.state is State.SUCCEEDED:
            assert units.number(row.metrics.throughput) in text
    assert "synStatus=26" in text and "hpu-1:smoke/logs" in text
    assert "provisional best" in text


def test_what_the_terminal_leaves_out_it_counts() -> None:
    night = Night()
    for number in range(MOST_TABLES + 1):
        night.add(a_job(dataset=f"data-{number}"), items=0)
    assert "and 1 more table; the page has all of them" in printed(summarize(night.rows))


def test_a_damaged_file_is_reported_everywhere() -> None:
    summary = summarize([Night().add(a_job())], ["torn.parquet (too short)"])
    for text in (printed(summary), to_markdown(summary), to_json(summary)):
        assert "torn.parquet" in text


def test_empty_runs_have_every_form() -> None:
    summary = summarize([])
    for text in (printed(summary), to_markdown(summary), render(summary, [])):
        assert "No row has been written yet." in text
    assert json.loads(to_json(summary))["rows"] == []
    assert to_csv(summary).strip() == ""


def test_csv_has_one_line_a_job_and_computes_nothing() -> None:
    rows = every_state(items=1)
    rows.append(replace(rows[-1], job_id="f" * 16, reason="=HYPERLINK(1)"))
    summary = summarize(rows)
    read = list(csv.DictReader(io.StringIO(to_csv(summary))))
    assert [line["job_id"] for line in read] == [row.job_id for row in summary.rows]
    assert {line["emulated"] for line in read} == {"true"}
    assert read[-1]["reason"] == "'=HYPERLINK(1)"
    assert float(read[0]["throughput"]) == pytest.approx(summary.rows[0].metrics.throughput)
    assert read[0]["parameters.output_tokens"] == "128"


def test_numbers_that_are_not_finite_become_null() -> None:
    row = Night().add(a_job())
    row = replace(row, metrics=replace(row.metrics, ttft_s=float("nan"), cpu_s=float("inf")))
    (read,) = json.loads(to_json(summarize([row])))["rows"]
    assert read["ttft_s"] is None and read["cpu_s"] is None


def test_markdown_is_not_torn_by_hostile_text(summary: Summary) -> None:
    text = to_markdown(summary)
    # Tails stand as indented code, where nothing has a meaning.
    prose = [line for line in text.splitlines() if not line.startswith("      ")]
    assert not any("<script" in line.replace("\\<", "") for line in prose)
    for line in prose:
        if line.startswith("| ") and "fp32" in line and "chatglm3" not in line:
            assert line.replace("\\|", "").count("|") == line.count("|")


@given(st.text())
def test_visible_text_has_no_control_characters_and_a_tail_keeps_its_end(text: str) -> None:
    cut = units.tail("\n".join(f"line {n}" for n in range(100)), 100)
    assert cut.endswith("line 99") and cut.startswith("…\nline ")
    shown = units.visible(text + HOSTILE)
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)
    assert "\u2028" not in shown and "\u202e" not in units.visible("\u202e")
    shown.encode("utf-8")


@given(st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=8))
def test_script_json_cannot_end_its_element_and_reads_back(value: object) -> None:
    text = units.script_json([value, "</script><!--"])
    assert not set(text) & set("<>&\u2028\u2029")
    lone = json.dumps([value, "</script><!--"]).encode("utf-8")
    expected = json.loads(lone)
    if "\\ud" not in lone.decode():
        assert json.loads(text) == expected


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (units.seconds, None, "–"),
        (units.seconds, 0, "0 s"),
        (units.seconds, 4.7e-5, "47.0 µs"),
        (units.seconds, 0.0123, "12.3 ms"),
        (units.seconds, 0.99999, "1.00 s"),
        (units.seconds, 59.99, "1 min 00 s"),
        (units.seconds, 3599.7, "1 h 00 min"),
        (units.seconds, 7384, "2 h 03 min"),
        (units.seconds, 200_000, "2 d 08 h"),
        (units.seconds, float("nan"), "–"),
        (units.size, None, "–"),
        (units.size, 1023, "1023 B"),
        (units.size, 1024, "1.00 KiB"),
        (units.size, 6.5 * 2**30, "6.50 GiB"),
        (units.duration, 0.2, "0s"),
        (units.duration, 61, "1m01s"),
        (units.duration, 3600, "1h00m"),
        (units.duration, -3, "0s"),
    ],
)
def test_times_and_sizes_are_written_in_their_unit(
    form: Callable[[float | None], str], value: float | None, text: str
) -> None:
    assert form(value) == text


@given(st.floats(1e-6, 1e15))
def test_numbers_keep_four_figures(value: float) -> None:
    assert float(units.number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-4)
