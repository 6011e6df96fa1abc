"""Compute ``Metrics`` from the raw samples of an attempt.

Only complete timed repeats count: the tokens of all ranks over the wall time of the slowest, as a
mean with Student's t interval. Without a complete repeat, its batches give a rate without interval.

A series of repeats is tested for a trend over time and for two humps, both of which spoil a mean.
The trend is tested by Mann and Kendall (H. B. Mann, Econometrica 13, 1945) and measured by Theil
and Sen's slope; both resist outliers. Two humps are tested on logarithms by SigClust's cluster
index (Y. Liu, D. N. Hayes, A. Nobel, J. S. Marron, JASA 103, 2008). Each group needs three in ten
samples, so that a few slow ones are no hump, and the groups must be apart by the measure of K. M.
Ashman, C. M. Bird and S. E. Zepf (Astron. J. 108, 1994), unlike the halves of one skewed hump.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.core import measurement
from workloads.base import SAMPLES, TOKENS, Item, Metric, Sample, Throughput, Timed
from workloads.bench.warmup import LEAST_STEPS, Step, drift, mann_kendall_score
from workloads.util.statistics import (
    mean_interval,
    percentile,
    ratio_interval,
    tail_percentile,
)

if TYPE_CHECKING:
    import pyarrow as pa

Numbers = np.ndarray[Any, np.dtype[Any]]
NOTHING = measurement.Metrics()


def metrics_of(
    samples: Sequence[tuple[int, Sample]],
    items: Sequence[tuple[int, Item]] = (),
    *,
    confidence: float = 0.95,
    throughput: Throughput | None = None,
) -> measurement.Metrics:
    """Return the metrics of an attempt from the samples of all ranks.

    ``throughput`` is declared by the workload; default: generated tokens if any, else samples.
    ``loss_first`` and ``loss_last`` include warm-up.
    """
    timed = [pair for pair in samples if not pair[1].warmup]
    if not timed:
        return NOTHING
    complete = measurement.complete_of(measurement.repeats_of(timed))
    counted = [pair for repeat in complete.values() for pair in repeat] or timed
    repeats = [measurement.totals_of(pairs) for pairs in complete.values()]
    whole = measurement.totals_of(timed)
    totals = [total for total in repeats or [whole] if total.wall_s > 0]
    generates = any(sample.output_tokens for _, sample in counted)
    trains = any(sample.loss is not None for _, sample in counted)
    interval = None
    if trains and complete and totals:
        walls = [total.wall_s for total in totals]
        interval = ratio_interval([total.items for total in totals], walls, confidence)
        totals = [measurement.sum_of(totals)]
    generated = [t.output_tokens / t.wall_s for t in totals] if generates else []
    done = [t.items / t.wall_s for t in totals] if whole.items else []
    if throughput is None or (throughput.counts == "output_tokens" and not generates):
        throughput = TOKENS if generates else SAMPLES
    primary = done if throughput.counts == "items" else generated
    if complete and not trains:
        interval = mean_interval(primary, confidence)
    of_steps: dict[tuple[int, int], list[float]] = {}
    for _, sample in samples:
        if sample.loss is not None:
            of_steps.setdefault((sample.repeat, sample.batch), []).append(sample.loss)
    losses = [_mean(values) for _, values in sorted(of_steps.items())]
    steady = [
        Step((one.computed_tokens, one.items), one.wall_s, one.computed_tokens or one.items)
        for one in repeats
    ]
    sizes = {(total.items, total.output_tokens, total.computed_tokens) for total in repeats}
    walls_s = [total.wall_s for total in repeats]
    alike = len(repeats) >= LEAST_SAMPLES and len(sizes) == 1 and min(walls_s) > 0
    first_tokens = [sample.ttft_s for _, sample in counted if sample.ttft_s is not None]
    steps = [time for _, sample in counted for time in sample.step_s]
    latencies = [item.latency_s for _, item in items]
    return measurement.Metrics(
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
        drift=drift(steady) if len(repeats) >= LEAST_STEPS else None,
        hump_ratio=hump_ratio_of([1 / wall_s for wall_s in walls_s]) if alike else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


_LOG = logging.getLogger("nightgrid.metrics")


def derived_figures(
    metrics: Mapping[str, Metric],
    samples: Sequence[tuple[int, Sample]],
    items: Sequence[tuple[int, Item]] = (),
) -> dict[str, float]:
    """Return finite figures derived from raw samples; failing metrics are left out."""
    deriving = {one.name: one.figure for one in metrics.values() if one.figure is not None}
    if not deriving:
        return {}
    repeats = measurement.timed_repeats(samples).values()
    counted = tuple(sample for pairs in repeats for _, sample in pairs)
    if not counted:
        return {}
    timed = Timed(samples=counted, items=tuple(item for _, item in items))
    figures = {}
    for name, figure in deriving.items():
        try:
            value = figure(timed)
            if value is not None and math.isfinite(value):
                figures[name] = float(value)
        except Exception as error:
            _warn(name, repr(error))
    return figures


@cache
def _warn(name: str, error: str) -> None:
    _LOG.warning("metric %s is left out of rows: its function failed: %s", name, error)


# ---------------------------------------------------------------- tests of a series

#: Level of both tests; strict, as a night has hundreds of rows.
LEVEL = 0.01
#: Fewest samples for either test.
LEAST_SAMPLES = 10

_LEAST_SHARE = 0.3
_LEAST_APART = 4.0  # Ashman's D; the halves of one normal distribution have 2.6
_MOST_PAIRED = 200  # longer series are averaged down to this many before pairs are compared
#: Critical cluster index at 1 % by sample size (simulated, 40,000 samples each;
#: ``tests/analysis/test_samples.py`` checks the rate of false alarms).
_CRITICAL = (
    *((10, 0.092), (12, 0.118), (15, 0.143), (20, 0.169), (30, 0.206), (50, 0.243), (100, 0.279)),
    *((200, 0.305), (500, 0.328), (1000, 0.338), (3000, 0.349)),
)


def slope_of(values: Sequence[float]) -> float:
    """Return Theil and Sen's slope: the median change per step over all pairs of values."""
    some = np.array(_averaged(values))
    earlier, later = np.triu_indices(len(some), 1)
    slopes = (some[later] - some[earlier]) / (later - earlier)
    return float(np.median(slopes)) * len(some) / len(values)


