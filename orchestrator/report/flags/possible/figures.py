"""Figures against the samples they were computed from, and against each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter

from orchestrator.domain.measurement import Measurement
from orchestrator.domain.repeats import Totals
from orchestrator.report.flags.possible.recount import (
    ROUNDING,
    Check,
    RawCheck,
    Recount,
    near,
)
from orchestrator.report.units import number, seconds
from orchestrator.results.schema import OUT_OF_RANGE
from workloads.confidence import percentile

_COUNTS: dict[str, Callable[[Totals], int]] = {
    "generated_tokens_per_s": lambda total: total.output_tokens,
    "total_tokens_per_s": lambda total: total.input_tokens + total.output_tokens,
    "items_per_s": lambda total: total.items,
}

#: Figures of which none may exceed the next.
_ASCENDING = tuple(
    (names, attrgetter(*names))
    for names in (
        ("throughput_low", "throughput", "throughput_high"),
        ("ttft_s", "ttft_p95_s"),
        ("tpot_p50_s", "tpot_p95_s", "tpot_p99_s"),
        ("latency_p50_s", "latency_p95_s"),
        ("generated_tokens_per_s", "total_tokens_per_s"),
    )
)

Percentiles = tuple[tuple[str, int], ...]
STEP_PERCENTILES: Percentiles = (("tpot_p50_s", 50), ("tpot_p95_s", 95), ("tpot_p99_s", 99))
LATENCY_PERCENTILES: Percentiles = (("latency_p50_s", 50), ("latency_p95_s", 95))


def _admitted(row: Measurement) -> str | None:
    odd = row.details.get(OUT_OF_RANGE)
    return f"it has numbers that cannot be: {odd}" if odd else None


def _order(row: Measurement) -> str | None:
    for names, values_of in _ASCENDING:
        values = values_of(row.metrics)
        known = [pair for pair in zip(names, values, strict=True) if pair[1] is not None]
        for (name, value), (above, limit) in pairwise(known):
            if value > limit * (1 + 1e-9) and not near(value, limit):
                return f"{name} is {number(value)} and {above} only {number(limit)}"
    return None


def _primary(row: Measurement) -> str | None:
    metrics = row.metrics
    if metrics.throughput is None:
        return None
    tokens, items = metrics.generated_tokens_per_s, metrics.items_per_s
    if tokens is None or items is None:
        return None
    if near(metrics.throughput, tokens) or near(metrics.throughput, items):
        return None
    told = f"{number(tokens)} tokens/s and {number(items)} items/s"
    return f"throughput is {number(metrics.throughput)}, its rates are {told}"


def _half_width(row: Measurement) -> str | None:
    metrics = row.metrics
    ends = (metrics.throughput_low, metrics.throughput_high)
    if None in (*ends, metrics.relative_half_width, metrics.throughput) or not metrics.throughput:
        return None
    assert ends[0] is not None and ends[1] is not None and metrics.relative_half_width is not None
    half = (ends[1] - ends[0]) / 2 / abs(metrics.throughput)
    if not math.isfinite(half) or near(half, metrics.relative_half_width, 0.01):
        return None
    said = metrics.relative_half_width
    return f"relative_half_width is {number(said)}, its interval is {number(half)} wide"


def _rates(row: Measurement, raw: Recount) -> str | None:
    if not all(total.wall_s > 0 for total in raw.rated):
        return None
    found = {name: _rate(raw, count) for name, count in _COUNTS.items()}
    for name, rate in found.items():
        value = getattr(row.metrics, name)
        if value is not None and not near(value, rate):
            return f"{name} is {number(value)}, its samples give {number(rate)}"
    value = row.metrics.throughput
    if value is None or any(near(value, rate) for rate in found.values()):
        return None
    return f"throughput is {number(value)}, its samples give none of that"


def _rate(raw: Recount, count: Callable[[Totals], int]) -> float:
    """The mean over repeats; of training steps, which are of unlike work, the rate of all."""
    if raw.trains and raw.repeats:
        wall_s = math.fsum(total.wall_s for total in raw.rated)
        return sum(count(total) for total in raw.rated) / wall_s
    return math.fsum(count(total) / total.wall_s for total in raw.rated) / len(raw.rated)


def _repeats(row: Measurement, raw: Recount) -> str | None:
    if row.metrics.repeats == len(raw.repeats):
        return None
    return f"it counts {row.metrics.repeats} repeats, its samples have {len(raw.repeats)}"


def _durations(row: Measurement, raw: Recount) -> str | None:
    found = {
        "measure_s": raw.whole.wall_s,
        "cpu_s": math.fsum(sample.cpu_s for sample in raw.timed),
    }
    for name, value in found.items():
        said = getattr(row.metrics, name)
        if said is not None and not near(said, value):
            return f"{name} is {seconds(said)}, its samples took {seconds(value)}"
    return None


def _first_tokens(row: Measurement, raw: Recount) -> str | None:
    known = sorted(sample.ttft_s for sample in raw.counted if sample.ttft_s is not None)
    return _misplaced(row, known, (("ttft_s", 50),), "samples")


def _token_times(row: Measurement, raw: Recount) -> str | None:
    steps = sorted(step for sample in raw.counted for step in sample.step_s)
    return _misplaced(row, steps, STEP_PERCENTILES, "steps")


def _latencies(row: Measurement, raw: Recount) -> str | None:
    times = sorted(item.latency_s for item in raw.items)
    return _misplaced(row, times, LATENCY_PERCENTILES, "prompts")


def _misplaced(
    row: Measurement, ordered: Sequence[float], names: Percentiles, of: str
) -> str | None:
    """A percentile lies between two neighbours in the order of values, however it is computed."""
    for name, percent in names:
        said, found = getattr(row.metrics, name), percentile(ordered, percent)
        if said is None or found is None:
            continue
        place = percent / 100 * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        if not low * (1 - ROUNDING) <= said <= high * (1 + ROUNDING):
            return f"{name} is {seconds(said)}, its {of} give {seconds(found)}"
    return None


def _losses(row: Measurement, raw: Recount) -> str | None:
    if not raw.trains:
        return None
    steps: dict[tuple[int, int], list[float]] = {}
    for _, sample in row.samples:
        if sample.loss is not None:
            steps.setdefault((sample.repeat, sample.batch), []).append(sample.loss)
    for name, key in (("loss_first", min(steps)), ("loss_last", max(steps))):
        said, found = getattr(row.metrics, name), math.fsum(steps[key]) / len(steps[key])
        if said is not None and not near(said, found):
            return f"{name} is {number(said)}, its samples give {number(found)}"
    return None


CHECKS: tuple[Check, ...] = (_admitted, _order, _primary, _half_width)
RAW_CHECKS: tuple[RawCheck, ...] = (
    _rates,
    _repeats,
    _durations,
    _first_tokens,
    _token_times,
    _latencies,
    _losses,
)
