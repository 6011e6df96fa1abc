"""Looks up what workloads declare (``workloads/workloads``), and pairs them with tasks.

A worker calls ``load`` once per attempt; nothing else here imports the function behind a workload.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from workloads.engine_registry import ENGINES
from workloads.errors import BadConfiguration
from workloads.metrics import METRICS
from workloads.metrics.base import Metric, Throughput, by_name, with_others
from workloads.settings import Declaration
from workloads.tasks import TASKS, task_of
from workloads.tasks.base import TaskSpec
from workloads.workloads import WORKLOADS
from workloads.workloads.base import WorkloadSpec

if TYPE_CHECKING:
    from workloads.api import Workload
    from workloads.models.catalog import ModelEntry


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
