"""Flags: when each is raised, that a flagged row keeps its numbers, and where it ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measurement_factory import Night, a_job, precision_grid, printed, with_interval
from measurements import row

from orchestrator.analysis.comparison import compare, differences
from orchestrator.analysis.flags import OWN, barred, raised_on
from orchestrator.analysis.summary import summarize
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.export import to_csv, to_json
from orchestrator.report.html import render
from orchestrator.report.query import query
from orchestrator.report.text import to_markdown
from orchestrator.report.wording import cell
from orchestrator.store.store import Store
from workloads.base import DIVERGED, NOT_FINITE, NOTHING_LEARNED, ONE_TOKEN, OTHER_OUTPUTS

ROOT = Path(__file__).resolve().parents[2]


def reasons(one: Measurement) -> dict[str, str]:
    return {raised.flag.name: raised.reason for raised in raised_on([one])[0]}


def with_metrics(**changes: object) -> Measurement:
    return row(metrics=replace(row().metrics, **changes))


CUT = {"warmup_end": "limit", "shapes": 4}
WARM = {"warmup_end": "complete", "shapes": 4, "shapes_unmet": 0, "timed_parts": 2}


@pytest.mark.parametrize(
    ("one", "flag", "reason"),
    [
        # Unknown facts, as in old rows, and figures at their limits raise nothing.
        (row(), "", ""),
        *((with_metrics(drift=drift), "", "") for drift in (0.0, 0.05, -0.05)),
        (replace(with_metrics(drift=0.05), **WARM, timed_compilations=0), "", ""),
        *((with_metrics(hump_ratio=ratio), "", "") for ratio in (None, 1.04)),
        (row(state=State.FAILED, timed_compilations=3), "", ""),
        (
            row(**CUT, shapes_unmet=2),
            "not_steady",
            "its warm-up was cut by warmup_limit_s (1800 s) before 2 of 4 shapes were met",
        ),
        (
            row(**CUT, shapes_unmet=0),
            "not_steady",
            "its warm-up was cut by warmup_limit_s (1800 s)",
        ),
        (
            with_metrics(drift=0.31),
            "not_steady",
            "a slow beginning makes the timed part 31% slower; at most 5% is steady",
        ),
        (
            with_metrics(drift=-0.2),
            "not_steady",
            "its steps became slower, by 40% from the first half to the second; "
            "at most 5% is steady",
        ),
        (
            row(timed_compilations=3, timed_parts=2),
            "compiled_in_timed_part",
            "3 graphs were compiled while it was timed once more; a steady row compiles none",
        ),
        (
            row(timed_compilations=1, timed_parts=1),
            "compiled_in_timed_part",
            "1 graph was compiled while it was timed; a steady row compiles none",
        ),
        (
            with_metrics(hump_ratio=1.3),
            "two_humped",
            "its repeats are of two speeds, one 1.30 times the other",
        ),
    ],
)
def test_a_flag_is_raised_for_a_reason(one: Measurement, flag: str, reason: str) -> None:
    assert reasons(one) == ({flag: reason} if flag else {})
    assert barred(raised_on([one])[0]) is bool(flag)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, ""),  # not known, as in old rows
        ({"processor_wait_share": 0.05, "processor_cores": 0.95}, ""),
        (
            {"processor_wait_share": 0.0501, "processor_cores": 0.95},
            "it waited for a processor for 5.01% of its timed part; the most is 5%",
        ),
        (
            {"processor_wait_share": 1.37, "processor_cores": 0.63},
            "its 2 busy threads waited for a processor for 68% of its timed part each; "
            "the most is 2.5%",
        ),
        (
            {"processor_wait_share": 0.03, "stolen_share": 0.04, "processor_cores": 1.0},
            "it waited for a processor for 3% of its timed part and 4% of the host's processor "
            "time was stolen; the most is 5% together",
        ),
        (
            {"stolen_share": 0.1, "processor_cores": 1.0},
            "10% of the host's processor time was stolen; the most is 5%",
        ),
        ({"stolen_share": 0.1, "processor_cores": 0.02}, ""),  # it waits for its card
        ({"processor_wait_share": 0.0, "processor_cores": 0.0, "host_load": 64.0}, ""),
        ({"processor_wait_share": 3.0, "oversubscribed": True, "processor_cores": 0.5}, ""),
    ],
)
def test_a_row_is_disturbed_by_what_it_lost(facts: dict[str, Any], reason: str) -> None:
    """Waiting while runnable counts, and what a hypervisor took while it ran; sleep does not, nor
    does the wait of its own threads for each other, nor how busy its host was. No share exceeds
    the whole, or is said to equal its limit."""
    assert reasons(row(emulated=True, **facts)).get("disturbed", "") == reason


@pytest.mark.parametrize(
    ("details", "disturbed"),
    [
        ({}, True),  # not known
        ({"utilization_percent_mean": "97", "card_readings": "20"}, False),
        ({"utilization_percent_mean": "90", "card_readings": "20"}, True),  # it waited for 10 %
        ({"utilization_percent_mean": "97", "card_readings": "2"}, True),  # too few to know
        # 300 launches take its host 3 ms of a step of 10 ms, 2,000 all of it.
        ({"profile": "2 untimed steps, 10 ms each of kernels"}, True),
        *(
            (
                {
                    "profile": "2 untimed steps, 10 ms each of kernels",
                    "profile_launches": f"{launches} kernels a step",
                },
                launches == 2000,
            )
            for launches in (300, 2000)
        ),
    ],
)
def test_a_real_card_is_held_up_only_where_it_waits_for_its_host(
    details: dict[str, str], disturbed: bool
) -> None:
    facts = {"processor_wait_share": 0.3, "processor_cores": 0.7, "details": details}
    assert ("disturbed" in reasons(row(emulated=False, **facts))) == disturbed
    assert "disturbed" in reasons(row(emulated=True, **facts))


def a_row(precision: str, cards: int = 1, rate: float = 100.0, **facts: Any) -> Measurement:
    night_row = Night().add(a_job(precision=precision, cards=cards))
    return replace(with_interval(night_row, rate, 1.0), **facts)


@pytest.mark.parametrize(
    "detail",
    [NOT_FINITE, ONE_TOKEN, DIVERGED, NOTHING_LEARNED, OTHER_OUTPUTS],
    ids=lambda detail: str(detail),
)
def test_a_row_of_other_work_wins_nothing_and_is_listed(detail: str) -> None:
    unlike = a_row("bf16", rate=200.0, details={detail: "what happened"})
    rows = [unlike, a_row("fp32"), a_row("fp16", rate=50.0)]
    summary = summarize(rows)
    assert summary.rankings[0].winner == rows[1]
    assert "what happened" in to_markdown(summary)


def test_a_contended_row_ranks_as_a_lower_bound_in_every_output() -> None:
    slowed = a_row("bf16", rate=200.0, processor_wait_share=0.24, processor_cores=0.76)
    rows = [slowed, a_row("fp32"), a_row("fp16", rate=50.0)]
    summary = summarize(rows)
    (ranking,), (table,) = summary.rankings, summary.tables
    assert ranking.winner == slowed and ranking.at_least(slowed)
    assert cell(table, "bf16", table.columns[0]).text == "≥ 200.0"
    page = render(summary, rows)
    for text in (printed(summary), to_markdown(summary), page):
        plain = " ".join(text.replace("\\", "").split())
        assert "with at least 200.0 tokens/s" in plain and "≥ 200.0" in plain
        assert "it waited for a processor for 24% of its timed part" in plain
    assert '"at_least":{"v":[1,null,null]}' in page
    document = json.loads(to_json(summary))
    assert [row["throughput_is"] for row in document["rows"]] == ["at least", "", ""]
    assert ",at least," in to_csv(summary)
    front = page[page.index('id="fronts"') :].partition("</section>")[0]
    assert "lowest latency first, 1 of them a lower bound; 2 other settings beaten" in front
    assert '<td class="n">at most ' in front and '<td class="n">≥ 200.0 ' in front
    points = document["figures"]["throughput-against-latency"]
    assert [point["throughput_is"] for point in points] == ["at least", "", ""]
    assert {effect.ratio.side for effect in summary.effects} == {"at most"}  # bf16 is the baseline
    (refused,) = compare([a_row("bf16")], [slowed]).refused
    assert [one.key for one in refused.differences] == ["flags"]


def test_oversubscribed_gangs_rank_among_gangs_of_their_size() -> None:
    full = {"oversubscribed": True, "threads": 1, "host_cores": 2}
    rows = [
        a_row("bf16", 4, **full),
        a_row("fp32", 4, **full, rate=50.0),
        a_row("fp16", 4, oversubscribed=False, rate=10.0),
        a_row("bf16", 8, **full, rate=300.0),
    ]
    summary = summarize(rows)
    assert sorted(len(ranking.ranked) for ranking in summary.rankings) == [1, 1, 2]
    (pair,) = [ranking for ranking in summary.rankings if len(ranking.ranked) == 2]
    assert pair.winner == rows[0]
    assert "4 processes of 1 thread on a host of 2 cores" in to_markdown(summary)
    said = "runs are compared without them, but for those that rank among their like"
    assert said in render(summary, rows) and compare(rows[:1], rows[:1]).changes


def test_a_row_without_a_complete_repeat_is_drawn_as_such() -> None:
    whole, cut = a_row("fp32"), a_row("bf16", rate=1206.0)
    bare = replace(cut.metrics, repeats=0, throughput_low=None, throughput_high=None)
    summary = summarize([whole, replace(cut, metrics=bare)])
    (table,) = summary.tables
    text = cell(table, "bf16", table.columns[0])
    assert (text.text, text.mark, text.notes) == ("(1,206)", "!", ())
    assert summary.rankings[0].fastest == whole
    assert "no repeat was completed within" in to_markdown(summary)


def test_every_flag_is_declared_once_and_is_in_the_guide() -> None:
    names = [flag.name for flag in OWN]
    assert names == sorted(set(names)) and "suspect" in names
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    for flag in OWN:
        assert flag.description.endswith(".") and "\n" not in flag.description
        assert f"| `{flag.name}` | {flag.description.rstrip('.')} | {flag.ranks} |" in text


COMPILED = {"timed_compilations": 3}
REASON = "3 graphs were compiled while it was timed; a steady row compiles none"


def grid(**facts: Any) -> list[Measurement]:
    """A table of two precisions, whose fastest row has these facts."""
    night = Night()
    precision_grid(night, precisions=("bf16", "fp16"), sizes=(1, 8))
    fastest = max(night.rows, key=lambda row: row.metrics.throughput or 0.0)
    return [replace(row, **facts) if row is fastest else row for row in night.rows]


def test_a_flagged_row_ranks_nowhere_and_is_listed() -> None:
    calm, loud = summarize(grid()), summarize(grid(**COMPILED))
    (flagged,) = loud.flagged
    ((row, reason),) = flagged.rows
    assert calm.rankings[0].fastest.job_id == row.job_id and reason == REASON
    assert loud.rankings[0].fastest.job_id != row.job_id
    assert len(loud.rankings[0].ranked) == len(calm.rankings[0].ranked) - 1
    (table,) = loud.tables
    assert row in table.cells.values()
    assert row.job_id in table.flagged - table.best
    for summary, there in ((calm, True), (loud, False)):
        on_fronts = {one.job_id for f in summary.fronts for one in (*f.best, *f.beaten)}
        pairs = [pair for effect in summary.effects for pair in effect.pairs]
        compared = {one.job_id for pair in pairs for one in (pair.row, pair.base)}
        assert (row.job_id in on_fronts, row.job_id in compared) == (there, there)
    assert row.state is State.SUCCEEDED and loud.counts[State.SUCCEEDED] == len(loud.rows)


def test_every_output_names_flag_and_reason(tmp_path: Path) -> None:
    rows = grid(**COMPILED)
    summary = summarize(rows)
    document = json.loads(to_json(summary))
    (flagged,) = document["flagged"]
    name = "compiled_in_timed_part"
    assert flagged["flag"] == name and flagged["rows"][0]["reason"] == REASON
    assert sorted({row["flags"] for row in document["rows"]}) == ["", f"{name}: {REASON}"]
    for text in (render(summary, rows), to_markdown(summary), printed(summary), to_csv(summary)):
        assert REASON in " ".join(text.replace("\\", "").split())
    with Store(tmp_path, rows[0].run) as store:
        store.append(*rows)
    answer = query(tmp_path, "SELECT job_id, flags FROM jobs WHERE flags IS NOT NULL")
    assert answer.rows == ((flagged["rows"][0]["job_id"], f"{name}: {REASON}"),)


def test_a_flagged_row_is_not_compared() -> None:
    calm = Night().add(a_job())
    loud = replace(calm, **COMPILED)
    full = replace(calm, oversubscribed=True, threads=1, host_cores=2)
    for before, after in ((calm, loud), (loud, calm), (loud, loud)):
        comparison = compare([before], [after])
        assert not comparison.changes and comparison.refused[0].differences[0].key == "flags"
    assert compare([calm], [loud], allow=frozenset({"flags"})).changes
    assert compare([full], [full]).changes and compare([calm], [full]).refused


def test_two_contents_of_one_name_are_told_apart() -> None:
    took = [{"took": f"model files-{name}, dataset files-0"} for name in ("aaaaaaaa", "bbbbbbbb")]
    old, new = a_row("bf16", rate=200.0, details=took[0]), a_row("fp32", details=took[1])
    assert len(summarize([old, replace(new, details=took[0])]).rankings) == 1
    summary = summarize([old, new])
    assert len(summary.rankings) == 2
    ends = {row.model.rpartition(" (")[2] for row in summary.rows}
    assert ends == {"files aaaaaa)", "files bbbbbb)"}
    changed = replace(old, details=took[1])
    assert [one.key for one in differences(old, changed)[0]] == ["files"]
    assert not differences(old, replace(old, details={}))[0]


def test_records_that_were_left_out_have_a_banner() -> None:
    rows = [a_row("bf16", details={"data": "1 of 31 records are left out"}), a_row("fp32")]
    (banner,) = [one for one in summarize(rows).banners if one.name == "Records left out"]
    assert (banner.count, banner.of) == (1, 2)
