"""Trends and humps in repeats: found where they are, hardly ever where they are not."""

from __future__ import annotations

import math
import random

import pytest
from measurements import sample

from orchestrator.analysis.samples import metrics_of
from orchestrator.analysis.series import (
    LEAST_SAMPLES,
    LEVEL,
    cluster_index,
    critical_index,
    hump_ratio_of,
    mann_kendall,
    slope_of,
)
from workloads.base import Sample

#: Shapes of one hump: of speeds, with a twentieth of scatter about 100.
ONE_HUMP = {
    "normal": lambda chance: 100 * (1 + chance.gauss(0, 0.05)),
    "lognormal": lambda chance: 100 * chance.lognormvariate(0, 0.2),
    "of a few slow ones": lambda chance: (
        100 * (0.7 if chance.random() < 0.05 else 1) + chance.gauss(0, 2)
    ),
    "skewed to the right": lambda chance: 100 / (1 + chance.gammavariate(4, 0.02)),
}


@pytest.mark.parametrize("shape", ONE_HUMP)
@pytest.mark.parametrize("count", [10, 20, 100])
def test_steady_repeats_are_hardly_ever_flagged(shape: str, count: int) -> None:
    """Of 400 samples without trend and with one hump, at most 2.5 % have a significant trend, or
    two humps: both tests are at 1 %."""
    chance = random.Random(f"{shape} {count}")
    runs = [[ONE_HUMP[shape](chance) for _ in range(count)] for _ in range(400)]
    assert sum(mann_kendall(run) < LEVEL for run in runs) <= 10
    assert sum((hump_ratio_of(run) or 1.0) > 1.05 for run in runs) <= 10


@pytest.mark.parametrize("count", [15, 60])
def test_a_trend_is_found_and_measured(count: int) -> None:
    chance = random.Random(count)
    found = []
    for _ in range(200):
        run = [
            100 * (1 - 0.1 * i / (count - 1)) * (1 + chance.gauss(0, 0.02)) for i in range(count)
        ]
        found.append(slope_of(run) * (count - 1) if mann_kendall(run) < LEVEL else 0.0)
    assert sum(drift < 0 for drift in found) >= 190
    assert sorted(found)[100] == pytest.approx(-10, abs=2)


@pytest.mark.parametrize("count", [12, 20, 200])
@pytest.mark.parametrize("share", [0.35, 0.5])
def test_two_humps_are_found_and_measured(count: int, share: float) -> None:
    chance = random.Random(f"{count} {share}")
    found = []
    for _ in range(200):
        run = [
            (130 if i < share * count else 100) * (1 + chance.gauss(0, 0.02)) for i in range(count)
        ]
        chance.shuffle(run)
        found.append(hump_ratio_of(run) or 1.0)
    assert sum(ratio > 1.05 for ratio in found) >= 195
    assert sorted(found)[100] == pytest.approx(1.3, abs=0.02)


def test_too_few_samples_say_nothing() -> None:
    assert hump_ratio_of([1.0] * (LEAST_SAMPLES - 1)) is None
    assert hump_ratio_of([-1.0] * 20) is None and hump_ratio_of([0.0] * 20) is None
    assert hump_ratio_of([5.0] * 20) == 1.0 and mann_kendall([5.0] * 20) == 1.0


def test_the_trend_by_hand() -> None:
    """Five rising values have ten rising pairs: S = 10, variance 50/3."""
    assert mann_kendall([1, 2, 3, 4, 5]) == pytest.approx(math.erfc(9 / math.sqrt(50 / 3) / 2**0.5))
    assert mann_kendall([5, 4, 3, 2, 1]) == mann_kendall([1, 2, 3, 4, 5])
    assert slope_of([1, 3, 5, 7]) == 2.0
    long = [float(i) for i in range(1000)]
    assert slope_of(long) == pytest.approx(1.0)


def test_the_cluster_index_by_hand() -> None:
    assert cluster_index([0, 1, 0, 1, 0, 1])[:2] == (0.0, 3)
    assert [critical_index(n) for n in (10, 100, 10_000)] == [0.092, 0.279, 0.349]
    assert 0.206 < critical_index(40) < 0.243


def test_repeats_of_unlike_size_are_not_tested() -> None:
    """Training steps of other lengths take other times without any disturbance."""

    def repeat(number: int, tokens: int) -> tuple[int, Sample]:
        wall_s = 1.0 + 0.3 * (number % 2) + 0.001 * number
        return 0, sample(repeat=number, wall_s=wall_s, computed_tokens=tokens)

    even = metrics_of([repeat(n, 160) for n in range(12)])
    assert even.hump_ratio == pytest.approx(1.3, abs=0.01)
    assert metrics_of([repeat(n, 160 + n) for n in range(12)]).hump_ratio is None
