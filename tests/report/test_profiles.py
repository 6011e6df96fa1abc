"""Profiles in the report: the dearest operators, and a link to the trace beside the page."""

from __future__ import annotations

from pathlib import Path

from measurements import row

from orchestrator.report.html import profiles_of
from orchestrator.report.run_report import page_text, read_summary
from orchestrator.store.store import Store

DETAILS = {
    "profile": "2 untimed steps, 4 ms each of operators",
    "profile_operators": "aten::mm 75.0% (4 calls a step); aten::<b> 25.0% (1 calls a step)",
    "profile_copies": "2.0% of the time, 2048 bytes a step",
    "profile_launches": "5 operators a step",
    "profile_trace_bytes": "1234",
}


def test_the_page_links_the_trace_of_each_profile(tmp_path: Path) -> None:
    with Store.open(tmp_path, "night") as store:
        first = row(0, details=DETAILS)
        store.append(first, row(1))
    text = page_text(store, *read_summary(store))
    assert f'<a href="trace-{first.attempt_id}.json.gz" download>' in text
    assert "<li>aten::mm 75.0% (4 calls a step)</li><li>aten::&lt;b&gt; 25.0%" in text
    assert "copies: 2.0% of the time" in text
    with Store.open(tmp_path, "other") as store:
        store.append(row(0))
    assert 'id="profiles"' not in page_text(store, *read_summary(store))


def test_a_trace_that_was_left_out_or_lies_elsewhere_is_not_linked() -> None:
    """Rows come from files that anybody may have written."""
    large = row(
        0, details=DETAILS | {"profile_trace_bytes": "99 are above 10: the trace is left out"}
    )
    odd = row(1, details=DETAILS, attempt_id="../../evil")
    assert [one["trace"] for one in profiles_of([large, odd])] == ["", ""]
