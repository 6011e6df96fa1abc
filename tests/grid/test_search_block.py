"""The blocks ``search:`` and ``questions:``: their grammar, and that no id depends on them."""

from __future__ import annotations

import pytest

from orchestrator.core.errors import GridError
from orchestrator.grid.objectives import Constraint, Question, SearchSettings
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


def ask(questions: str, search: str = "") -> Grid:
    return read(f"{search or '{}'}\nquestions: {questions}")


def test_questions_are_read_and_change_no_job() -> None:
    grid = ask(
        "[{best: throughput, for: {model: tiny-chatglm3, batch_size: [1, 2]}, subject_to: {ttft_s: "
        '"<= 0.3"}, confidence: 95 %, within: 1 %}, {best: latency_p50_s}]'
    )
    first, second = grid.questions
    assert first == Question(
        best="throughput",
        more_is_better=True,
        about=(("model", ("tiny-chatglm3",)), ("batch_size", (1, 2))),
        constraints=(Constraint(figure="ttft_s", at_most=True, bound=0.3),),
        confidence=0.95,
        within=0.01,
    )
    assert second == Question(best="latency_p50_s", more_is_better=False, confidence=0.9)
    assert all(map(second.covers, grid.jobs())) and str(second) == "Best latency_p50_s"
    plain = parse_grid(GRID.encode(), "g.yaml")
    assert [job.job_id for job in grid.jobs()] == [job.job_id for job in plain.jobs()]


@pytest.mark.parametrize(
    ("search", "stops"),
    [
        ("{}", {"questions": True}),
        ("{stop: {cells: 3}}", {"questions": True, "cells": 3}),
        ("{stop: {questions: false}}", {"questions": False}),
    ],
)
def test_a_search_with_questions_stops_at_them_unless_it_is_to_go_on(
    search: str, stops: dict[str, object]
) -> None:
    settings = ask("[{best: throughput}]", search).search
    assert settings == SearchSettings(objective="throughput", more_is_better=True, **stops)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("question", "message", "hint"),
    [
        ("{best: thruput}", 'called "thruput"', "did you mean throughput?"),
        ("{for: {batch_size: 1}}", "no `best:` here", ""),
        ("{best: throughput, about: {batch_size: 1}}", 'unknown key "about"', "for"),
        ("{best: throughput, for: {modell: x}}", 'unknown key "modell"', "did you mean model?"),
        ("{best: throughput, for: {batch_size: 4}}", "no job has batch_size 4", "there is: 1, 2"),
        ("{best: throughput, confidence: 1.5}", "1.5 is no confidence", "confidence: 0.9"),
        ("{best: throughput, confidence: 10 %}", "is no confidence", "from 0.5"),
        ("{best: throughput, within: 1}", "1 is no within", "within: 1 %"),
    ],
)
def test_a_faulty_question_is_refused_with_its_line(question: str, message: str, hint: str) -> None:
    with pytest.raises(GridError) as refused:
        ask(f"[{question}]")
    (problem,) = refused.value.problems
    assert problem.line == 7
    assert message in problem.message and hint in problem.hint


def test_a_stop_at_questions_needs_some() -> None:
    with pytest.raises(GridError, match="no questions to stop at"):
        read("{stop: {questions: true}}")
