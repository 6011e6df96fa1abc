"""Quality beside speed: rows whose output is not the plain path's say so beside their throughput.

A figure of quality declares from which value on an output counts as equal
(``Metric.equal_from``). Speed is what is judged; when asked, fronts are drawn of equal rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.analysis.flags import ranked
from orchestrator.core.measurement import Measurement
from orchestrator.report import units
from orchestrator.report.fronts import fronts_of
from workloads import registry
from workloads.base import Metric

if TYPE_CHECKING:
    from orchestrator.report.summary import Summary


def quality_note(row: Measurement) -> str:
    """The figures of quality of a row, for the cell of its throughput; empty where it has none."""
    figures = _figures(row, lambda metric: metric.beside_speed or metric.equal_from is not None)
    return ", ".join(f"{units.number(value)} {metric.title}" for metric, value in figures)


def equal(row: Measurement, limit: float | None = None) -> bool:
    """Tell if a row's output was compared and counts as equal to the plain path's.

    Args:
        limit: replaces the limits that figures declare.
    """
    figures = list(_figures(row, lambda metric: metric.equal_from is not None))
    return bool(figures) and all(
        value >= limit_ if metric.better == "higher" else value <= limit_
        for metric, value in figures
        for limit_ in [metric.equal_from if limit is None else limit]
        if limit_ is not None
    )


def at_equal_quality(summary: Summary, limit: float | None = None) -> Summary:
    """The summary with fronts of those rows alone whose output counts as the plain path's."""
    rows = [row for row in ranked(summary.rows, summary.raised) if equal(row, limit)]
    return replace(summary, fronts=fronts_of(rows, summary.settings))


def _figures(row: Measurement, wanted: Callable[[Metric], bool]) -> Iterator[tuple[Metric, float]]:
    """The figures of quality that a row has, of those that are wanted."""
    for name, metric in registry.metrics_of(row.workload).items():
        value = row.reported(name) if wanted(metric) else None
        if value is not None:
            yield metric, value
