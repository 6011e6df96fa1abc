"""Student-t intervals and percentiles against tables and laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.util.statistics import (
    mean_interval,
    nested_interval,
    percentile,
    samples_needed,
    student_t_quantile,
    tail_percentile,
)

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20)


@pytest.mark.parametrize(
    ("probability", "expected"),
    [
        (0.975, {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 30: 2.042, 100_000: 1.960}),
        (0.995, {5: 4.032}),
        (0.95, {19: 1.729}),
        (0.9995, {3: 12.924}),
        (0.5, {7: 0.0}),
    ],
)
def test_quantiles_are_those_of_printed_tables(
    probability: float, expected: dict[int, float]
) -> None:
    quantiles = {n: student_t_quantile(probability, n) for n in expected}
    assert quantiles == pytest.approx(expected, abs=6e-4)


@given(VALUES, st.floats(0.5, 0.99))
def test_interval_holds_its_mean_and_grows_with_confidence(
    values: list[float], confidence: float
) -> None:
    narrow, wide = mean_interval(values, confidence), mean_interval(values, 0.995)
    assert narrow is not None and wide is not None
    assert narrow.low <= narrow.mean <= narrow.high
    assert wide.low <= narrow.low and narrow.high <= wide.high


@settings(max_examples=200)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    ours = percentile(values, percent)
    assert ours == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)
    assert ours is not None and min(values) <= ours <= max(values)


@settings(max_examples=25, deadline=None)
@given(
    between=st.sampled_from([0.0, 0.002, 0.01, 0.05]),
    within=st.sampled_from([0.002, 0.01, 0.05]),
    processes=st.integers(2, 6),
    repeats=st.integers(2, 12),
    seed=st.integers(0, 2**32),
)
def test_the_nested_interval_covers_whatever_the_two_parts_are(
    between: float, within: float, processes: int, repeats: int, seed: int
) -> None:
    """Of 2,000 simulated cells 90 to 98 % of the 95 % intervals hold the true mean: a share of 95 %
    is off by 1 point one time in twenty."""
    chance = np.random.default_rng(seed)
    effects = 1 + between * chance.standard_normal((2000, processes, 1))
    values = effects + within * chance.standard_normal((2000, processes, repeats))
    means = values.mean(axis=2)
    errors = values.std(axis=2, ddof=1) / repeats**0.5
    covered = 0
    for mean, error in zip(means.tolist(), errors.tolist(), strict=True):
        found = nested_interval(mean, error)
        assert found is not None
        covered += found.low <= 1.0 <= found.high
    assert 0.90 <= covered / 2000 <= 0.98


def test_samples_that_a_percentile_needs() -> None:
    assert [samples_needed(p, 0.95) for p in (50, 90, 95, 99, 99.9)] == [5, 29, 59, 299, 2995]
    assert samples_needed(99, 0.99) == 459
    for percent, level in ((90.0, 0.9), (95.0, 0.95), (99.0, 0.99)):
        needed = samples_needed(percent, level)
        assert 1 - (percent / 100) ** needed >= level > 1 - (percent / 100) ** (needed - 1)
    assert tail_percentile([1.0] * 58, 95) is None and tail_percentile([1.0] * 59, 95) == 1.0
    with pytest.raises(ValueError):
        samples_needed(100)
