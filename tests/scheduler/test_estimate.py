"""Estimates from past rows."""

from __future__ import annotations

from functools import partial
from math import exp
from random import Random

import pytest
from core_cases import a_past_row
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import job

from orchestrator.core.job import MAX, State
from orchestrator.scheduler.estimator import PRIOR_LOAD_S, SEARCH_FACTOR, Estimator
from workloads.base import MeasureSettings

row = partial(a_past_row, load_s=5.0)


def test_the_same_job_is_the_best_witness() -> None:
    this, other = job("this"), job("other")
    history = [row(this, 25), row(this, 45), row(this, 35), *[row(other, 500)] * 9]
    estimate = Estimator.from_history(history).estimate(this)
    assert (estimate.load_s, estimate.run_s, estimate.total_s) == (5, 30, 35)


def test_next_best_is_the_nearest_batch_size_of_the_configuration() -> None:
    history = [
        row(job("x", batch_size=1), 15),
        row(job("x", batch_size=8), 105),
        row(job("x", batch_size=16, precision="int8"), 905),
    ]
    assert Estimator.from_history(history).estimate(job("y", batch_size=16)).run_s == 100


def test_then_the_same_workload_and_model() -> None:
    history = [row(job("x", precision="bf16"), 65)]
    estimate = Estimator.from_history(history).estimate(job("y", precision="int4"))
    assert (estimate.load_s, estimate.run_s) == (5, 60)


def test_the_prior_lies_between_the_fewest_repeats_and_the_time_limit() -> None:
    short = job(measure=MeasureSettings(time_limit_s=10))
    long = job(measure=MeasureSettings(time_limit_s=1000))
    estimator = Estimator()
    assert 0 < estimator.estimate(short).run_s < 10
    assert estimator.estimate(short).run_s < estimator.estimate(long).run_s < 1000
    assert estimator.estimate(long).load_s == PRIOR_LOAD_S


@pytest.mark.parametrize(
    "changes",
    [{"state": State.FAILED}, {"final": False}, {"busy_s": None}],
    ids=["failed", "probe or retry", "no time"],
)
def test_rows_that_say_nothing_about_duration_are_left_out(changes: dict[str, object]) -> None:
    history = [row(job(), **{"busy_s": 1.0} | changes)]
    assert Estimator.from_history(history).estimate(job()) == Estimator().estimate(job())


def test_a_resident_model_says_nothing_about_loading() -> None:
    history = [*[row(job("x"), 30, load_s=0.0)] * 2, row(job("z"), 50, load_s=20.0)]
    estimate = Estimator.from_history(history).estimate(job("x"))
    assert (estimate.load_s, estimate.run_s) == (20, 30)


def test_rows_of_emulated_cards_can_be_kept_out() -> None:
    history = [row(job(), 500, emulated=True), row(job(), 50, emulated=False)]
    assert Estimator.from_history(history, emulated=False).estimate(job()).run_s == 45


def test_a_search_for_the_largest_batch_takes_longer_than_one_measurement() -> None:
    estimator = Estimator.from_history([row(job("x", batch_size=4), 25)])
    assert estimator.estimate(job("y", batch_size=MAX)).run_s == SEARCH_FACTOR * 20


def test_the_history_is_read_once() -> None:
    one_pass = (row(job("x"), 25.0) for _ in range(1000))
    estimate = Estimator.from_history(one_pass).estimate(job("x"))
    assert (estimate.load_s, estimate.run_s) == (5, 20)


def test_equal_settings_are_nearer_than_another_length() -> None:
    short, long = (("output_tokens", 16),), (("output_tokens", 128),)
    history = [
        row(job("x", parameters=short, batch_size=4), 15, parameters=short),
        row(job("x", parameters=long, batch_size=4), 105, parameters=long),
    ]
    estimator = Estimator.from_history(history)
    assert estimator.estimate(job("y", parameters=short, batch_size=8)).run_s == 10
    assert estimator.estimate(job("y", parameters=long, batch_size=8)).run_s == 100


def test_a_search_that_was_measured_before_searches_again() -> None:
    this = job("x", batch_size=MAX)
    estimator = Estimator.from_history([row(this, 25, batch_size=8)])
    assert estimator.estimate(this).run_s == SEARCH_FACTOR * 20


def test_the_nearer_the_rows_the_smaller_the_margin() -> None:
    fast, slow = (("output_tokens", 8),), (("output_tokens", 9),)
    known = Estimator.from_history(
        [row(job("x", batch_size=4, parameters=fast), 25, parameters=fast)]
    )
    margins = [
        known.estimate(each).margin
        for each in (
            job("x", batch_size=4, parameters=fast),
            job("y", batch_size=8, parameters=fast),
            job("y", batch_size=8, parameters=slow),
            job("y", precision="int4"),
        )
    ]
    assert margins == sorted(margins) and len(set(margins)) == 4


@pytest.mark.slow
@given(spread=st.floats(0.0, 0.5), seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_the_margin_covers_nine_of_ten(spread: float, seed: int) -> None:
    """Whatever the scatter of the rows, of those that follow few exceed what was foretold."""
    random = Random(seed)
    exceeded = 0
    for _ in range(5):  # one history of few rows may mislead; the law is of many
        times = [60 * random.lognormvariate(0, spread) for _ in range(400)]
        estimator = Estimator.from_history([row(job("x"), seconds + 5) for seconds in times[:200]])
        estimate = estimator.estimate(job("x"))
        exceeded += sum(seconds > estimate.run_s * estimate.margin for seconds in times[200:])
        assert estimate.margin <= 1.1 * exp(2.5 * spread)
    assert exceeded <= 0.2 * 5 * 200


def test_learning_within_a_run_is_learning_from_its_rows() -> None:
    sizes = [(1, 20.0), (4, 35.0), (8, 61.0), (4, 33.0)]
    told = Estimator()
    for size, seconds in sizes:
        this = job("x", batch_size=size)
        told.learn(this.job_id, this, load_s=5.0, run_s=seconds)
    read = Estimator.from_history(
        [row(job("x", batch_size=size), seconds + 5) for size, seconds in sizes]
    )
    for this in (job("x", batch_size=4), job("y", batch_size=2), job("z", batch_size=MAX)):
        assert told.estimate(this) == read.estimate(this)
