"""Figures that workloads report by name, with the titles, units and directions declared for them.

A metric is declared in one place (``registry.metrics_of``), and nothing here knows one by name. A
figure that nobody declares is shown by its own name. One that is derived from raw samples is there
for rows that were written before it was declared, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isclose

from orchestrator.core.measurement import Measurement
from orchestrator.report import units
from orchestrator.results.timed import derived_figures
from workloads import registry
from workloads.base import Metric

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
