"""Each flag: when it is raised, and what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from measurement_factory import Night, a_job, with_interval
from measurements import row

from orchestrator.analysis.flags import OWN, barred, raised_on
from orchestrator.analysis.summary import summarize
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.report.text import to_markdown
from orchestrator.report.wording import cell
from workloads.base import DIVERGED, NOT_FINITE, NOTHING_LEARNED, ONE_TOKEN


def a_row(
    precision: str = "fp32", cards: int = 1, rate: float = 100.0, **facts: Any
) -> Measurement:
    made = Night().add(a_job(precision=precision, cards=cards))
    return replace(with_interval(made, rate, 1.0), **facts)


@pytest.mark.parametrize(
    ("facts", "disturbed"),
    [
        ({}, False),  # not known, as in old rows
        ({"processor_wait_share": 0.05, "processor_cores": 0.95}, False),
        ({"processor_wait_share": 0.06, "processor_cores": 0.94}, True),
        ({"stolen_share": 0.1, "processor_cores": 1.0}, True),
        ({"stolen_share": 0.1, "processor_cores": 0.02}, False),  # it waits for its card
        ({"processor_wait_share": 0.03, "stolen_share": 0.03, "processor_cores": 4.0}, True),
        ({"processor_wait_share": 0.0, "processor_cores": 0.0, "host_load": 64.0}, False),
        ({"processor_wait_share": 3.0, "oversubscribed": True, "processor_cores": 0.5}, False),
    ],
)
def test_a_row_is_disturbed_by_what_it_lost(facts: dict[str, Any], disturbed: bool) -> None:
    """Waiting while runnable counts, and what a hypervisor took while it ran; sleep does not, nor
    does the wait of its own threads for each other, nor how busy its host was."""
    names = {one.flag.name for one in raised_on([a_row(**facts)])[0]}
    assert ("disturbed" in names) == disturbed


@pytest.mark.parametrize("name", [NOT_FINITE, ONE_TOKEN, DIVERGED, NOTHING_LEARNED])
def test_a_row_that_computed_something_else_ranks_nowhere(name: str) -> None:
    odd = a_row("bf16", rate=200.0, details={name: "what happened"})
    rows = [odd, a_row("fp32"), a_row("fp16", rate=50.0)]
    summary = summarize(rows)
    assert summary.rankings[0].winner == rows[1]
    assert "what happened" in to_markdown(summary)


def test_a_disturbed_row_wins_nothing_and_is_listed() -> None:
    rows = [
        a_row("bf16", rate=200.0, processor_wait_share=0.24, processor_cores=0.76),
        a_row("fp32", rate=100.0, processor_wait_share=0.01, processor_cores=0.99),
        a_row("fp16", rate=50.0),
    ]
    summary = summarize(rows)
    assert summary.rankings[0].winner == rows[1]
    assert "it waited for a processor for 24% of its timed part" in to_markdown(summary)


def test_oversubscribed_gangs_rank_among_gangs_of_their_size() -> None:
    rows = [
        a_row("bf16", 4, oversubscribed=True, threads=1, host_cores=2),
        a_row("fp32", 4, oversubscribed=True, threads=1, host_cores=2, rate=50.0),
        a_row("fp16", 4, oversubscribed=False, rate=10.0),
        a_row("bf16", 8, oversubscribed=True, threads=1, host_cores=2, rate=300.0),
    ]
    summary = summarize(rows)
    assert sorted(ranking.contenders for ranking in summary.rankings) == [1, 1, 2]
    (pair,) = [ranking for ranking in summary.rankings if ranking.contenders == 2]
    assert pair.winner == rows[0]
    assert "4 processes of 1 thread on a host of 2 cores" in to_markdown(summary)


def test_a_row_without_a_complete_repeat_is_drawn_as_such() -> None:
    whole, cut = a_row("fp32"), a_row("bf16", rate=1206.0)
    bare = replace(cut.metrics, repeats=0, throughput_low=None, throughput_high=None)
    summary = summarize([whole, replace(cut, metrics=bare)])
    (table,) = summary.tables
    (size,) = table.columns
    text = cell(table, "bf16", size)
    assert (text.text, text.mark, text.notes) == ("(1,206)", "!", ())
    assert summary.rankings[0].fastest == whole
    assert "no repeat was completed within" in to_markdown(summary)


def reasons(one: Measurement) -> dict[str, str]:
    names = ("not_steady", "compiled_in_timed_part")
    return {r.flag.name: r.reason for r in raised_on([one])[0] if r.flag.name in names}


def drifting(drift: float | None) -> Measurement:
    one = row()
    return replace(one, metrics=replace(one.metrics, drift=drift))


@pytest.mark.parametrize("drift", [None, 0.0, 0.05, -0.05])
def test_a_steady_row_has_neither(drift: float | None) -> None:
    assert reasons(drifting(drift)) == {}
    steady = replace(drifting(drift), warmup_end="complete", shapes=4, shapes_unmet=0)
    assert reasons(replace(steady, timed_parts=2, timed_compilations=0)) == {}


def test_a_warm_up_that_was_cut_is_told_with_its_limit_and_what_it_missed() -> None:
    cut = replace(row(), warmup_end="limit", shapes=4, shapes_unmet=2)
    assert reasons(cut) == {
        "not_steady": "its warm-up was cut by warmup_limit_s (1800 s) before 2 of 4 shapes were met"
    }
    late = reasons(replace(cut, shapes_unmet=0))["not_steady"]
    assert late == "its warm-up was cut by warmup_limit_s (1800 s)"
    assert barred(raised_on([cut])[0])


def test_drift_is_told_with_its_direction() -> None:
    slow = reasons(drifting(0.31))["not_steady"]
    assert "slow beginning makes the timed part 31% slower" in slow and "at most 5%" in slow
    assert "became slower, by 40%" in reasons(drifting(-0.2))["not_steady"]


def test_compilation_in_the_timed_part_is_told_with_its_number() -> None:
    compiled = replace(row(), timed_compilations=3, timed_parts=2)
    reason = reasons(compiled)["compiled_in_timed_part"]
    assert reason.startswith("3 graphs were compiled while it was timed once more")
    once = reasons(replace(compiled, timed_compilations=1, timed_parts=1))
    assert once["compiled_in_timed_part"].startswith("1 graph was compiled while it was timed; ")
    assert barred(raised_on([compiled])[0])
    assert reasons(replace(compiled, state=State.FAILED)) == {}
    assert {"not_steady", "compiled_in_timed_part"} <= {flag.name for flag in OWN}


def of(**changes: object) -> Metrics:
    return replace(row().metrics, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"hump_ratio": 1.3},
            "two_humped: its repeats are of two speeds, one 1.30 times the other",
        ),
        ({"hump_ratio": 1.04}, ""),
        ({"hump_ratio": None}, ""),
    ],
)
def test_what_is_flagged(changes: dict[str, float | None], said: str) -> None:
    raised = raised_on([row(metrics=of(**changes))])[0]
    assert bool(raised) is bool(said) is barred(raised)
    assert not said or str(raised[0]).startswith(said)