def _averaged(values: Sequence[float]) -> list[float]:
    """Return means of neighbours, at most ``_MOST_PAIRED``."""
    together = math.ceil(len(values) / _MOST_PAIRED)
    whole = len(values) // together * together
    means: list[float] = np.reshape(values[:whole], (-1, together)).mean(axis=1).tolist()
    return means


def mann_kendall(values: Sequence[float]) -> float:
    """Return the two-sided p-value of a monotone trend (normal approximation, with ties)."""
    score, variance = mann_kendall_score(_averaged(values))
    if variance <= 0 or score == 0:
        return 1.0
    distance = (abs(score) - 1) / math.sqrt(variance)
    return math.erfc(distance / math.sqrt(2))


def hump_ratio_of(speeds: Sequence[float]) -> float | None:
    """Return the faster hump's speed over the slower's; 1 for one hump, None if not testable."""
    count = len(speeds)
    if count < LEAST_SAMPLES or min(speeds) <= 0:
        return None
    ordered = np.sort(np.log(speeds))
    middle = ordered.mean()
    centred = ordered - middle
    whole = centred @ centred
    if whole <= 1e-18 * count * max(1.0, middle * middle):
        return 1.0
    least = max(3, math.ceil(_LEAST_SHARE * count))
    at = np.arange(least, count - least + 1)
    # The variance between two groups whose means are this far apart; the rest is within them.
    between = np.cumsum(centred)[at - 1] ** 2 * count / (at * (count - at))
    sizes, indices = zip(*_CRITICAL, strict=True)
    # Linear in 1/sqrt(size), like sampling errors.
    critical = np.interp(-(count**-0.5), [-(size**-0.5) for size in sizes], indices)
    if 1 - between.max() / whole >= critical:
        return 1.0
    slow, fast = np.split(ordered, at[[between.argmax()]])
    apart = float(fast.mean() - slow.mean())
    spread = math.sqrt(slow.var(ddof=1) + fast.var(ddof=1))
    return math.exp(apart) if math.sqrt(2) * apart > _LEAST_APART * spread else 1.0


