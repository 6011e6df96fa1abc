"""Figures that workloads report by name, and the parts of a training step.

Metrics are declared through ``registry.metrics_of``; undeclared figures are shown by their own
name. Metrics derived from raw samples also apply to rows written before they were declared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isclose

from orchestrator.analysis.samples import derived_figures
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.grid.objectives import COMMON
from orchestrator.util import format as units
from workloads import registry
from workloads.registry import Metric

#: Relative difference up to which two figures are the same.
SHARE = 0.01


def same(one: float, other: float) -> bool:
    """Return whether two figures differ by no more than ``SHARE``."""
    return isclose(one, other, rel_tol=SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """One figure in two rows of a job."""

    metric: Metric
    before: float
    after: float

    @property
    def improved(self) -> bool | None:
        """Return whether the figure got better; None if unchanged or without a better direction."""
        if self.metric.better is None or same(self.before, self.after):
            return None
        return (self.after > self.before) is (self.metric.better == "higher")

    def __str__(self) -> str:
        way = {True: " (better)", False: " (worse)", None: ""}[self.improved]
        unit = f" {self.metric.unit}" if self.metric.unit else ""
        before, after = units.number(self.before), units.number(self.after)
        return f"{self.metric.title}: {before} → {after}{unit}{way}"


def reported_figure(row: Measurement, name: str, declared: Mapping[str, Metric]) -> float | None:
    """Return a row's figure: stored, else derived from raw samples by its metric."""
    value = row.reported(name)
    metric = declared.get(name)
    if value is None and row.samples and metric is not None and metric.figure is not None:
        return derived_figures({name: metric}, row.samples, row.items).get(name)
    return value


def figures_of(row: Measurement) -> Iterator[tuple[Metric, float]]:
    """Yield the row's metrics and figures, in the order of the declarations."""
    declared = registry.metrics_of(row.workload)
    for name in dict.fromkeys((*declared, *row.workload_metrics)):
        value = reported_figure(row, name, declared)
        if value is not None:
            title = name.replace("_", " ")
            yield declared.get(name) or Metric(name=name, title=title, description=title), value


def named_figures(row: Measurement) -> dict[str, float]:
    """Return the figures with a better direction, by name; ``NAME/card`` is a share of a card."""
    figures = {name: getattr(row.metrics, name, None) for name in COMMON}
    if row.metrics.throughput is not None and row.metrics.power_w:
        figures["throughput_per_watt"] = row.metrics.throughput / row.metrics.power_w
    peak = figures["peak_memory_bytes"] = peak_memory_bytes(row)
    card = row.details.get("card_memory_bytes", "")
    if peak is not None and card.isdecimal() and int(card):
        figures["peak_memory_bytes/card"] = peak / int(card)
    figures |= {metric.name: value for metric, value in figures_of(row)}
    return {name: float(value) for name, value in figures.items() if value is not None}


def memory_is_known(row: Measurement) -> bool:
    """Return whether ``peak_memory_bytes`` is the job's own: a warm process reuses what earlier
    jobs left, and grows by less."""
    if row.peak_device_memory_bytes:
        return True
    return row.peak_host_memory_bytes is not None and not row.jobs_before


def peak_memory_bytes(row: Measurement) -> int | None:
    """Return the device's peak memory, or else the growth of host memory."""
    if row.peak_device_memory_bytes:
        return row.peak_device_memory_bytes
    if row.peak_host_memory_bytes is None:
        return None
    return max(0, row.peak_host_memory_bytes - (row.baseline_host_memory_bytes or 0))


def memory_kind(row: Measurement) -> str:
    """Return the kind of ``peak_memory_bytes``: ``device`` or ``host``."""
    return "device" if row.peak_device_memory_bytes else "host"


def figure_changes(before: Measurement, after: Measurement) -> list[FigureChange]:
    """Return the changes of the figures that both rows report."""
    old = {metric.name: value for metric, value in figures_of(before)}
    return [
        FigureChange(metric=metric, before=old[metric.name], after=value)
        for metric, value in figures_of(after)
        if metric.name in old
    ]


# ---------------------------------------------------------------- quality beside speed


def quality_note(row: Measurement) -> str:
    """Return the quality figures to show beside throughput; "" if there are none."""
    return ", ".join(
        f"{units.number(value)} {metric.title}"
        for metric, value in _reported(row)
        if metric.beside_speed or metric.equal_from is not None
    )


def equal(row: Measurement, limit: float | None = None) -> bool:
    """Return whether the output equals the plain path's, by the metrics' limits or ``limit``."""
    verdicts = []
    for metric, value in _reported(row):
        if metric.equal_from is not None:
            least = metric.equal_from if limit is None else limit
            verdicts.append(value >= least if metric.better == "higher" else value <= least)
    return bool(verdicts) and all(verdicts)


def _reported(row: Measurement) -> Iterator[tuple[Metric, float]]:
    for name, metric in registry.metrics_of(row.workload).items():
        if (value := row.reported(name)) is not None:
            yield metric, value


# ---------------------------------------------------------------- the parts of a training step

#: Parts of a step; with ``_s`` they are fields of ``workloads.base.Sample``.
PARTS = ("data", "forward", "backward", "optimizer", "communication")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Shares (0 to 1) of the timed steps' wall time over all ranks; None: unknown."""

    row: Measurement
    step_s: float  # mean wall time of a step
    data: float | None
    forward: float | None
    backward: float | None
    optimizer: float | None
    communication: float | None  # within the others: waiting for cards, not hidden by computing


def step_times_of(rows: Iterable[Measurement]) -> tuple[StepTime, ...]:
    """Return one entry for each succeeded row that trained, in the order of the rows."""
    step_times = []
    for row in rows:
        timed = [sample for _, sample in row.samples if not sample.warmup]
        wall_s = math.fsum(sample.wall_s for sample in timed)
        measured = row.state is State.SUCCEEDED and wall_s
        if measured and any(sample.forward_s is not None for sample in timed):
            shares: dict[str, float | None] = {}
            for part in PARTS:
                times = [getattr(sample, f"{part}_s") for sample in timed]
                shares[part] = None if None in times else math.fsum(times) / wall_s
            step_times.append(StepTime(row=row, step_s=wall_s / len(timed), **shares))
    return tuple(step_times)
