"""Flags: a row that has one keeps its numbers, ranks nowhere, and is listed with the reason."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from measurement_factory import Night, a_job, precision_grid
from rich.console import Console

from orchestrator.analysis import flags
from orchestrator.analysis.comparison import compare
from orchestrator.analysis.flags import OWN, Flag
from orchestrator.analysis.summary import summarize
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.export import to_csv, to_json
from orchestrator.report.html import render
from orchestrator.report.query import query
from orchestrator.report.text import print_summary, to_markdown
from orchestrator.store.store import Store

ROOT = Path(__file__).resolve().parents[2]

NOISY = Flag(
    name="noisy",
    description="A test's own flag.",
    reason=lambda row: "it was loud" if row.details.get("noise") == "loud" else None,
)
CROWDED = Flag(
    name="crowded",
    description="Another one, with a league.",
    reason=lambda row: "it was full" if row.details.get("noise") == "full" else None,
    league=lambda row: f"crowded with {row.cards} cards",
)


@pytest.fixture(autouse=True)
def own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "every_flag", lambda: (NOISY, CROWDED))


def grid(**details: str) -> list[Measurement]:
    night = Night()
    precision_grid(night, precisions=("bf16", "fp16"), sizes=(1, 8))
    fastest = max(night.rows, key=lambda row: row.metrics.throughput or 0.0)
    return [replace(row, details=details) if row is fastest else row for row in night.rows]


def test_every_flag_is_declared_once_and_says_what_it_means() -> None:
    names = [flag.name for flag in OWN]
    assert names == sorted(set(names)) and "suspect" in names
    for flag in OWN:
        assert flag.description.endswith(".") and "\n" not in flag.description


def test_a_flagged_row_ranks_nowhere_and_is_listed() -> None:
    calm, loud = summarize(grid()), summarize(grid(noise="loud"))
    (flagged,) = loud.flagged
    ((row, reason),) = flagged.rows
    assert calm.rankings[0].fastest.job_id == row.job_id and reason == "it was loud"
    assert loud.rankings[0].fastest.job_id != row.job_id
    assert loud.rankings[0].contenders == calm.rankings[0].contenders - 1
    (table,) = loud.tables
    assert (
        row in table.cells.values() and row.job_id not in table.best and row.job_id in table.flagged
    )
    assert row.job_id in {one.job_id for one in (*calm.fronts[0].best, *calm.fronts[0].beaten)}
    assert row.job_id not in {one.job_id for one in (*loud.fronts[0].best, *loud.fronts[0].beaten)}
    used = {p.row.job_id for e in loud.effects for p in e.pairs}
    assert row.job_id not in used | {p.base.job_id for e in loud.effects for p in e.pairs}
    assert row.state is State.SUCCEEDED and loud.counts[State.SUCCEEDED] == len(loud.rows)


def test_rows_of_a_league_rank_among_their_like() -> None:
    summary = summarize(grid(noise="full"))
    leagues = {one.setting.league: one.contenders for one in summary.rankings}
    assert leagues == {"": 3, "crowded with 1 cards": 1}
    assert [one.flag.name for one in summary.flagged] == ["crowded"]


def test_every_output_names_flag_and_reason(tmp_path: Path) -> None:
    rows = grid(noise="loud")
    summary = summarize(rows)
    assert "it was loud" in render(summary, rows) and "it was loud" in to_markdown(summary)
    told = json.loads(to_json(summary))
    (flagged,) = told["flagged"]
    assert flagged["flag"] == "noisy" and flagged["rows"][0]["reason"] == "it was loud"
    assert sorted({row["flags"] for row in told["rows"]}) == ["", "noisy: it was loud"]
    assert "noisy: it was loud" in to_csv(summary)
    console = Console(file=io.StringIO(), width=120)
    print_summary(summary, console)
    assert "it was loud" in console.file.getvalue()
    with Store.open(tmp_path, rows[0].run) as store:
        for row in rows:
            store.append(row)
    answer = query(tmp_path, "SELECT job_id, flags FROM jobs WHERE flags IS NOT NULL")
    assert answer.rows == ((flagged["rows"][0]["job_id"], "noisy: it was loud"),)


def test_a_flagged_row_is_not_compared() -> None:
    night = Night()
    row = night.add(a_job())
    loud = replace(row, details={"noise": "loud"})
    for before, after in ((row, loud), (loud, row), (loud, loud)):
        comparison = compare([before], [after])
        assert not comparison.changes and comparison.refused[0].differences[0].key == "flags"
    assert compare([row], [loud], allow=frozenset({"flags"})).changes
    full = replace(row, details={"noise": "full"})
    assert compare([full], [full]).changes and compare([row], [full]).refused


def test_the_guide_lists_every_flag() -> None:
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    for flag in OWN:
        ranks = "nowhere" if flag.league is None else "among their like"
        assert f"| `{flag.name}` | {flag.description.rstrip('.')} | {ranks} |" in text
