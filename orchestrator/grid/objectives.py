"""Objectives of a grid: the ``search:`` block and its constraints. Not part of any job id.

    search:
      objective: throughput
      subject_to: {ttft_s: "<= 0.5", peak_memory_bytes: "<= 0.9 card"}
      stop: {cells: 25 %, within: 2 %, hours: 6}

The search orders the cells of the grid and ends with the first stop that is reached.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.core.job import Job
from orchestrator.grid.diagnostics import Findings, suggestion
from orchestrator.grid.vocabulary import shown
from workloads import registry

#: Figures of every workload, and whether more is better.
COMMON: Mapping[str, bool] = {
    "throughput": True,
    "throughput_per_watt": True,
    "generated_tokens_per_s": True,
    "total_tokens_per_s": True,
    "items_per_s": True,
    "ttft_s": False,
    "ttft_p95_s": False,
    "tpot_p50_s": False,
    "tpot_p95_s": False,
    "tpot_p99_s": False,
    "latency_p50_s": False,
    "latency_p95_s": False,
    "power_w": False,
    "energy_j": False,
    "peak_memory_bytes": False,
}
#: Figures of which a card has a known amount, so that a bound may be a share of it.
OF_CARD = ("peak_memory_bytes",)
_CONSTRAINT = re.compile(r"\s*(<=|>=)\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(card)?\s*")
_PERCENT = re.compile(r"\s*([0-9.]+)\s*%\s*")


class SearchBlock(BaseModel):
    """The `search:` block: which cells of the grid are measured, and in what order."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    objective: str = Field(
        default="throughput", description="A figure with a better direction, such as throughput."
    )
    subject_to: dict[str, Any] = Field(
        default_factory=dict,
        description='Figure: bound. `ttft_s: "<= 0.5"`; `peak_memory_bytes: "<= 0.9 card"` is a '
        "share of a card's memory.",
    )
    stop: dict[str, Any] = Field(
        default_factory=dict,
        description="The search ends with the first that is reached: `hours: 6`, `cells: 25 %` (or "
        "a number of cells), `within: 2 %` (no other cell is likely to be that much better). "
        "Without any: `within: 2 %`.",
    )
    keep: str = Field(
        default="winner",
        description="`winner`, or `front`: also refine the front of throughput and latency.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A bound on a figure."""

    figure: str
    at_most: bool
    bound: float
    of_card: bool = False  # the bound is a share of what a card has

    def __str__(self) -> str:
        sign, card = "<=" if self.at_most else ">=", " card" if self.of_card else ""
        return f"{self.figure} {sign} {self.bound:g}{card}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """A checked ``search:`` block."""

    objective: str
    more_is_better: bool
    constraints: tuple[Constraint, ...] = ()
    hours: float | None = None
    cells: float | None = None  # a share if ``cells_are_share``, else a number
    cells_are_share: bool = False
    within: float | None = None
    front: bool = False


def directions_of(workloads: Iterable[str]) -> dict[str, bool]:
    """Figures with a better direction that rows of these workloads may have: is more better?"""
    known = dict(COMMON)
    for workload in workloads:
        for name, metric in registry.metrics_of(workload).items():
            if metric.better is not None:
                known[name] = metric.better == "higher"
    return known


class SearchReader:
    """Reads a ``search:`` block; problems go to the findings."""

    def __init__(self, findings: Findings, jobs: Iterable[Job]) -> None:
        self._findings = findings
        self._known = directions_of(dict.fromkeys(job.workload for job in jobs))

    def read(self, raw: Mapping[str, Any]) -> SearchSettings:
        """The settings; those of a block with problems are not used."""
        block = self._findings.structure(SearchBlock, raw, ("search",))
        objective = block.get("objective", "throughput")
        self._check_figure(("search", "objective"), objective)
        keep = block.get("keep", "winner")
        if keep not in ("winner", "front"):
            hint = suggestion(str(keep), ("winner", "front"))
            self._findings.complain(("search", "keep"), f"unknown: {shown(keep)}", hint)
        stop = self._stop(block.get("stop", {}))
        return SearchSettings(
            objective=objective,
            more_is_better=self._known.get(objective, True),
            constraints=tuple(self._constraints(block.get("subject_to", {}))),
            front=keep == "front",
            **(stop or {"within": 0.02}),
        )

    def _check_figure(self, path: tuple[str, ...], name: str, *, key: bool = False) -> None:
        if name not in self._known:
            hint = suggestion(name, self._known)
            message = f"no figure with a better direction is called {shown(name)}"
            self._findings.complain(path, message, hint, key=key)

    def _constraints(self, raw: Mapping[str, Any]) -> Iterator[Constraint]:
        for figure, text in raw.items():
            path = ("search", "subject_to", figure)
            self._check_figure(path, figure, key=True)
            match = _CONSTRAINT.fullmatch(text) if isinstance(text, str) else None
            number = _number(match[2]) if match else None
            if match is None or number is None or number <= 0:
                hint = 'a bound above 0, such as "<= 0.5" or ">= 0.99"'
                self._findings.complain(path, f"{shown(text)} is not a bound", hint)
                continue
            if match[3] and figure not in OF_CARD:
                message = f"a card has no amount of {figure}"
                self._findings.complain(path, message, f"`card` is for {', '.join(OF_CARD)}")
                continue
            yield Constraint(
                figure=figure, at_most=match[1] == "<=", bound=number, of_card=bool(match[3])
            )

    def _stop(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        stop: dict[str, Any] = {}
        for name, value in raw.items():
            path = ("search", "stop", name)
            percent = _PERCENT.fullmatch(value) if isinstance(value, str) else None
            share = _number(percent[1]) if percent else None
            plain = value if isinstance(value, int | float) and value is not True else None
            good = False
            if name == "hours":
                good = plain is not None and plain > 0
                stop["hours"] = plain
            elif name == "cells":
                good = share is not None and 0 < share <= 100
                good |= isinstance(plain, int) and plain > 0
                stop |= {"cells": share / 100 if share else plain, "cells_are_share": bool(share)}
            elif name == "within":
                good = share is not None and 0 < share < 100
                stop["within"] = share / 100 if share else None
            else:
                self._findings.unknown_key(path, ("hours", "cells", "within"))
                continue
            if not good:
                hint = {"hours": "6", "cells": "25 % or 40", "within": "2 %"}[name]
                message = f"{shown(value)} is no {name} to stop at"
                self._findings.complain(path, message, f"such as `{name}: {hint}`")
        return stop


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
