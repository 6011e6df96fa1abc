"""The seam of metrics: a named figure of a row, and a workload's throughput.

A figure is declared once; results, tables, rankings, comparisons and the documentation read the
declaration. It comes from one of two places:

    a workload   reports it by name (``Result.metrics``), each rank its own, and the declaration
                 says how those of a gang become one. It stands beside the task or the workload.
    raw samples  ``figure`` derives it from those of the timed part. ``workloads/metrics/NAME.py``
                 declares one in its ``SPEC``, or another package does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from workloads.api import Item, Sample

_LOG = logging.getLogger("nightgrid.metrics")

_OF_RANKS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "largest": max,
    "smallest": min,
    "sum": math.fsum,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The timed part of an attempt, of all ranks: complete repeats without warm-up."""

    samples: Sequence[Sample]
    items: Sequence[Item]  # prompts of the last complete repeat, where the workload has such


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure."""

    name: str  # in rows
    title: str  # in tables, with its unit beside it
    description: str  # one line
    unit: str = ""
    #: Which way is better; None where neither is: it explains another figure.
    better: Literal["higher", "lower"] | None = None
    #: From which value on a row's output counts as equal to the plain path's; such a figure stands
    #: beside the row's speed. None: it is not about that.
    equal_from: float | None = None
    #: Whether tables name it beside the throughput, as they do figures with ``equal_from``.
    beside_speed: bool = False
    #: How the figures of the ranks of a gang become the row's.
    ranks: Literal["mean", "largest", "smallest", "sum"] = "mean"
    #: Derives the figure from raw samples; None where they do not tell. Without it the workload
    #: reports the figure.
    figure: Callable[[Timed], float | None] | None = None
    #: The workloads and tasks whose rows have it; none: all. Of one that is declared beside its
    #: workload or its task this says nothing.
    of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Throughput of a workload, and its unit; more is always better."""

    unit: str  # e.g. tokens/s
    counts: Literal["output_tokens", "items"]  # field of ``api.Sample``


TOKENS = Throughput(unit="tokens/s", counts="output_tokens")
SAMPLES = Throughput(unit="samples/s", counts="items")


def of_ranks(
    declared: Mapping[str, Metric], reported: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """The figures of all ranks as the row's; one that nobody declared is the ranks' mean."""
    names = dict.fromkeys(name for values in reported for name in values)
    return {
        name: _OF_RANKS[declared[name].ranks if name in declared else "mean"](
            [values[name] for values in reported if name in values]
        )
        for name in names
    }


def by_name(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Declarations by name.

    Raises:
        TypeError: two differ and have the same name.
    """
    found: dict[str, Metric] = {}
    for metric in metrics:
        if found.setdefault(metric.name, metric) != metric:
            raise TypeError(f"two metrics are called {metric.name} and differ")
    return found


def with_others(
    declared: Mapping[str, Metric], others: Iterable[Metric], names: Set[str]
) -> dict[str, Metric]:
    """Add those of other metrics that are of one of these workloads and tasks, or of all. One
    whose name is taken is left out, with a warning."""
    found = dict(declared)
    for metric in others:
        if metric.of and names.isdisjoint(metric.of):
            continue
        if metric.name in declared:
            _LOG.warning("left out: a second metric %s of %s", metric.name, " and ".join(names))
            continue
        found[metric.name] = metric
    return found
