"""Steadiness of series of step times: drifting, two-humped, constant, with outliers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.bench.warmup import LEAST_STEPS, TOLERANCE, Step, drift


def of(times: list[float], tokens: float = 64.0) -> list[Step]:
    return [Step("a", seconds, tokens) for seconds in times]


def noisy(times: list[float], seed: int, spread: float = 0.01) -> list[float]:
    draw = random.Random(seed)
    return [time * draw.uniform(1 - spread, 1 + spread) for time in times]


lengths = st.integers(LEAST_STEPS, 40)
seeds = st.integers(0, 10_000)
scales = st.floats(1e-4, 1e3)


@given(count=lengths, seconds=scales, seed=seeds)
def test_constant_steps_are_steady(count: int, seconds: float, seed: int) -> None:
    assert drift(of([seconds] * count)) == 0
    assert drift(of(noisy([seconds] * count, seed))) == 0


@given(count=st.integers(6, 40), factor=st.floats(2, 10), seconds=scales, seed=seeds)
def test_steps_that_change_their_speed_all_the_time_drift_with_a_sign(count, factor, seconds, seed):
    """A series that falls evenly from ``factor`` to 1 has no steady part; one that rises is of a
    card that throttles, and no warm-up ends it."""
    times = [seconds * (1 + (factor - 1) * n / (count - 1)) for n in range(count)]
    slower, faster = drift(of(noisy(times, seed))), drift(of(noisy(times[::-1], seed)))
    assert faster is not None and faster > TOLERANCE
    assert count < 12 or (slower is not None and slower < -TOLERANCE)


@given(count=lengths, slow=st.integers(1, 4), factor=st.floats(2, 100), seconds=scales, seed=seeds)
def test_a_slow_beginning_is_found_and_its_cost_told(count, slow, factor, seconds, seed) -> None:
    slow = min(slow, count // 2)
    times = [seconds * factor] * slow + [seconds] * (count - slow)
    cost = slow * (factor - 1) / count
    found = drift(of(noisy(times, seed)))
    assert found is not None
    if cost > 1.5 * TOLERANCE:
        assert found == pytest.approx(cost, rel=0.1)
    elif cost < TOLERANCE / 1.5:
        assert found == 0


@given(count=st.integers(4, 40), at=st.integers(1, 39), factor=st.floats(0.1, 100), seed=seeds)
def test_one_outlier_after_the_first_step_is_no_drift(count, at, factor, seed) -> None:
    times = [1.0] * count
    times[min(at, count - 1)] = factor
    assert drift(of(noisy(times, seed))) == 0


def test_two_humps_are_no_drift_unless_one_comes_first() -> None:
    """Steps that jump between two values at random are steady in 97 of 100 series of 20; those
    that are slow first and fast then are not."""
    draw = random.Random(1)
    series = [[draw.choice((1.0, 1.5)) for _ in range(20)] for _ in range(300)]
    assert sum(drift(of(noisy(times, n))) != 0 for n, times in enumerate(series)) <= 9
    found = drift(of(noisy([1.5] * 10 + [1.0] * 10, 0)))
    assert found is not None and found > TOLERANCE


@given(seed=seeds, count=lengths, factor=st.floats(2, 50))
def test_steps_of_many_shapes_are_compared_by_shape_or_by_token(seed, count, factor) -> None:
    tokens = [64.0 * (count - n) for n in range(count)]  # shrinking
    once = [Step(n, 1e-3 * size, size) for n, size in enumerate(tokens)]
    assert drift(once) == 0
    assert drift([*once, once[-1]]) == 0
    twice = [Step(n % 2, 1.0 + n % 2, 1.0) for n in range(2 * count)]
    assert drift(twice) == 0
    slow = [Step(once[0].shape, factor * once[0].seconds, once[0].tokens), *once[1:]]
    found = drift(slow)
    assert found is not None
    assert found > 0 or (factor - 1) / count < 1.2 * TOLERANCE


@pytest.mark.parametrize("times", [[1.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [1.0] * 2])
def test_times_of_nothing_and_of_few_steps_say_nothing(times: list[float]) -> None:
    assert drift(of(times)) is None
