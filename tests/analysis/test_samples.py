"""Metrics by their plain definitions; trends and humps in repeats."""

from __future__ import annotations

import math
import random

import pytest
from core_cases import a_sample as sample
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.analysis.samples import (
    LEAST_SAMPLES,
    LEVEL,
    NOTHING,
    hump_ratio_of,
    mann_kendall,
    metrics_of,
    slope_of,
)
from workloads.base import SAMPLES, TOKENS, Item, Sample

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


def test_the_trend_by_hand_and_too_few_samples_say_nothing() -> None:
    """Five rising values have ten rising pairs: S = 10, variance 50/3."""
    assert hump_ratio_of([1.0] * (LEAST_SAMPLES - 1)) is None
    assert hump_ratio_of([-1.0] * 20) is None and hump_ratio_of([0.0] * 20) is None
    assert hump_ratio_of([5.0] * 20) == 1.0 and mann_kendall([5.0] * 20) == 1.0
    assert mann_kendall([1, 2, 3, 4, 5]) == pytest.approx(math.erfc(9 / math.sqrt(50 / 3) / 2**0.5))
    assert mann_kendall([5, 4, 3, 2, 1]) == mann_kendall([1, 2, 3, 4, 5])
    assert slope_of([1, 3, 5, 7]) == 2.0
    long = [float(i) for i in range(1000)]
    assert slope_of(long) == pytest.approx(1.0)


def test_repeats_of_unlike_size_are_not_tested() -> None:
    """Training steps of other lengths take other times without any disturbance."""

    def repeat(number: int, tokens: int) -> tuple[int, Sample]:
        wall_s = 1.0 + 0.3 * (number % 2) + 0.001 * number
        return 0, sample(repeat=number, wall_s=wall_s, computed_tokens=tokens)

    even = metrics_of([repeat(n, 160) for n in range(12)])
    assert even.hump_ratio == pytest.approx(1.3, abs=0.01)
    assert metrics_of([repeat(n, 160 + n) for n in range(12)]).hump_ratio is None


# ---------------------------------------------------------------- metrics

_SECONDS = st.floats(0.001, 100.0)
_COUNTS = st.integers(0, 50)
_SAMPLES = st.builds(
    Sample,
    repeat=st.integers(0, 3),
    batch=st.integers(0, 2),
    warmup=st.booleans(),
    complete=st.sampled_from([True, True, True, False]),
    wall_s=_SECONDS,
    cpu_s=_SECONDS,
    items=_COUNTS,
    input_tokens=_COUNTS,
    output_tokens=_COUNTS,
    computed_tokens=_COUNTS,
    ttft_s=st.none() | _SECONDS,
    step_s=st.lists(_SECONDS, max_size=3).map(tuple),
)
_RANKED = st.lists(st.tuples(st.integers(0, 1), _SAMPLES), max_size=12)


def _complete(timed: list[tuple[int, Sample]]) -> list[list[tuple[int, Sample]]]:
    ranks = {rank for rank, _ in timed}
    numbers = sorted({sample.repeat for _, sample in timed})
    each = [[pair for pair in timed if pair[1].repeat == number] for number in numbers]
    return [
        pairs
        for pairs in each
        if {rank for rank, _ in pairs} == ranks and all(s.complete for _, s in pairs)
    ]


def _wall_s(pairs: list[tuple[int, Sample]]) -> float:
    return max(math.fsum(s.wall_s for r, s in pairs if r == rank) for rank, _ in pairs)


@given(_RANKED, st.lists(_SECONDS, max_size=3))
def test_rates_and_times_are_those_of_their_definitions(
    ranked: list[tuple[int, Sample]], latencies_s: list[float]
) -> None:
    prompts = [
        (0, Item(index=number, input_tokens=1, output_tokens=1, latency_s=latency_s))
        for number, latency_s in enumerate(latencies_s)
    ]
    found = metrics_of(ranked, prompts)
    timed = [pair for pair in ranked if not pair[1].warmup]
    if not timed:
        assert found == NOTHING
        return
    complete = _complete(timed)
    parts = complete or [timed]
    counted = [sample for pairs in parts for _, sample in pairs]
    generated = [sum(s.output_tokens for _, s in pairs) / _wall_s(pairs) for pairs in parts]
    read = [sum(s.input_tokens for _, s in pairs) / _wall_s(pairs) for pairs in parts]
    done = [sum(s.items for _, s in pairs) / _wall_s(pairs) for pairs in parts]
    generates = any(sample.output_tokens for sample in counted)
    items = any(sample.items for _, sample in timed)
    assert found.repeats == len(complete)
    assert found.measure_s == pytest.approx(_wall_s(timed))
    assert found.cpu_s == pytest.approx(math.fsum(sample.cpu_s for _, sample in timed))
    assert found.generated_tokens_per_s == (
        pytest.approx(math.fsum(generated) / len(parts)) if generates else None
    )
    total = math.fsum([*generated, *read]) / len(parts)
    assert found.total_tokens_per_s == pytest.approx(total)
    assert found.items_per_s == (pytest.approx(math.fsum(done) / len(parts)) if items else None)
    assert found.throughput_unit == (TOKENS if generates else SAMPLES).unit
    assert found.throughput == (found.generated_tokens_per_s if generates else found.items_per_s)
    assert (found.throughput_low is None) == (len(complete) < 2 or found.throughput is None)
    assert (found.tpot_p50_s is not None) == any(sample.step_s for sample in counted)
    assert (found.ttft_s is not None) == any(s.ttft_s is not None for s in counted)
    assert (found.latency_p50_s is not None) == bool(latencies_s)
    assert found.loss_first is found.loss_last is None
