"""Laws of the headline, on generated tables of contended, flagged, tied and single rows."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measurement_factory import Night, a_job, with_interval

from orchestrator.analysis.rankings import Verdict
from orchestrator.analysis.summary import summarize
from orchestrator.core.measurement import Measurement
from orchestrator.report.export import document
from orchestrator.report.wording import MOST_CONTENDERS, answers


@dataclass(frozen=True, slots=True)
class Case:
    """A row as generated: rate, half of its interval as a share, waiting, and graphs compiled."""

    rate: float
    half: float | None
    waited: float | None
    compiled: int


CASES = st.builds(
    Case,
    rate=st.sampled_from([100.0, 101.0, 150.0]) | st.floats(1.0, 1000.0),
    half=st.none() | st.sampled_from([0.0, 0.002, 0.05, 0.4]),
    waited=st.sampled_from([None, 0.0, 0.04, 0.0502, 0.3, 0.8, 1.37]),
    compiled=st.sampled_from([0, 0, 0, 0, 1]),
)
TABLES = st.lists(CASES, min_size=1, max_size=9)


@cache
def bare_rows() -> list[Measurement]:
    night = Night(emulated=True)
    for size in (1, 2, 4):
        for precision in ("fp32", "bf16", "fp16"):
            night.add(a_job(precision=precision, batch_size=size), items=0)
    return night.rows


def rows_of(table: list[Case]) -> list[Measurement]:
    rows = []
    for bare, case in zip(bare_rows(), table, strict=False):
        half = None if case.half is None else case.half * case.rate
        row = with_interval(bare, case.rate, half)
        cores = None if case.waited is None else max(0.1, 1.0 - case.waited)
        facts = {"processor_wait_share": case.waited, "processor_cores": cores}
        rows.append(replace(row, timed_compilations=case.compiled, **facts))
    return rows


def contended(row: Measurement) -> bool:
    return (row.processor_wait_share or 0.0) > 0.05


def low(row: Measurement) -> float:
    value = row.metrics.throughput_low
    return (row.metrics.throughput or 0.0) if value is None else value


def high(row: Measurement) -> float:
    """The most that the row is known to reach."""
    if contended(row):
        return inf
    value = row.metrics.throughput_high
    return (row.metrics.throughput or 0.0) if value is None else value


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(TABLES, st.randoms(use_true_random=False))
def test_the_headline_obeys_its_laws(table: list[Case], chance: random.Random) -> None:
    rows = rows_of(table)
    eligible = [row for row in rows if not row.timed_compilations]
    summary = summarize(rows)
    sentences = answers(summary)
    if not eligible:
        assert sentences[0].startswith("Nothing can be ranked")
        return

    (ranking,), text = summary.rankings, sentences[0]
    best = ranking.fastest
    others = [row for row in eligible if row is not best]
    assert best in eligible and summary.chosen(best) in text
    assert not any(low(row) > high(best) for row in others)
    assert "is fastest: tied" not in text
    assert ("at least" in text.split(":")[0]) == contended(best)

    if "is fastest" in text:
        assert best.metrics.throughput_low is not None
        for row in others:
            waited, cores = row.processor_wait_share or 0.0, row.processor_cores or 0.0
            kept = max(1.0 - waited, cores / max(1, ceil(waited)))
            regained = (row.metrics.throughput or 0.0) / kept
            reach = regained if contended(row) else high(row)
            assert reach < low(best), "a row that may be as fast stops a win"
        again = []
    elif others:
        assert "provisional best" in text
        single = [r for r in eligible if r.metrics.throughput_low is None]
        reached = [row for row in others if high(row) >= low(best)]
        assert reached or single, "what is slower for certain leaves nothing open"
        again = [row for row in summary.rankings[0].first if contended(row)]
        assert ("--retry-flagged" in text) == bool(again)
    else:
        assert "nothing to compare with" in text
        again = []

    found = document(summary)["best"][0]
    assert (found["throughput_is"] == "at least") == contended(best)
    assert found["measure_again_job_ids"] == [row.job_id for row in again]

    shuffled = list(rows)
    chance.shuffle(shuffled)
    assert answers(summarize(shuffled)) == sentences


@dataclass(frozen=True, slots=True)
class Truth:
    """A row's rate on a quiet machine, the share of it that was measured, and half its interval."""

    rate: float
    kept: float  # 1: nothing else ran
    half: float  # as a share


TRUTHS = st.builds(
    Truth,
    rate=st.sampled_from([100.0, 104.0, 150.0]) | st.floats(50.0, 200.0),
    kept=st.just(1.0) | st.floats(0.2, 0.94),
    half=st.sampled_from([0.002, 0.05]),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(TRUTHS, min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_no_answer_leaves_out_the_fastest_of_a_quiet_machine(
    table: list[Truth], chance: random.Random
) -> None:
    """A contended row lost its share of the processor's time, or less; the intervals of others hold
    their rates. The winner, or one of those that the headline names, is the fastest."""
    cases = [
        Case(
            truth.rate * truth.kept ** chance.uniform(0.5, 1.0)
            if truth.kept < 1
            else truth.rate * (1 + chance.uniform(-0.9, 0.9) * truth.half),
            truth.half,
            1 - truth.kept,
            0,
        )
        for truth in table
    ]
    rows = rows_of(cases)
    summary = summarize(rows)
    (ranking,), text = summary.rankings, answers(summary)[0]
    _, fastest = max(zip((truth.rate for truth in table), range(len(rows)), strict=True))
    named = ranking.first or (ranking.fastest,)
    assert rows[fastest].job_id in {row.job_id for row in named}, text
    head = text.split(" is the provisional best ")[0].split(" is fastest ")[0]
    if len(named) > MOST_CONTENDERS:
        assert f"or one of {len(named) - 1} others" in head
    else:
        assert set(head.replace(" or ", ", ").split(", ")) == {summary.chosen(r) for r in named}


@pytest.mark.parametrize(
    ("rate", "waited", "verdict"),
    [
        (60, 0.1, Verdict.CLEAR_WINNER),
        (80, 0.1, Verdict.PROVISIONAL),
        (20, 0.34, Verdict.PROVISIONAL),
    ],
)
def test_a_row_that_waited_little_is_no_rival_of_one_much_faster(
    rate: float, waited: float, verdict: Verdict
) -> None:
    """Others slow it by more than its wait only while they run: by 1.43 where it waited 10 %; one
    that waited for a third may be as much faster as any."""
    rows = rows_of([Case(100.0, 0.01, None, 0), Case(rate, 0.01, waited, 0)])
    (ranking,) = summarize(rows).rankings
    assert ranking.verdict is verdict
