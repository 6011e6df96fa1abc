"""The best rows by the figures of a workload, each in the direction that the figure declares."""

from __future__ import annotations

import io
from dataclasses import replace
from math import isclose

from hypothesis import given
from hypothesis import strategies as st
from measurement_factory import Night, a_job
from rich.console import Console

from orchestrator.analysis.rankings import Leader
from orchestrator.analysis.summary import summarize
from orchestrator.core.measurement import Measurement
from orchestrator.report.export import document
from orchestrator.report.html import render
from orchestrator.report.text import print_summary, to_markdown

PRECISIONS = ("fp32", "bf16", "fp16", "int8")


def verified(name: str, values: list[float]) -> list[Measurement]:
    """One row a precision, the fastest first, each with a value of one figure."""
    night = Night()
    rows = [
        night.add(a_job(workload="verification", precision=precision, parameters=()))
        for precision in PRECISIONS[: len(values)]
    ]
    return [
        replace(row, workload_metrics={name: value})
        for row, value in zip(rows, values, strict=True)
    ]


def leaders(rows: list[Measurement]) -> tuple[Leader, ...]:
    (ranking,) = summarize(rows).rankings
    return ranking.leaders


values = st.lists(st.floats(0, 1e6), min_size=2, max_size=4)


@given(values=values, higher=st.booleans())
def test_the_leader_is_the_best_in_the_declared_direction(
    values: list[float], higher: bool
) -> None:
    name = "compared_tokens" if higher else "largest_logit_difference"
    found = leaders(verified(name, values))
    best = max(values) if higher else min(values)
    alike = sum(isclose(best, value, rel_tol=0.01) for value in values)
    if alike == len(values):
        assert not found
        return
    (leader,) = found
    assert leader.metric.name == name
    assert leader.value == best == leader.row.workload_metrics[name]
    assert leader.tied == alike - 1


def test_a_figure_without_a_better_way_names_nobody() -> None:
    assert not leaders(verified("logit_spread", [1.0, 2.0]))
    assert not leaders(verified("of_nobody", [1.0, 2.0]))
    nan = float("nan")
    assert not leaders(verified("mean_logit_difference", [1.0, nan]))
    (leader,) = leaders(verified("mean_logit_difference", [nan, 2.0, 1.0]))
    assert leader.value == 1.0


def test_every_form_of_the_report_names_the_leader() -> None:
    rows = verified("largest_logit_difference", [0.5, 0.75, 0.125])
    summary = summarize(rows)
    (ranking,) = summary.rankings
    (leader,) = ranking.leaders
    assert leader.row is not ranking.fastest
    out = io.StringIO()
    print_summary(summary, Console(file=out, width=200))
    words = f"best largest logit difference {summary.chosen(leader.row)}: 0.1250"
    for text in (out.getvalue(), to_markdown(summary), render(summary, rows)):
        assert words in text.replace("difference: ", "difference ")
    (best,) = document(summary)["best"]  # type: ignore[misc]
    assert [(one["job_id"], one["better"]) for one in best["best_by_figure"]] == [
        (leader.row.job_id, "lower")
    ]
