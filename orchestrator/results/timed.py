"""Figures that metrics derive from the timed part of an attempt.

Only complete timed repeats count: those that every rank finished, without warm-up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import cache

from orchestrator.core.measurement import Ranked, timed_repeats
from workloads.base import Item, Metric, Sample, Timed

_LOG = logging.getLogger("nightgrid.metrics")


def derived_figures(
    metrics: Mapping[str, Metric],
    samples: Sequence[tuple[int, Sample]],
    items: Sequence[tuple[int, Item]] = (),
    *,
    complete: Mapping[int, Sequence[Ranked]] | None = None,
) -> dict[str, float]:
    """The figures, by name, of those metrics that derive theirs from raw samples.

    One that fails, or gives no finite number, is left out: a row is worth more than its figure.

    Args:
        complete: the timed repeats that every rank finished, where the caller has them.
    """
    deriving = [metric for metric in metrics.values() if metric.figure is not None]
    if not deriving:
        return {}
    repeats = timed_repeats(samples) if complete is None else complete
    counted = tuple(sample for pairs in repeats.values() for _, sample in pairs)
    if not counted:
        return {}
    timed = Timed(samples=counted, items=tuple(item for _, item in items))
    found = {metric.name: _figure(metric, timed) for metric in deriving}
    return {name: value for name, value in found.items() if value is not None}


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
