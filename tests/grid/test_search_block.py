"""The ``search:`` block: its grammar, its diagnostics, and that no job's id depends on it."""

from __future__ import annotations

import pytest

from orchestrator.core.errors import GridError
from orchestrator.grid.objectives import Constraint, SearchSettings
from orchestrator.grid.parser import Grid, parse_grid

GRID = """
name: g
defaults: {workload: text-generation, model: tiny-chatglm3}
experiments:
  - {name: a, axes: {batch_size: [1, 2]}}
"""


def read(search: str) -> Grid:
    return parse_grid(f"{GRID}search: {search}\n".encode(), "g.yaml")


def test_a_search_block_is_read_and_changes_no_job() -> None:
    grid = read(
        '{objective: throughput, subject_to: {ttft_s: "<= 0.5", quality_top1_agreement: ">=0.99", '
        'peak_memory_bytes: "<= 0.9 card"}, stop: {hours: 6, cells: 25 %, within: 2%}, keep: front}'
    )
    assert grid.search == SearchSettings(
        objective="throughput",
        more_is_better=True,
        constraints=(
            Constraint(figure="ttft_s", at_most=True, bound=0.5),
            Constraint(figure="quality_top1_agreement", at_most=False, bound=0.99),
            Constraint(figure="peak_memory_bytes", at_most=True, bound=0.9, of_card=True),
        ),
        hours=6,
        cells=0.25,
        cells_are_share=True,
        within=0.02,
        front=True,
    )
    plain = parse_grid(GRID.encode(), "g.yaml")
    assert plain.search is None
    assert [job.job_id for job in grid.jobs()] == [job.job_id for job in plain.jobs()]


def test_a_search_without_a_stop_ends_within_two_percent() -> None:
    assert read("{}").search == SearchSettings(
        objective="throughput", more_is_better=True, within=0.02
    )
    latency = read("{objective: latency_p50_s, stop: {cells: 40}}").search
    assert latency == SearchSettings(objective="latency_p50_s", more_is_better=False, cells=40)


@pytest.mark.parametrize(
    ("search", "message", "hint"),
    [
        ("{objective: thruput}", 'called "thruput"', "did you mean throughput?"),
        ('{subject_to: {ttft: "<= 1"}}', 'called "ttft"', "did you mean ttft_s?"),
        ('{subject_to: {ttft_s: "< 1"}}', "is not a bound", '"<= 0.5"'),
        ("{subject_to: {ttft_s: 0.5}}", "is not a bound", '"<= 0.5"'),
        ('{subject_to: {ttft_s: "<= 0"}}', "is not a bound", "above 0"),
        ('{subject_to: {ttft_s: "<= 1.1.1"}}', "is not a bound", "above 0"),
        ('{subject_to: {ttft_s: "<= 0.9 card"}}', "a card has no amount", "peak_memory_bytes"),
        ("{stop: {hour: 6}}", 'unknown key "hour"', "did you mean hours?"),
        ("{stop: {hours: true}}", "is no hours to stop at", "hours: 6"),
        ("{stop: {cells: 200 %}}", "is no cells to stop at", "25 %"),
        ("{stop: {within: 0.02}}", "is no within to stop at", "2 %"),
        ("{keep: fronts}", '"fronts"', "did you mean front?"),
        ("{objectives: throughput}", 'unknown key "objectives"', "did you mean objective?"),
    ],
)
def test_a_faulty_search_block_is_refused_with_its_line(
    search: str, message: str, hint: str
) -> None:
    with pytest.raises(GridError) as refused:
        read(search)
    (problem,) = refused.value.problems
    assert problem.line == 6
    assert message in problem.message and hint in problem.hint
