"""Objectives of a grid: the blocks ``search:`` and ``questions:``. Not part of any job id.

    search: {objective: throughput, subject_to: {ttft_s: "<= 0.5"}, stop: {cells: 25 %, hours: 6}}
    questions: [{best: throughput, for: {model: chatglm3-6b}, subject_to: {ttft_s: "<= 0.3"}}]

The search orders the cells of the grid and ends with the first stop that is reached. A question is
answered from the cells that it is about, measured or predicted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.core.job import Job, Scalar
from orchestrator.grid.diagnostics import Findings, suggestion
from orchestrator.grid.vocabulary import FIELD_NAMES, shown
from orchestrator.grid.yaml import Path_
from workloads import registry

#: Figures of every workload, and whether more is better.
COMMON: Mapping[str, bool] = {
    **dict.fromkeys(("throughput", "throughput_per_watt", "generated_tokens_per_s"), True),
    **dict.fromkeys(("total_tokens_per_s", "items_per_s"), True),
    **dict.fromkeys(("ttft_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s", "tpot_p99_s"), False),
    **dict.fromkeys(("latency_p50_s", "latency_p95_s", "power_w", "energy_j"), False),
    "peak_memory_bytes": False,
}
#: Figures of which a card has a known amount, so that a bound may be a share of it.
OF_CARD = ("peak_memory_bytes",)
_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_CONSTRAINT = re.compile(rf"\s*(<=|>=)\s*({_NUMBER}(?:[eE][-+]?[0-9]+)?)\s*(card)?\s*")
#: What a search may stop at, with examples.
_STOPS = {"hours": "6", "cells": "25 % or 40", "within": "2 %", "questions": "false"}
_PERCENT = re.compile(rf"\s*({_NUMBER})\s*%\s*")


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
        "a number of cells), `within: 2 %` (no other cell is likely to be that much better); "
        "`questions: false` goes on after all questions have reached their confidence. Without "
        "any: the questions, or `within: 2 %` where there are none.",
    )
    keep: str = Field(
        default="winner",
        description="`winner`, or `front`: also refine the front of throughput and latency.",
    )


class QuestionBlock(BaseModel):
    """An entry of the `questions:` block: which setting is the best of some."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    best: str = Field(description="A figure with a better direction, such as throughput.")
    about: dict[str, Any] = Field(
        default_factory=dict,
        alias="for",
        description="Settings of the jobs that it is about, each with a value or a list of them; "
        "left out: all.",
    )
    subject_to: dict[str, Any] = Field(
        default_factory=dict, description="Figure: bound, as in `search:`."
    )
    confidence: Any = Field(
        default=0.9,
        description="Probability at which the answer is good enough: 0.9, or 90 %.",
    )
    within: Any = Field(
        default="0 %",
        description="Call a setting the best if no other is more than this better, such as 1 %.",
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
    questions: bool = False  # end once all questions have reached their confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A checked entry of ``questions:``."""

    best: str
    more_is_better: bool
    about: tuple[tuple[str, tuple[Scalar, ...]], ...] = ()  # settings, each with its values
    constraints: tuple[Constraint, ...] = ()
    confidence: float = 0.9
    within: float = 0.0

    def covers(self, job: Job) -> bool:
        """Return whether it is about a job."""
        return all(str(setting_of(job, name)) in map(str, values) for name, values in self.about)

    def __str__(self) -> str:
        settings = [f"{name} {' or '.join(map(str, values))}" for name, values in self.about]
        limits = [str(one) for one in self.constraints]
        about = f" for {', '.join(settings)}" if settings else ""
        return f"Best {self.best}{about}" + (f" with {', '.join(limits)}" if limits else "")


def setting_of(job: Job, name: str) -> Scalar:
    """The value of a setting of a job, a field or a parameter; None if it has none."""
    return getattr(job, name) if name in _FIELDS else dict(job.parameters).get(name)


_FIELDS = ("experiment", *FIELD_NAMES)


def directions_of(workloads: Iterable[str]) -> dict[str, bool]:
    """Figures with a better direction that rows of these workloads may have: is more better?"""
    known = dict(COMMON)
    for workload in workloads:
        for name, metric in registry.metrics_of(workload).items():
            if metric.better is not None:
                known[name] = metric.better == "higher"
    return known


class ObjectivesReader:
    """Reads ``search:`` and ``questions:``; problems go to the findings. What is returned for a
    block with problems is not used. Engines in ``open_engines`` are those that a plan may choose.
    """

    def __init__(
        self, findings: Findings, jobs: Iterable[Job], open_engines: Iterable[str] = ()
    ) -> None:
        self._findings, self._jobs = findings, tuple(jobs)
        self._known = directions_of(dict.fromkeys(job.workload for job in self._jobs))
        self._open_engines = frozenset(open_engines)

    def search(self, raw: Mapping[str, Any], *, questions: bool = False) -> SearchSettings:
        """The settings of the search of a grid, with or without questions."""
        block = self._findings.structure(SearchBlock, raw, ("search",))
        objective = block.get("objective", "throughput")
        self._check_figure(("search", "objective"), objective)
        keep = block.get("keep", "winner")
        if keep not in ("winner", "front"):
            hint = suggestion(str(keep), ("winner", "front"))
            self._findings.complain(("search", "keep"), f"unknown: {shown(keep)}", hint)
        stop = {"questions": questions} | self._stop(block.get("stop", {}), questions=questions)
        if not questions and len(stop) == 1:
            stop["within"] = 0.02
        return SearchSettings(
            objective=objective,
            more_is_better=self._known.get(objective, True),
            constraints=self._constraints(("search", "subject_to"), block.get("subject_to", {})),
            front=keep == "front",
            **stop,
        )

    def questions(self, raw: Sequence[Mapping[str, Any]]) -> tuple[Question, ...]:
        """The questions of a grid."""
        return tuple(self._question(("questions", at), one) for at, one in enumerate(raw))

    def _question(self, path: Path_, raw: Mapping[str, Any]) -> Question:
        block = self._findings.structure(QuestionBlock, raw, path)
        best = block.get("best", "throughput")
        self._check_figure((*path, "best"), best)
        about = tuple(self._about((*path, "for"), block.get("for", {})))
        question = Question(
            best=best,
            more_is_better=self._known.get(best, True),
            about=about,
            constraints=self._constraints((*path, "subject_to"), block.get("subject_to", {})),
            confidence=self._share((*path, "confidence"), block.get("confidence", 0.9), "0.9"),
            within=self._share((*path, "within"), block.get("within", "0 %"), "1 %"),
        )
        chosen = self._open_engines and any(name == "engine" for name, _ in about)
        if not (self._findings.count or chosen or any(map(question.covers, self._jobs))):
            message, hint = "no job has all of these settings", "leave one out"
            self._findings.complain((*path, "for"), message, hint)
        return question

    def _about(
        self, path: Path_, raw: Mapping[str, Any]
    ) -> Iterator[tuple[str, tuple[Scalar, ...]]]:
        """Settings with their values, which some jobs must have."""
        names = dict.fromkeys(
            (*_FIELDS, *(name for job in self._jobs for name, _ in job.parameters))
        )
        for name, value in raw.items():
            if name not in names:
                self._findings.unknown_key((*path, name), names)
                continue
            values = tuple(value) if isinstance(value, list) else (value,)
            present = {str(setting_of(job, name)): None for job in self._jobs}
            if name == "engine":
                present |= dict.fromkeys(self._open_engines)
            for one in values:
                if self._jobs and str(one) not in present:
                    hint = suggestion(str(one), present)
                    self._findings.complain((*path, name), f"no job has {name} {shown(one)}", hint)
            yield name, values

    def _share(self, path: Path_, value: Any, example: str) -> float:
        """A number below 1, or per cent."""
        number, _ = _amount(value)
        confidence = path[-1] == "confidence"
        if not (0.5 if confidence else 0) <= number < 1:
            least = "from 0.5 to below 1" if confidence else "below 100 %"
            hint = f"{least}, such as `{path[-1]}: {example}`"
            self._findings.complain(path, f"{shown(value)} is no {path[-1]}", hint)
        return float(number)

    def _check_figure(self, path: Path_, name: str, *, key: bool = False) -> None:
        if name not in self._known:
            hint = suggestion(name, self._known)
            message = f"no figure with a better direction is called {shown(name)}"
            self._findings.complain(path, message, hint, key=key)

    def _constraints(self, block: Path_, raw: Mapping[str, Any]) -> tuple[Constraint, ...]:
        constraints = []
        for figure, text in raw.items():
            path = (*block, figure)
            self._check_figure(path, figure, key=True)
            match = _CONSTRAINT.fullmatch(text) if isinstance(text, str) else None
            if match is None or not float(match[2]):
                hint = 'a bound above 0, such as "<= 0.5" or ">= 0.99"'
                self._findings.complain(path, f"{shown(text)} is not a bound", hint)
                continue
            at_most, bound, of_card = match[1] == "<=", float(match[2]), bool(match[3])
            if of_card and figure not in OF_CARD:
                message = f"a card has no amount of {figure}"
                self._findings.complain(path, message, f"`card` is for {', '.join(OF_CARD)}")
            constraints.append(
                Constraint(figure=figure, at_most=at_most, bound=bound, of_card=of_card)
            )
        return tuple(constraints)

    def _stop(self, raw: Mapping[str, Any], *, questions: bool) -> dict[str, Any]:
        stop: dict[str, Any] = {}
        for name, value in raw.items():
            path = ("search", "stop", name)
            number, is_share = _amount(value)
            is_good = {
                "hours": number > 0 and not is_share,
                "cells": 0 < number <= 1 if is_share else number > 0 and isinstance(number, int),
                "within": 0 < number < 1 and is_share,
                "questions": isinstance(value, bool) and (questions or not value),
            }
            if name not in is_good:
                self._findings.unknown_key(path, _STOPS)
                continue
            if not is_good[name]:
                message = f"{shown(value)} is no {name} to stop at"
                self._findings.complain(path, message, f"such as `{name}: {_STOPS[name]}`")
            stop[name] = value if name == "questions" else number
            if name == "cells":
                stop["cells_are_share"] = is_share
        return stop


def _amount(value: Any) -> tuple[float, bool]:
    """A number (per cent as a share of 1) and whether it is per cent; NaN of anything else."""
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        return float(match[1]) / 100, True
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (value if is_number else math.nan), False
