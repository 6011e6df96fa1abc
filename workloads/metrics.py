"""Declarations of what a row may report: a named figure, and a workload's throughput.

A figure is declared once, beside its task or its workload; results, tables, comparisons and the
documentation read the declaration. A workload gives figures by name (``Result.metrics``), each rank
its own, and the declaration says how those of a gang become one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_OF_RANKS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "largest": max,
    "smallest": min,
    "sum": math.fsum,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure."""

    name: str  # in rows
    title: str  # in tables, with its unit beside it
    description: str  # one line
    unit: str = ""
    #: Which way is better; None where neither is: it explains another figure.
    better: Literal["higher", "lower"] | None = None
    #: How the figures of the ranks of a gang become the row's.
    ranks: Literal["mean", "largest", "smallest", "sum"] = "mean"


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
