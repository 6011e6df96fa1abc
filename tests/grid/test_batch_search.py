"""The search for the largest batch size that fits."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.scheduling.batch_search import largest_fit, next_probe


def search(limit: int, cap: int) -> tuple[int | None, list[int]]:
    """The answer for a device on which sizes up to ``limit`` fit, and the probes it took."""
    history: dict[int, bool] = {}
    probes = []
    while (size := next_probe(history, cap)) is not None:
        assert size not in history, "a size is never probed twice"
        probes.append(size)
        history[size] = size <= limit
    return largest_fit(history), probes


def test_it_doubles_then_bisects() -> None:
    """From 1 up until one does not fit, then between the last that did and the first that did
    not."""
    assert search(limit=11, cap=1024) == (11, [1, 2, 4, 8, 16, 12, 10, 11])


def test_nothing_fits() -> None:
    """Even a batch of one is too much: one probe, no answer."""
    assert search(limit=0, cap=1024) == (None, [1])


def test_the_cap_is_tried_and_not_exceeded() -> None:
    """A cap between powers of two is probed itself."""
    assert search(limit=10_000, cap=48) == (48, [1, 2, 4, 8, 16, 32, 48])


@given(limit=st.integers(0, 5000), cap=st.integers(1, 4096))
def test_it_finds_the_largest_that_fits(limit: int, cap: int) -> None:
    """For every device and cap the answer is exact, in logarithmically many probes."""
    found, probes = search(limit, cap)
    assert found == (min(limit, cap) or None)
    assert all(1 <= size <= cap for size in probes)
    assert len(probes) <= 2 * ceil(log2(cap + 1)) + 1
    assert sum(size > limit for size in probes) <= ceil(log2(cap + 1)) + 1


@given(limit=st.integers(1, 500), better=st.integers(1, 500))
def test_a_later_misfit_lowers_the_answer(limit: int, better: int) -> None:
    """A measurement that runs out of memory where its probe had fitted takes the answer back."""
    history = dict.fromkeys(range(1, limit + 1), True)
    history[min(better, limit)] = False
    assert (largest_fit(history) or 0) < min(better, limit)
    assert next_probe(history, 1024) is None or next_probe(history, 1024) < better


def test_a_cap_below_one_is_refused() -> None:
    """There is no batch of nothing."""
    with pytest.raises(ValueError, match="at least 1, not 0"):
        next_probe({}, 0)
