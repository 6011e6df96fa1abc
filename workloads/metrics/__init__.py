"""Metrics: the figures of a row beside its columns. Each file here derives one (``base.py``).

To add one, write ``NAME.py`` with its ``SPEC``, or name a spec of another installed package under
the entry points ``nightgrid.metrics`` (docs/adding-a-metric.md). Rows, their schema, rankings and
comparisons find it.
"""

from __future__ import annotations

from workloads.declared import Declared
from workloads.metrics.base import SAMPLES as SAMPLES
from workloads.metrics.base import TOKENS as TOKENS
from workloads.metrics.base import Metric as Metric
from workloads.metrics.base import Throughput as Throughput
from workloads.metrics.base import Timed as Timed
from workloads.metrics.base import by_name as by_name
from workloads.metrics.base import of_ranks as of_ranks
from workloads.metrics.base import with_others as with_others

#: Every metric that is declared in a file of its own.
METRICS: Declared[Metric] = Declared(__name__, Metric, "nightgrid.metrics", separator="_")
