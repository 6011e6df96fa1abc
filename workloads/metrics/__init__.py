"""Metrics: the figures of a row beside its columns, derived from raw samples."""

from __future__ import annotations

from workloads.declared import Declared
from workloads.metrics.base import Metric

#: Every metric that is derived from raw samples.
METRICS: Declared[Metric] = Declared("workloads.bench.metrics", Metric, "nightgrid.metrics")
