"""A results directory that version 0.1.0 wrote is read with the figures that it reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from orchestrator.report.export import records
from orchestrator.report.run_report import read_summary
from orchestrator.store.store import Store

#: Rows of the states in which a job ends, three with raw samples. ``rows.jsonl`` is what that
#: version's ``report --format json`` said of them.
WRITTEN = Path(__file__).with_name("version_0_1_0")


def test_its_rows_have_the_figures_that_it_reported(tmp_path: Path) -> None:
    rows = tmp_path / "night" / "rows"
    shutil.copytree(WRITTEN, rows, ignore=shutil.ignore_patterns("*.jsonl"))
    summary, _ = read_summary(Store.existing(tmp_path, "night"))
    now = {row["job_id"]: row for row in records(summary.rows)}
    then = [json.loads(line) for line in (WRITTEN / "rows.jsonl").read_text().splitlines()]
    assert len(now) == len(then) == 9
    for row in then:
        assert {name: now[row["job_id"]][name] for name in row} == row
