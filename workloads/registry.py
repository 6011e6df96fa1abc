"""Looks up what workloads declare (``workloads/workloads``), and pairs them with tasks.

A worker calls ``load`` once per attempt; nothing else here imports the function behind a workload.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from workloads.data.rules import dataset_refusals
from workloads.engines import ENGINES, engine_refusals
from workloads.engines.base import Ability
from workloads.errors import BadConfiguration
from workloads.metrics import METRICS, Metric, Throughput, by_name, with_others
from workloads.models.catalog import ModelEntry, checkpoint_kind
from workloads.models.checkpoint_kind import CheckpointKind
from workloads.models.model_rules import text_refusals
from workloads.parameters import DatasetParameters
from workloads.refusal import Asked, Refusal
from workloads.settings import Declaration
from workloads.tasks import TASKS, task_of
from workloads.tasks.base import TaskSpec
from workloads.workloads import WORKLOADS
from workloads.workloads.base import WorkloadSpec

if TYPE_CHECKING:
    from workloads.api import Workload

#: The name of ``WorkloadSpec`` in packages that were written for earlier versions.
WorkloadEntry = WorkloadSpec


def find_workload(name: str) -> WorkloadSpec:
    """The spec of this name.

    Raises:
        BadConfiguration: there is none; the message lists what there is.
    """
    if name not in WORKLOADS:
        close = difflib.get_close_matches(name, WORKLOADS, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        there_is = ", ".join(WORKLOADS)
        raise BadConfiguration(f"no workload '{name}'{hint or '.'} There is: {there_is}.")
    return WORKLOADS[name]


def refusals(spec: WorkloadSpec, asked: Asked) -> tuple[Refusal, ...]:
    """All that speaks against a job: its engine, its model, and the workload's own rules."""
    found: list[Refusal] = []
    if spec.ability is not None:
        found += engine_refusals(asked, spec.ability)
    if spec.tasks:
        found += _model_refusals(spec, asked)
    if issubclass(spec.parameters, DatasetParameters):
        found += dataset_refusals(asked)
    if spec.refuse is not None:
        found += spec.refuse(asked)
    return tuple(found)


def refusals_by(
    workloads: Mapping[str, WorkloadSpec],
) -> Callable[[str], Callable[[Asked], tuple[Refusal, ...]] | None]:
    """The refusals of a workload of these, by its name; None for one that is not among them."""

    def rule_of(name: str) -> Callable[[Asked], tuple[Refusal, ...]] | None:
        spec = workloads.get(name)
        return None if spec is None else partial(refusals, spec)

    return rule_of


def _model_refusals(spec: WorkloadSpec, asked: Asked) -> Iterator[Refusal]:
    """A model of a kind that the workload or the engine does not run, and what its kind refuses."""
    kind = checkpoint_kind(asked.model)
    task = task_of(kind) if kind is not None else None
    if kind is None or task is None:
        return  # it cannot be told: the job itself will look
    if task.name in spec.tasks:
        yield from _task_refusals(spec, asked, task, kind)
        yield from text_refusals(asked)
        return
    others = [other for other in WORKLOADS.values() if not other.implied]
    fitting = [other.name for other in others if task.name in other.tasks]
    yield Refusal(
        setting="model",
        reason=f"it is {task.title} ({kind.architecture}), and {spec.name} takes "
        f"{' or '.join(TASKS[name].title for name in spec.tasks)}",
        hint=f"write workload: {' or '.join(fitting)}"
        if fitting
        else "no workload of this installation takes such a model",
    )


