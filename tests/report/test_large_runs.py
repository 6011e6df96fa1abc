"""Runs of a hundred thousand rows: work that grows with the rows, and pages that do not."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from measurement_factory import Night, a_job, every_state, large_run
from measurements import from_table

from orchestrator.analysis.summary import summarize
from orchestrator.core.job import State
from orchestrator.report import html, interactive
from orchestrator.report.export import document, json_parts, to_json
from orchestrator.report.html import render
from orchestrator.report.run_report import page_text, read_summary
from orchestrator.store import reader
from orchestrator.store.reader import with_raw
from orchestrator.store.store import Store

# ---------------------------------------------------------------- how the work grows


def calls(act: Callable[[], object]) -> int:
    """Count the functions that are called, those in C included: a measure that no load changes."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def rows_of_all_kinds(count: int) -> list[Any]:
    """Rows in groups of two, in one table, and failed with as many causes."""
    night = Night()
    for number in range(count):
        for precision in ("bf16", "fp16"):
            parameters = (("output_tokens", 16 + number),)
            night.add(a_job(precision=precision, parameters=parameters), items=1)
        night.add(a_job(dataset="table", batch_size=1 + number), items=0)
        failed = a_job(dataset="failed", batch_size=1 + number)
        night.add(failed, State.LOST, final=False)
        word = "".join(chr(97 + int(digit)) for digit in str(number))
        night.add(failed, State.FAILED, attempt=2, reason=f"no {word}")
    return night.rows


@pytest.mark.slow
def test_the_work_grows_with_the_rows() -> None:
    def report(rows: list[Any]) -> None:
        summary = summarize(rows)
        render(summary, rows)
        to_json(summary)

    few, many = rows_of_all_kinds(25), rows_of_all_kinds(100)
    report(few)  # imports and templates are loaded once
    assert calls(lambda: report(many)) < 4.4 * calls(lambda: report(few))


def test_rows_are_counted_by_the_names_of_their_files() -> None:
    names = ("rows-250-3-{}.parquet", "ab-1-{}.parquet", ".x.partial", "note.txt")
    assert reader.about_how_many(name.format("0" * 16) for name in names) == 251
    assert reader.about_how_many([f"rows-2-{'0' * 16}.parquet"]) == 1000


# ---------------------------------------------------------------- the page of a large run


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A run that is large where thirty rows are ordinary, in a compacted file and some others."""
    monkeypatch.setattr(html, "ORDINARY_ROWS", 30)
    monkeypatch.setattr(reader, "ROWS_TOGETHER", 25)
    monkeypatch.setattr(html, "MOST_SHOWN", 2)
    rows = [*large_run(160, items=3), *every_state(items=2)]
    with Store(tmp_path, "overnight") as store:
        store.append(*rows[:60])
        store.append(*rows[60:120])
        store.compact()
        store.append(*rows[120:])
        yield store


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r"<script[^>]*application/json[^>]*>(.*?)</script>", page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_a_large_run_is_read_lean_and_says_the_same(large: Store) -> None:
    whole, every = read_summary(large)
    lean, rows = read_summary(large, lean=True)
    assert len(rows) == len(every) and not any(row.items or row.samples for row in rows)
    assert document(lean) == document(whole)
    filled = {row.job_id: row.items for row in with_raw(large.tables_path, lean.rows, "items")}
    assert filled == {row.job_id: row.items for row in whole.rows} and any(filled.values())


@pytest.mark.slow
def test_rows_read_in_batches_are_those_of_one_look(large: Store) -> None:
    whole = from_table(reader.read_rows(large.tables_path).table())
    assert large.measurements() == whole
    first = min(large.tables_path.glob("*.parquet"))
    again = first.with_name(first.name.replace("rows-", "rows-9", 1))
    again.write_bytes(first.read_bytes())
    assert large.measurements() == whole
    again.unlink()
    first.write_bytes(first.read_bytes()[:-20])
    contents = large.read()
    assert [damage.path for damage in contents.damaged] == [first]
    assert 0 < len(contents.measurements) < len(whole)


def test_the_page_of_a_large_run_says_what_it_leaves_out(large: Store) -> None:
    summary, rows = read_summary(large, lean=True)
    page = page_text(large, summary, rows)
    assert f"30 of {len(summary.rows)} rows are in this page" in page
    assert f"{len(summary.tables) - 2} more tables are left out" in page
    data = data_of(page)
    assert data["count"] == 30 and len(data["columns"]["job_id"]["v"]) == 30
    listed = set(data["columns"]["job_id"]["v"])
    assert {r.job_id for r in summary.rows if r.state is State.FAILED} <= listed
    assert set(data["scatter"]["row"]) <= set(range(30)) and data["scatter"]["total"] > 10
    linked = {int(number) for number in re.findall(r'data-row="(\d+)"', page)}
    assert linked and linked <= set(range(30))
    assert f"<dd>{len(summary.rows)}</dd>" in page, "the figures at the top count all rows"


def test_spans_of_a_moment_are_drawn_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = large_run(400, items=0)
    timeline = summarize(rows).timeline

    def spans() -> list[tuple[str, str]]:
        drawn = interactive.cards_figure(timeline, "cards", lambda row: ["x"])
        return re.findall(r'<rect class="s-(\w+)".*? data-tip="(?:(\d+) jobs)?', drawn)

    whole = spans()
    monkeypatch.setattr(interactive, "MOST_SPANS", 60)
    merged = spans()
    assert sum(int(jobs or 1) for _, jobs in merged) == len(whole) > 2 * len(merged)
    assert {state for state, _ in merged} == {state for state, _ in whole}


# ---------------------------------------------------------------- JSON in parts


@pytest.mark.parametrize("rows", [[], every_state(items=1), large_run(40)], ids=["0", "few", "40"])
def test_json_in_parts_is_json(rows: list[Any]) -> None:
    summary = summarize(rows)
    text = "".join(json_parts(summary))
    wanted = json.dumps(document(summary), allow_nan=False)
    assert json.dumps(json.loads(text)) == wanted and text == to_json(summary) and text.isascii()
    assert text.count('\n{"schema_version":') == len(summary.rows)
    assert all(len(part) < 20_000 for part in json_parts(summary))
