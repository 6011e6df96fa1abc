"""Metrics by their plain definitions, over random samples of one rank or several."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.analysis.samples import NOTHING, metrics_of
from workloads.base import SAMPLES, TOKENS, Item, Sample

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


@given(_RANKED)
def test_rates_and_times_are_those_of_their_definitions(ranked: list[tuple[int, Sample]]) -> None:
    found = metrics_of(ranked)
    timed = [pair for pair in ranked if not pair[1].warmup]
    if not timed:
        assert found == NOTHING
        return
    complete = _complete(timed)
    parts = complete or [timed]
    counted = [sample for pairs in parts for _, sample in pairs]
    generated = [sum(s.output_tokens for _, s in pairs) / _wall_s(pairs) for pairs in parts]
    done = [sum(s.items for _, s in pairs) / _wall_s(pairs) for pairs in parts]
    generates = any(sample.output_tokens for sample in counted)
    items = any(sample.items for _, sample in timed)
    assert found.repeats == len(complete)
    assert found.measure_s == pytest.approx(_wall_s(timed))
    assert found.cpu_s == pytest.approx(math.fsum(sample.cpu_s for _, sample in timed))
    assert found.generated_tokens_per_s == (
        pytest.approx(math.fsum(generated) / len(parts)) if generates else None
    )
    assert found.items_per_s == (pytest.approx(math.fsum(done) / len(parts)) if items else None)
    assert found.throughput_unit == (TOKENS if generates else SAMPLES).unit
    assert found.throughput == (found.generated_tokens_per_s if generates else found.items_per_s)
    assert (found.throughput_low is None) == (len(complete) < 2 or found.throughput is None)


@given(_RANKED, st.lists(_SECONDS, max_size=3))
def test_a_figure_is_there_where_something_was_timed_for_it(
    ranked: list[tuple[int, Sample]], latencies_s: list[float]
) -> None:
    items = [
        (0, Item(index=number, input_tokens=1, output_tokens=1, latency_s=latency_s))
        for number, latency_s in enumerate(latencies_s)
    ]
    found = metrics_of(ranked, items)
    timed = [pair for pair in ranked if not pair[1].warmup]
    parts = _complete(timed) or [timed]
    counted = [sample for pairs in parts for _, sample in pairs]
    assert (found.tpot_p50_s is not None) == any(sample.step_s for sample in counted)
    assert (found.ttft_s is not None) == any(s.ttft_s is not None for s in counted)
    assert (found.latency_p50_s is not None) == bool(latencies_s and timed)
    assert found.loss_first is found.loss_last is None
