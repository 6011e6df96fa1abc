"""Compute ``Metrics`` from the raw samples of an attempt.

Only complete timed repeats count: the tokens of all ranks over the wall time of the slowest, as a
mean with Student's t interval. Without a complete repeat, its batches give a rate without interval.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from orchestrator.analysis.series import LEAST_SAMPLES, hump_ratio_of
from orchestrator.core.measurement import (
    Metrics,
    Totals,
    complete_of,
    repeats_of,
    sum_of,
    timed_repeats,
    totals_of,
)
from workloads.base import SAMPLES, TOKENS, Item, Metric, Sample, Throughput, Timed
from workloads.bench.warmup import LEAST_STEPS, Step, drift
from workloads.util.statistics import (
    mean_interval,
    percentile,
    ratio_interval,
    tail_percentile,
)

NOTHING = Metrics()


def metrics_of(
    samples: Sequence[tuple[int, Sample]],
    items: Sequence[tuple[int, Item]] = (),
    *,
    confidence: float = 0.95,
    throughput: Throughput | None = None,
) -> Metrics:
    """Return the metrics of an attempt from the samples of all ranks.

    ``throughput`` is declared by the workload; default: generated tokens if any, else samples.
    ``loss_first`` and ``loss_last`` include warm-up.
    """
    timed = [pair for pair in samples if not pair[1].warmup]
    if not timed:
        return NOTHING
    complete = complete_of(repeats_of(timed))
    counted = [pair for repeat in complete.values() for pair in repeat] or timed
    repeats = [totals_of(pairs) for pairs in complete.values()]
    whole = totals_of(timed)
    totals = [total for total in repeats or [whole] if total.wall_s > 0]
    generates = any(sample.output_tokens for _, sample in counted)
    trains = any(sample.loss is not None for _, sample in counted)
    interval = None
    if trains and complete and totals:
        walls = [total.wall_s for total in totals]
        interval = ratio_interval([total.items for total in totals], walls, confidence)
        totals = [sum_of(totals)]
    generated = [t.output_tokens / t.wall_s for t in totals] if generates else []
    done = [t.items / t.wall_s for t in totals] if whole.items else []
    if throughput is None or (throughput.counts == "output_tokens" and not generates):
        throughput = TOKENS if generates else SAMPLES
    primary = done if throughput.counts == "items" else generated
    if complete and not trains:
        interval = mean_interval(primary, confidence)
    losses = _losses(samples)
    speeds = _speeds_of_equal_repeats(repeats) if len(repeats) >= LEAST_SAMPLES else []
    first_tokens = [sample.ttft_s for _, sample in counted if sample.ttft_s is not None]
    steps = [time for _, sample in counted for time in sample.step_s]
    latencies = [item.latency_s for _, item in items]
    return Metrics(
        generated_tokens_per_s=_mean(generated),
        total_tokens_per_s=_mean([(t.input_tokens + t.output_tokens) / t.wall_s for t in totals]),
        items_per_s=_mean(done),
        throughput=_mean(primary),
        throughput_unit=throughput.unit,
        throughput_low=interval.low if interval else None,
        throughput_high=interval.high if interval else None,
        relative_half_width=interval.relative_half_width if interval else None,
        repeats=len(complete),
        ttft_s=percentile(first_tokens, 50) if first_tokens else None,
        ttft_p95_s=tail_percentile(first_tokens, 95, confidence) if first_tokens else None,
        tpot_p50_s=percentile(steps, 50) if steps else None,
        tpot_p95_s=tail_percentile(steps, 95, confidence) if steps else None,
        tpot_p99_s=tail_percentile(steps, 99, confidence) if steps else None,
        latency_p50_s=percentile(latencies, 50) if latencies else None,
        latency_p95_s=tail_percentile(latencies, 95, confidence) if latencies else None,
        measure_s=whole.wall_s,
        cpu_s=math.fsum(sample.cpu_s for _, sample in timed),
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        drift=drift(list(map(_step, repeats))) if len(repeats) >= LEAST_STEPS else None,
        hump_ratio=hump_ratio_of(speeds) if speeds else None,
    )


def _speeds_of_equal_repeats(repeats: Sequence[Totals]) -> list[float]:
    """Return the inverse wall time of each repeat, or nothing unless all did the same work."""
    sizes = {(total.items, total.output_tokens, total.computed_tokens) for total in repeats}
    times = [total.wall_s for total in repeats]
    return [1 / time for time in times] if len(sizes) == 1 and min(times) > 0 else []


def _step(total: Totals) -> Step:
    """Return a repeat of all ranks as one step of a series."""
    tokens = total.computed_tokens
    return Step((tokens, total.items), total.wall_s, tokens or total.items)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _losses(samples: Iterable[tuple[int, Sample]]) -> list[float]:
    """Return the loss of each step in order, averaged over the ranks, which see different data."""
    steps: dict[tuple[int, int], list[float]] = {}
    for _, sample in samples:
        if sample.loss is not None:
            steps.setdefault((sample.repeat, sample.batch), []).append(sample.loss)
    return [math.fsum(values) / len(values) for _, values in sorted(steps.items())]


_LOG = logging.getLogger("nightgrid.metrics")


def derived_figures(
    metrics: Mapping[str, Metric],
    samples: Sequence[tuple[int, Sample]],
    items: Sequence[tuple[int, Item]] = (),
) -> dict[str, float]:
    """Return finite figures derived from raw samples; failing metrics are left out."""
    deriving = [metric for metric in metrics.values() if metric.figure is not None]
    if not deriving:
        return {}
    repeats = timed_repeats(samples).values()
    counted = tuple(sample for pairs in repeats for _, sample in pairs)
    if not counted:
        return {}
    timed = Timed(samples=counted, items=tuple(item for _, item in items))
    figures = {metric.name: _figure(metric, timed) for metric in deriving}
    return {name: value for name, value in figures.items() if value is not None}


def _figure(metric: Metric, timed: Timed) -> float | None:
    assert metric.figure is not None
    try:
        value = metric.figure(timed)
        return float(value) if value is not None and math.isfinite(value) else None
    except Exception as error:
        _warn(metric.name, repr(error))
        return None


@cache
def _warn(name: str, error: str) -> None:
    _LOG.warning("metric %s is left out of rows: its function failed: %s", name, error)
