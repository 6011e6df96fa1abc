"""Throughput against latency: which settings no other setting beats in both.

A larger batch gives more tokens a second and makes each prompt wait longer. What is worth having
is the Pareto front: the settings for which no other one is both faster and quicker. Where on it to
stand is the reader's choice; what lies off it is never the right one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.contests import Works
from orchestrator.report.grouping import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """One piece of work on one device. ``best`` runs from the lowest latency upwards."""

    setting: Setting  # engine and isolation are blank: they are free to choose
    unit: str
    best: tuple[Measurement, ...]
    beaten: tuple[Measurement, ...]  # some row is no slower and no later, and better in one


def fronts_of(rows: Sequence[Measurement], settings: Mapping[str, Setting]) -> tuple[Front, ...]:
    """A front for each piece of work with at least two rows that have both figures."""
    groups: dict[tuple[Setting, str], list[Measurement]] = {}
    works = Works(settings)
    for row in rows:
        if row.state is State.SUCCEEDED and _point(row) is not None:
            key = (works[row], row.metrics.throughput_unit)
            groups.setdefault(key, []).append(row)
    fronts = []
    for (setting, unit), group in groups.items():
        if len(group) > 1:
            best = pareto(group)
            on_it = {row.job_id for row in best}
            beaten = tuple(row for row in group if row.job_id not in on_it)
            fronts.append(Front(setting=setting, unit=unit, best=best, beaten=beaten))
    return tuple(fronts)


def pareto(rows: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """The rows that no other row beats, from the lowest latency upwards; all have both figures."""
    front: list[Measurement] = []
    for row in sorted(rows, key=lambda row: (latency(row), -throughput(row))):
        if not front or throughput(row) > throughput(front[-1]):
            front.append(row)
    return tuple(front)


def throughput(row: Measurement) -> float:
    """The row's throughput, 0 where it has none."""
    return row.metrics.throughput or 0.0


def latency(row: Measurement) -> float:
    """The row's median latency of a prompt in seconds."""
    return row.metrics.latency_p50_s or 0.0


def _point(row: Measurement) -> tuple[float, float] | None:
    values = (row.metrics.latency_p50_s, row.metrics.throughput)
    if any(value is None or not math.isfinite(value) or value <= 0 for value in values):
        return None
    return latency(row), throughput(row)
