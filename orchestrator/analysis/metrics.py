"""Figures that workloads report by name, quality beside speed, and the parts of a training step.

A metric is declared in one place (``registry.metrics_of``), and nothing here knows one by name. A
figure that nobody declares is shown by its own name. One that is derived from raw samples is there
for rows that were written before it was declared, too. A figure of quality declares from which
value on an output counts as equal (``Metric.equal_from``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isclose

from orchestrator.analysis.samples import derived_figures
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.util import format as units
from workloads import registry
from workloads.registry import Metric

#: A figure has changed where it differs by more than this share; what it varies is not known.
SHARE = 0.01


def same(one: float, other: float) -> bool:
    """Tell if two figures differ by no more than is expected of one figure."""
    return isclose(one, other, rel_tol=SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """One figure of two rows of a job."""

    metric: Metric
    before: float
    after: float

    @property
    def improved(self) -> bool | None:
        """True if it has got better; None where neither way is, or it is the same."""
        if self.metric.better is None or same(self.before, self.after):
            return None
        return (self.after > self.before) is (self.metric.better == "higher")

    def __str__(self) -> str:
        way = {True: " (better)", False: " (worse)", None: ""}[self.improved]
        unit = f" {self.metric.unit}" if self.metric.unit else ""
        before, after = units.number(self.before), units.number(self.after)
        return f"{self.metric.title}: {before} → {after}{unit}{way}"


def figure_of(row: Measurement, name: str, declared: Mapping[str, Metric]) -> float | None:
    """A figure of a row: as it is stored, else as its metric derives it from raw samples."""
    value = row.reported(name)
    metric = declared.get(name)
    if value is None and row.samples and metric is not None and metric.figure is not None:
        return derived_figures({name: metric}, row.samples, row.items).get(name)
    return value


def figures_of(row: Measurement) -> Iterator[tuple[Metric, float]]:
    """Yield what a row reports, in the order of the declarations."""
    declared = registry.metrics_of(row.workload)
    for name in dict.fromkeys((*declared, *row.workload_metrics)):
        value = figure_of(row, name, declared)
        if value is not None:
            title = name.replace("_", " ")
            yield declared.get(name) or Metric(name=name, title=title, description=title), value


def titled(row: Measurement) -> dict[str, str]:
    """The same as text by title, with units."""
    return {m.title: f"{units.number(value)} {m.unit}".rstrip() for m, value in figures_of(row)}


def figure_changes(before: Measurement, after: Measurement) -> list[FigureChange]:
    """The figures that both rows report."""
    old = {metric.name: value for metric, value in figures_of(before)}
    return [
        FigureChange(metric=metric, before=old[metric.name], after=value)
        for metric, value in figures_of(after)
        if metric.name in old
    ]


# ---------------------------------------------------------------- quality beside speed


def quality_note(row: Measurement) -> str:
    """The figures of quality of a row, for the cell of its throughput; empty where it has none."""
    return ", ".join(
        f"{units.number(value)} {metric.title}"
        for metric, value in _reported(row)
        if metric.beside_speed or metric.equal_from is not None
    )


def equal(row: Measurement, limit: float | None = None) -> bool:
    """Tell if a row's output was compared and counts as equal to the plain path's.

    Args:
        limit: replaces the limits that figures declare.
    """
    verdicts = []
    for metric, value in _reported(row):
        if metric.equal_from is not None:
            least = metric.equal_from if limit is None else limit
            verdicts.append(value >= least if metric.better == "higher" else value <= least)
    return bool(verdicts) and all(verdicts)


def _reported(row: Measurement) -> Iterator[tuple[Metric, float]]:
    """The declared figures that a row has."""
    for name, metric in registry.metrics_of(row.workload).items():
        if (value := row.reported(name)) is not None:
            yield metric, value


# ---------------------------------------------------------------- the parts of a training step

#: Parts of a step; with ``_s`` they are fields of ``workloads.base.Sample``.
PARTS = ("data", "forward", "backward", "optimizer", "communication")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Shares (0 to 1) of the timed steps' wall time, all ranks together. None: not known."""

    row: Measurement
    step_s: float  # mean wall time of a step
    data: float | None
    forward: float | None
    backward: float | None
    optimizer: float | None
    communication: float | None  # within the others: waiting for cards that computing did not hide


def step_times_of(rows: Iterable[Measurement]) -> tuple[StepTime, ...]:
    """One entry for each succeeded row that trained, in the order of the rows."""
    times = (_step_time(row) for row in rows if row.state is State.SUCCEEDED)
    return tuple(time for time in times if time is not None)


def _step_time(row: Measurement) -> StepTime | None:
    timed = [sample for _, sample in row.samples if not sample.warmup]
    wall_s = math.fsum(sample.wall_s for sample in timed)
    if not wall_s or all(sample.forward_s is None for sample in timed):
        return None

    def share(part: str) -> float | None:
        times = [getattr(sample, f"{part}_s") for sample in timed]
        return None if None in times else math.fsum(times) / wall_s

    return StepTime(row=row, step_s=wall_s / len(timed), **{part: share(part) for part in PARTS})
