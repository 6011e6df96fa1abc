"""Replicates joined into one cell: the mean of the processes' means, with Student's t interval.

Flagged rows are left out if others are not flagged, contended ones last. With a single process the
row keeps its own interval, and the report says "within one process".
"""

from __future__ import annotations

import math
import typing
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.analysis.flags import Raised, barred, bounded
from orchestrator.analysis.rankings import throughput
from orchestrator.analysis.ratio import rate_of
from orchestrator.analysis.samples import LEAST_SAMPLES, LEVEL, mann_kendall, slope_of
from orchestrator.analysis.selection import Setting
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement, Metrics
from workloads.util.statistics import ALIKE, NestedInterval, Spread, nested_interval

_SUMS = ("repeats", "measure_s", "cpu_s", "energy_j")
_OWN = ("drift", "hump_ratio")  # meaningful within one process only
_MEANS = tuple(
    name
    for name, kind in typing.get_type_hints(Metrics).items()
    if kind in (float, float | None) and name not in (*_SUMS, *_OWN)
)
_LARGEST = ("peak_host_memory_bytes", "peak_device_memory_bytes", "baseline_host_memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell with several replicates; ``row`` represents them in tables and rankings."""

    row: Measurement
    replicates: tuple[Measurement, ...]  # by number
    counted: tuple[Measurement, ...] = ()  # those whose figures are in the row
    spread: NestedInterval | None = None  # None: fewer than two processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Trend of speed over the night, as a relative change shown by all replicates."""

    change: float  # from the first of these rows to the last
    hours: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The rows of a run with replicates joined."""

    rows: tuple[Measurement, ...]  # one for each cell, in order of first appearance
    cells: tuple[Cell, ...] = ()  # those with several replicates
    night_drift: Drift | None = None


def join(
    rows: Sequence[Measurement],
    settings: Mapping[str, Setting],
    raised: Mapping[str, tuple[Raised, ...]],
    *,
    runs: Spread = ALIKE,
) -> Joined:
    """Join the replicates among the newest final rows of a run; ``raised`` are flags by job id,
    ``runs`` is the spread between runs."""
    if all(row.replicate == 1 for row in rows):
        return Joined(rows=tuple(rows))
    groups: dict[object, list[Measurement]] = {}
    for row in rows:
        key = (settings[row.job_id], row.precision, row.batch_size_requested)
        groups.setdefault(key, []).append(row)
    joined: list[Measurement] = []
    cells: list[Cell] = []
    for group in groups.values():
        numbers = {row.replicate for row in group}
        if len(numbers) < len(group) or numbers == {1}:  # rows that only look alike
            joined += group
            continue
        cell = _cell(sorted(group, key=lambda row: row.replicate), raised, runs)
        cells.append(cell)
        joined.append(cell.row)
    return Joined(rows=tuple(joined), cells=tuple(cells), night_drift=_drift(cells))


def _cell(
    group: Sequence[Measurement], raised: Mapping[str, tuple[Raised, ...]], runs: Spread
) -> Cell:
    measured = [row for row in group if row.state is State.SUCCEEDED and row.metrics.throughput]
    whole = [row for row in measured if not barred(raised.get(row.job_id, ()))] or measured
    counted = [row for row in whole if not bounded(raised.get(row.job_id, ()))] or whole
    if not counted:
        return Cell(row=group[0], replicates=tuple(group))
    # Each replicate of `max` searches its own batch size, and may find another one.
    size = Counter(row.batch_size for row in counted).most_common(1)[0][0]
    counted = [row for row in counted if row.batch_size == size]
    by_process: dict[object, list[Measurement]] = {}
    for row in counted:  # a row without a process id has its own group
        known = row.worker_pid is not None
        key = (row.invocation_id, row.nodes[:1], row.worker_pid) if known else row.job_id
        by_process.setdefault(key, []).append(row)
    processes = list(by_process.values())
    means = [math.fsum(map(throughput, rows)) / len(rows) for rows in processes]
    rates = [rate_of(rows[0]) if len(rows) == 1 else None for rows in processes]
    errors = [
        rate.error * rate.value if rate and rate.error is not None else None for rate in rates
    ]
    spread = nested_interval(means, errors, counted[0].measure.confidence, runs=runs)
    if spread is None:
        return Cell(row=counted[0], replicates=tuple(group), counted=tuple(counted[:1]))
    metrics = replace(
        _averaged(counted),
        throughput=spread.mean,
        throughput_low=spread.low,
        throughput_high=spread.high,
        relative_half_width=spread.relative_half_width,
        processes=len(processes),
    )
    largest: dict[str, Any] = {
        name: max((v for row in counted if (v := getattr(row, name)) is not None), default=None)
        for name in _LARGEST
    }
    return Cell(
        row=replace(counted[0], metrics=metrics, **largest),
        replicates=tuple(group),
        counted=tuple(counted),
        spread=spread,
    )


def _averaged(rows: Sequence[Measurement]) -> Metrics:
    """Return means of rates and times and sums of amounts; None where a row lacks it."""
    every = [row.metrics for row in rows]
    changes: dict[str, Any] = dict.fromkeys(_OWN)
    for name in (*_MEANS, *_SUMS):
        values = [getattr(metrics, name) for metrics in every]
        if None in values:
            changes[name] = None
        else:
            total = math.fsum(values)
            changes[name] = total if name in _SUMS else total / len(values)
    changes["repeats"] = int(changes["repeats"])
    return replace(every[0], **changes)


def _drift(cells: Iterable[Cell]) -> Drift | None:
    """Return the trend over the night of speeds relative to their cell's mean, if significant."""
    points = sorted(
        (row.started_at, row.metrics.throughput / cell.row.metrics.throughput)
        for cell in cells
        if cell.spread is not None and cell.row.metrics.throughput
        for row in cell.counted
        if row.started_at is not None and row.metrics.throughput
    )
    if len(points) < LEAST_SAMPLES:
        return None
    ratios = [ratio for _, ratio in points]
    if mann_kendall(ratios) > LEVEL:
        return None
    change = slope_of(ratios) * (len(ratios) - 1)
    return Drift(change=change, hours=(points[-1][0] - points[0][0]) / 3600, rows=len(points))