def _task_refusals(
    spec: WorkloadSpec, asked: Asked, task: TaskSpec, kind: CheckpointKind
) -> Iterator[Refusal]:
    """Objections to a job with a model of a kind that its workload runs."""
    able = _ability(spec, asked.engine)
    if able is not None and not able.takes(task.name):
        each = ((name, _ability(spec, name)) for name in spec.engines)
        others = [name for name, other in each if other is not None and other.takes(task.name)]
        yield Refusal(
            setting="engine",
            reason=f"it is {task.title} ({kind.architecture}), and for {spec.name} the engine "
            f"{asked.engine} takes {' or '.join(TASKS[name].title for name in able.tasks)}",
            hint=f"write engine: {' or '.join(others)}" if others else "",
            unsupported=True,
        )
    declared = spec.declared(asked.engine)
    for other in spec.tasks:
        for name in sorted(TASKS[other].settings - task.settings):
            if name in declared and not declared[name].is_default(asked.parameters.get(name)):
                yield Refusal(
                    setting=name,
                    reason=f"{task.title} ({kind.architecture}) has none; it is a setting of "
                    f"{TASKS[other].title}",
                    hint=f"leave {name} out",
                )
    if task.refuse is not None:
        yield from task.refuse(asked, kind)


def _ability(spec: WorkloadSpec, engine: str) -> Ability | None:
    """An engine's declaration of a workload's ability; None where it has it not."""
    found = ENGINES.get(engine)
    return None if found is None or spec.ability is None else found.abilities.get(spec.ability)


def task_for(workload: str, model: ModelEntry) -> TaskSpec:
    """The task by which a workload runs a model.

    Raises:
        BadConfiguration: the workload takes no such model, or has no task.
    """
    names = find_workload(workload).tasks
    task = task_of(model.checkpoint) or (TASKS[names[0]] if names else None)
    if task is None or task.name not in names:
        title = task.title if task is not None else "of a kind that is not known"
        takes = " or ".join(TASKS[name].title for name in names) or "no model"
        what = f"{model.name} is {title} ({model.architecture})"
        raise BadConfiguration(f"{what}, and {workload} takes {takes}")
    return task


def metrics_of(workload: str) -> Mapping[str, Metric]:
    """The declarations of all figures that rows of a workload may have, by name; empty for a
    workload that is not installed."""
    entry = WORKLOADS.get(workload)
    if entry is None:
        return {}
    known = _KNOWN_METRICS.get(workload)
    if known is None or known[0] is not entry:
        own = (*entry.metrics, *_of_engines(entry.ability))
        known = _KNOWN_METRICS[workload] = entry, _metrics_of(workload, entry.tasks, own)
    return known[1]


#: What ``metrics_of`` found, with the spec that it was found for: every row asks.
_KNOWN_METRICS: dict[str, tuple[WorkloadSpec, Mapping[str, Metric]]] = {}


@cache
def _of_engines(ability: str | None) -> tuple[Metric, ...]:
    """Figures of the engines that have an ability."""
    able = (spec for spec in ENGINES.values() if ability is not None and ability in spec.abilities)
    return tuple(metric for spec in able for metric in spec.metrics)


@cache
def _metrics_of(
    workload: str, tasks: tuple[str, ...], own: tuple[Metric, ...]
) -> Mapping[str, Metric]:
    declared = by_name((*own, *(metric for name in tasks for metric in TASKS[name].metrics)))
    return MappingProxyType(with_others(declared, METRICS.values(), {workload, *tasks}))


def throughput_of(workload: str) -> Throughput | None:
    """Throughput that a workload declares; None where it declares none."""
    entry = WORKLOADS.get(workload)
    return entry.throughput if entry is not None else None


def declared(workload: str, engine: str) -> Mapping[str, Declaration]:
    """The declaration of every setting that such jobs have beside a job's own, by name; empty for
    a workload that is not installed."""
    entry = WORKLOADS.get(workload)
    return entry.declared(engine) if entry is not None else {}


def declared_in_rows(workload: str, engine: str) -> Mapping[str, Declaration]:
    """The same, and settings that rows of earlier versions have besides."""
    entry = WORKLOADS.get(workload)
    return entry.declared_in_rows(engine) if entry is not None else {}


def load(name: str) -> Workload:
    """Import the function behind a workload; this is where torch comes in.

    Raises:
        BadConfiguration: no workload has this name.
        ImportError: a package that the workload needs is missing.
    """
    module_name, _, function = find_workload(name).function.partition(":")
    return cast("Workload", getattr(importlib.import_module(module_name), function))
