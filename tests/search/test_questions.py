"""Answers to questions: how likely a measured setting is the best, and what would change that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from search_cases import cells, figures

from orchestrator.core.job import Job, State
from orchestrator.core.measurement import Doubt
from orchestrator.core.status import Answered
from orchestrator.grid.objectives import Constraint, Question, SearchSettings
from orchestrator.search.order import SearchOrder

JOBS = cells("tiny")
BEST = Question(best="throughput", more_is_better=True)
QUICK = Constraint(figure="latency_p50_s", at_most=True, bound=0.02)


def answered(
    question: Question,
    known: Mapping[Job, Doubt | State],
    values: Mapping[Job, float] | None = None,
) -> Answered:
    order = SearchOrder(JOBS, None, seed=0, questions=[question])
    for one, doubt in known.items():
        if isinstance(doubt, State):
            order.know(one.job_id, doubt, {})
        else:
            changed = {"throughput": values[one]} if values and one in values else {}
            order.know(one.job_id, State.SUCCEEDED, figures(one) | changed, doubt)
    (answer,) = order.answers()
    return answer


def exactly(*deviations: float) -> Doubt:
    names = ("throughput", "latency_p50_s")
    return Doubt(dict.fromkeys(names, deviations[0] if deviations else 0.001))


def test_the_best_of_all_measured_cells_is_certain() -> None:
    answer = answered(BEST, dict.fromkeys(JOBS, exactly()))
    assert answer.job.startswith("bf16") and "128" in answer.job
    assert answer.reached and answer.probability > 0.999
    assert (answer.measured, answer.predicted, answer.unknown) == (24, 0, 0)
    assert answer.lead == pytest.approx(
        figures(JOBS[15])["throughput"] / figures(JOBS[14])["throughput"] - 1
    )
    assert answer.changes == ()


def test_two_cells_alike_share_the_probability_and_a_tolerance_settles_it() -> None:
    first, second = JOBS[14], JOBS[15]
    values = {first: 3000.0, second: 3000.0 * 1.0001}
    known = dict.fromkeys(JOBS, exactly(0.01))
    answer = answered(BEST, known, values)
    assert 0.45 < answer.probability < 0.55 and not answer.reached
    assert len(answer.changes) == 1 and "measured at 3,000" in answer.changes[0]
    assert answered(replace(BEST, within=0.05), known, values).reached


def test_the_probability_is_that_of_draws() -> None:
    values = {one: 100.0 + at for at, one in enumerate(JOBS)}
    answer = answered(BEST, dict.fromkeys(JOBS, exactly(0.02)), values)
    draws = np.random.default_rng(0).normal(np.log(list(values.values())), 0.02, (200_000, 24))
    assert answer.probability == pytest.approx((draws.argmax(axis=1) == 23).mean(), abs=0.005)


def test_a_limit_rules_out_cells_and_a_close_one_is_named() -> None:
    question = replace(BEST, constraints=(QUICK,))
    known = dict.fromkeys(JOBS, exactly())
    answer = answered(question, known)
    keeping = [one for one in JOBS if figures(one)["latency_p50_s"] <= QUICK.bound]
    assert answer.value == pytest.approx(max(figures(one)["throughput"] for one in keeping))
    best = max(keeping, key=lambda one: figures(one)["throughput"])
    close = replace(QUICK, bound=figures(best)["latency_p50_s"] * 1.001)
    named = answered(replace(BEST, constraints=(close,)), dict.fromkeys(JOBS, exactly(0.01)))
    assert "latency_p50_s" in named.changes[0] and "is close to <=" in named.changes[0]


@pytest.mark.parametrize("searched", [False, True])
def test_a_limited_figure_may_be_0(searched: bool) -> None:
    """No request failed, or none was in time: there is no log of that, and it is known."""
    best, second = sorted(JOBS, key=lambda job: -figures(job)["throughput"])[:2]
    limits = (
        Constraint(figure="error_share", at_most=True, bound=0.01),
        Constraint(figure="within_slo", at_most=False, bound=0.9),
    )
    question = replace(BEST, constraints=limits)
    search = SearchSettings(objective="throughput", more_is_better=True, constraints=limits)
    order = SearchOrder(JOBS, search if searched else None, seed=0, questions=[question])
    for job in JOBS:
        seen = {"error_share": 0.0, "within_slo": 0.0 if job is best else 1.0}
        order.know(job.job_id, State.SUCCEEDED, figures(job) | seen, exactly())
    (answer,) = order.answers()
    assert answer.job_id == second.job_id and answer.reached and answer.unknown == 0
    found = order.answer()
    assert found is not None and order.cells[found.row] == [second]


def test_no_setting_keeps_an_impossible_limit() -> None:
    question = replace(BEST, constraints=(replace(QUICK, bound=1e-6),))
    answer = answered(question, dict.fromkeys(JOBS, exactly()))
    assert answer.job == "" and answer.reached and answer.probability > 0.999
    assert answer.sentence.startswith("no measured setting keeps the limits")


def test_a_lower_bound_may_be_better_and_is_the_answer_only_at_what_was_seen() -> None:
    slow = JOBS[14]
    disturbed = Doubt(exactly().deviations, {"throughput": 1.0})
    known = dict.fromkeys(JOBS, exactly()) | {slow: disturbed}
    answer = answered(BEST, known)
    assert "128" in answer.job and not answer.reached and "(a lower bound)" in answer.changes[0]
    fast = answered(BEST, known, {slow: 30_000.0})
    assert fast.job_id == slow.job_id and fast.bound == "at least" and fast.reached


def test_a_flagged_row_says_nothing_of_its_setting() -> None:
    known = dict.fromkeys(JOBS, exactly()) | {JOBS[15]: Doubt(flags="x", usable=False)}
    answer = answered(BEST, known, {JOBS[15]: 1e9})
    assert answer.value < 1e6 and (answer.measured, answer.predicted) == (23, 1)
    flagged = answered(BEST, known | {JOBS[15]: Doubt(flags="incomplete")})
    assert "64" in flagged.job and (flagged.measured, flagged.flagged) == (23, 1)
    assert not flagged.reached and "128, predicted at" in flagged.changes[0]


def test_unmeasured_cells_are_predicted_or_not_known_and_failed_ones_are_out() -> None:
    some = {one: exactly() for one in JOBS[:12]} | {JOBS[23]: State.OUT_OF_MEMORY}
    answer = answered(BEST, some)
    assert (answer.measured, answer.predicted, answer.failed) == (12, 11, 1)
    assert not answer.reached
    assert any("predicted at" in text for text in answer.changes)
    strange = Constraint(figure="quality_kl", at_most=True, bound=1.0)
    assert answered(replace(BEST, constraints=(strange,)), some).unknown == 23
    few = {one: exactly() for one in JOBS[14:16]}
    assert not answered(replace(BEST, confidence=0.5), few).reached


def test_a_question_is_about_its_settings_only() -> None:
    question = replace(BEST, about=(("precision", ("fp32", "int8")), ("batch_size", (8,))))
    answer = answered(question, dict.fromkeys(JOBS, exactly()))
    assert answer.measured == 2 and answer.value == pytest.approx(figures(JOBS[19])["throughput"])
    assert answer.question == "Best throughput for precision fp32 or int8, batch_size 8"


def test_less_may_be_better() -> None:
    question = Question(best="latency_p50_s", more_is_better=False)
    answer = answered(question, dict.fromkeys(JOBS, exactly()))
    assert answer.value == pytest.approx(min(figures(one)["latency_p50_s"] for one in JOBS))


def test_a_second_measurement_of_a_winner_is_averaged_and_widens_the_doubt() -> None:
    order = SearchOrder(JOBS, None, seed=0, questions=[BEST])
    for one in JOBS:
        order.know(one.job_id, State.SUCCEEDED, figures(one), exactly())
    (before,) = order.answers()
    again = {"throughput": before.value * 0.9}
    order.know(before.job_id, State.SUCCEEDED, again, exactly(), again=True)
    (after,) = order.answers()
    assert after.probability < before.probability
    assert order.answers()[0].times in (1, 2)
    worse = Doubt(exactly().deviations, {"throughput": 1.0})
    order.know(before.job_id, State.SUCCEEDED, {"throughput": 1.0}, worse, again=True)
    assert order.answers() == (after,)


def test_of_two_lower_bounds_the_less_disturbed_counts_and_none_beside_an_exact_figure() -> None:
    order = SearchOrder(JOBS[:1], None, seed=0, questions=[BEST])
    (one,) = JOBS[:1]

    def value_after(throughput: float, better_by: float) -> float:
        doubt = Doubt(exactly().deviations, {"throughput": better_by} if better_by else {})
        order.know(one.job_id, State.SUCCEEDED, {"throughput": throughput}, doubt, again=True)
        return order.answers()[0].value

    assert value_after(728.0, 0.5) == pytest.approx(728.0)
    assert value_after(389.0, 0.9) == pytest.approx(728.0)
    assert value_after(780.0, 0.2) == pytest.approx(780.0)
    assert value_after(800.0, 0.0) == pytest.approx(800.0)


def test_a_best_setting_that_hardly_is_the_best_is_called_the_best_so_far() -> None:
    disturbed = Doubt(exactly().deviations, {"throughput": 3.0})
    values = dict.fromkeys(JOBS, 100.0)
    answer = answered(BEST, dict.fromkeys(JOBS, disturbed), values)
    assert answer.probability < 0.05 and ", the best so far, and the best with" in answer.sentence


def test_a_figure_that_no_row_has_is_said() -> None:
    question = Question(best="latency_p95_s", more_is_better=False)
    answer = answered(question, dict.fromkeys(JOBS, exactly()))
    assert answer.sentence.startswith("no measured setting has all figures of the question")


def test_a_second_measurement_may_lack_the_figure() -> None:
    question = Question(best="latency_p50_s", more_is_better=False)
    order = SearchOrder(JOBS, None, seed=0, questions=[question])
    for one in JOBS:
        order.know(one.job_id, State.SUCCEEDED, figures(one), exactly())
    (before,) = order.answers()
    order.know(before.job_id, State.SUCCEEDED, {"throughput": 9.0}, exactly(), again=True)
    (after,) = order.answers()
    assert (after.job_id, after.times, after.apart) == (before.job_id, 1, 0.0)
