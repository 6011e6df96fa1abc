"""Training techniques (``technique.py``); each file declares some in its ``SPECS``.

To add one, write its class and name it there, or register it in another package under the entry
points ``nightgrid.techniques`` (docs/extending.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import cache
from typing import Any

from pydantic import create_model

from workloads.base import JobDescription, Metric, Refusal
from workloads.registry import TASKS, Declared
from workloads.settings import Declaration, Value, WorkloadParameters
from workloads.training.methods import MethodParameters
from workloads.training.technique import Technique

#: Every technique by name; other packages cannot replace ours.
TECHNIQUES: Declared[type[Technique]] = Declared(
    (
        "workloads.training.techniques.batches",
        "workloads.training.techniques.kernels",
        "workloads.training.techniques.optimization",
        "workloads.training.techniques.precision",
        "workloads.training.techniques.strategy",
        "workloads.training.checkpoints",
        "workloads.compression.distillation",
        "workloads.compression.pruning",
    ),
    Technique,
    "nightgrid.techniques",
)


@cache
def all_techniques() -> tuple[type[Technique], ...]:
    """Every technique in order; warn and skip other packages' that reuse a setting's name."""
    kinds: dict[str, type[Technique]] = {}
    settings = {field.name: "a job" for field in fields(JobDescription)}  # name -> its owner
    settings |= dict.fromkeys(MethodParameters.model_fields, "the method of fine-tuning")
    for name in TECHNIQUES:  # ours come first
        kind = TECHNIQUES[name]
        if doubled := settings.keys() & kind.model_fields.keys():
            taken = min(doubled)
            text = f"technique {name}: {settings[taken]} has a setting {taken} already; rename one"
            if name in TECHNIQUES.own:
                raise TypeError(text)
            logging.getLogger("nightgrid.techniques").warning("left out: %s", text)
            continue
        kinds[name] = kind
        settings |= dict.fromkeys(kind.model_fields, name)
    return tuple(sorted(kinds.values(), key=lambda kind: (kind.order, kind.name)))


def _set(parameters: Mapping[str, Any]) -> Iterator[Technique]:
    for kind in all_techniques():
        if next(iter(kind.model_fields)) in parameters:
            yield kind.model_validate({name: parameters[name] for name in kind.model_fields})


def chosen(parameters: Mapping[str, Any]) -> tuple[Technique, ...]:
    """Techniques that act in a job with these parameters."""
    return tuple(technique for technique in _set(parameters) if technique.acts)


def technique_refusals(job: JobDescription) -> Iterator[Refusal]:
    """Objections of all techniques of a job."""
    for technique in _set(job.parameters):
        yield from technique.declared_refusals(job)
        if technique.acts:
            yield from technique.refusals(job)


def technique_metrics(tasks: Sequence[str]) -> tuple[Metric, ...]:
    """The figures that techniques add to rows of a workload with these tasks."""
    return tuple(metric for kind in _able(tasks) for metric in kind.metrics)


def technique_notes(job: JobDescription) -> tuple[str, ...]:
    """Notes of all techniques of a job for the plan."""
    return tuple(note for kind in chosen(job.parameters) for note in kind.notes(job))


def _able(tasks: Sequence[str]) -> Iterator[type[Technique]]:
    functions = [set(TASKS[task].functions) for task in tasks]
    for kind in all_techniques():
        if any(there.issuperset(kind.needs) for there in functions):
            yield kind


def with_techniques(
    name: str,
    base: type[WorkloadParameters],
    tasks: Sequence[str],
    defaults: Mapping[str, Value] | None = None,
) -> type[Any]:
    """Extend ``base`` by settings of techniques for ``tasks``, with other ``defaults`` if given."""
    settings: dict[str, Any] = {}
    for kind in _able(tasks):
        for setting, info in kind.model_fields.items():
            if defaults and setting in defaults:
                declaration = info.json_schema_extra
                assert isinstance(declaration, Declaration)
                info = copy(info)
                info.default = defaults[setting]
                info.json_schema_extra = replace(declaration, default=defaults[setting])
            settings[setting] = (info.annotation, info)
    return create_model(name, __base__=base, __doc__=base.__doc__, **settings)
