"""The check of intervals itself: what it says of runs whose truth is known."""

from __future__ import annotations

import random

import pytest

from benchmarks.intervals import Told, coverage
from workloads.util.statistics import ALIKE, Spread, mean_interval, nested_interval


def runs(
    between: float, within: float, *, joined: bool, night: float = 0.0, known: Spread = ALIKE
) -> list[dict[str, Told]]:
    """Ten runs of 200 cells in three processes of six repeats; or of the first process alone.
    ``night`` is what a run has in common, by cell, and ``known`` what intervals are made with."""
    chance = random.Random(f"{between} {within}")
    found = []
    for _ in range(10):
        told: dict[str, Told] = {}
        for cell in range(200):
            means, errors, first = [], [], None
            common = chance.gauss(0, night)
            for _ in range(3):
                level = 100 * (cell + 1) * (1 + common + chance.gauss(0, between))
                one = mean_interval([level * (1 + chance.gauss(0, within)) for _ in range(6)])
                assert one is not None
                means.append(one.mean)
                errors.append((one.high - one.low) / 2 / 2.571)
                first = first or one
            made = nested_interval(means, errors, runs=known) if joined else first
            assert made is not None
            told[str(cell)] = (made.mean, made.low, made.high)
        found.append(told)
    return found


@pytest.mark.parametrize(("between", "within"), [(0.0, 0.02), (0.02, 0.02), (0.05, 0.005)])
def test_intervals_over_processes_cover_the_mean_of_the_other_runs(
    between: float, within: float
) -> None:
    """94.5 % as they are, 95 % widened by the error of that mean: of 2,000 pairs."""
    found = runs(between, within, joined=True)
    plain, pairs = coverage(found)
    widened, _ = coverage(found, (10 / 9) ** 0.5)
    assert pairs == 2000
    assert 0.92 <= plain <= widened <= 0.97


def test_what_a_run_has_in_common_is_covered_only_where_it_is_known() -> None:
    """Each run's processes agree with each other, and runs do not."""
    told = {"between": 0.03, "within": 0.01, "joined": True, "night": 0.03}
    blind, _ = coverage(runs(**told))  # type: ignore[arg-type]
    seeing, _ = coverage(runs(**told, known=Spread(deviation=0.03, values=10)))  # type: ignore[arg-type]
    assert blind < 0.87 and 0.93 < seeing < 0.99


def test_intervals_within_one_process_do_not() -> None:
    """Where processes differ by more than repeats do."""
    share, _ = coverage(runs(0.05, 0.005, joined=False))
    assert share < 0.3


def test_coverage_by_hand() -> None:
    """Three runs of a cell: 10 ± 1 does not cover 13.5, 12 ± 3 covers 12.5, 15 ± 4 covers 11."""
    told = [(10.0, 9.0, 11.0), (12.0, 9.0, 15.0), (15.0, 11.0, 19.0)]
    assert coverage([{"a": one} for one in told]) == (2 / 3, 3)