# ---------------------------------------------------------------- samples of many rows as arrays


@dataclass(frozen=True, slots=True)
class Records:
    """The samples or prompts of many rows, one array per field, since objects would take minutes;
    texts are given as byte counts."""

    row: Numbers  # index of each record's row
    values: Mapping[str, Numbers]
    lists: Mapping[str, tuple[Numbers, Numbers]]  # all values, and the length of each list

    def __getitem__(self, name: str) -> Numbers:
        return self.values[name]

    def where(self, mask: Numbers) -> Records:
        """Return the records that the mask keeps."""
        values = {name: known[mask] for name, known in self.values.items()}
        lists = {}
        for name, (known, lengths) in self.lists.items():
            lists[name] = known[np.repeat(mask, whole(lengths))], lengths[mask]
        return Records(self.row[mask], values, lists)

    @classmethod
    def of_rows(cls, kind: type, rows: Iterable[Sequence[tuple[int, Any]]]) -> Records:
        """Return the samples or items of each row."""
        known = [(place, rank, one) for place, raw in enumerate(rows) for rank, one in raw]
        values, lists = {"rank": floats(rank for _, rank, _ in known)}, {}
        for field in fields(kind):
            every = [getattr(one, field.name) for _, _, one in known]
            if field.name in _LISTS:
                lengths = floats(None if one is None else len(one) for one in every)
                lists[field.name] = floats(value for one in every for value in one or ()), lengths
            elif field.name in _TEXTS:
                texts = (one and one.encode("utf-8", "replace") for one in every)
                values[field.name] = floats(text if text is None else len(text) for text in texts)
            else:
                values[field.name] = floats(every)
        return cls(np.array([place for place, _, _ in known], np.int64), values, lists)

    @classmethod
    def of_column(cls, kind: type, column: pa.ListArray) -> Records:
        """Return a table's column ``samples`` or ``items``; missing fields are unknown."""
        import pyarrow as pa
        import pyarrow.compute as pc

        records = column.flatten()
        values, lists = {}, {}
        for name in ("rank", *(field.name for field in fields(kind))):
            if records.type.get_field_index(name) >= 0:
                array = records.field(name)
            else:
                array = pa.nulls(len(records), pa.list_(pa.int64()) if name in _LISTS else None)
            if name in _LISTS:
                lists[name] = _known(array.flatten()), _known(array.value_lengths())
            else:
                array = pc.binary_length(array) if name in _TEXTS else array
                values[name] = _known(array)
        places = np.arange(len(column))
        return cls(np.repeat(places, whole(_known(column.value_lengths()))), values, lists)


_LISTS = ("step_s", "output_ids")
_TEXTS = ("output_text",)


def floats(values: Iterable[Any]) -> Numbers:
    """Return the values as an array, NaN for None."""
    return np.array([np.nan if value is None else value for value in values], float)


def _known(array: pa.Array) -> Numbers:
    numbers: Numbers = array.cast("float64").to_numpy(zero_copy_only=False)
    return numbers


def whole(lengths: Numbers) -> Numbers:
    """Return lengths as integers, 0 for NaN."""
    return np.nan_to_num(lengths).astype(np.int64)


def largest(owner: Numbers, values: Numbers, count: int) -> Numbers:
    """Return the largest value of each of ``count`` owners; minus infinity without any."""
    most = np.full(count, -np.inf)
    np.maximum.at(most, owner, values)
    return most


class Groups:
    """Groups of records by keys: ``of`` is each record's group, ``first`` a record of each."""

    def __init__(self, *keys: Numbers) -> None:
        order = np.lexsort(keys[::-1])
        begins = np.zeros(len(order), bool)
        begins[:1] = True
        for key in keys:
            begins[1:] |= key[order][1:] != key[order][:-1]
        self.of = np.empty(len(order), np.int64)
        self.of[order] = np.cumsum(begins) - 1
        self.first = order[begins]
