"""Rules of jobs: the objections of its engine, model, dataset and workload to a job.

The plan asks before anything is loaded, and a worker again. Pure, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from workloads.base import JobDescription, Refusal
from workloads.data.datasets import DatasetParameters, dataset_refusals
from workloads.engines import ENGINES, engine_refusals
from workloads.engines.base import Ability
from workloads.models.catalog import checkpoint_kind
from workloads.models.checkpoints import CheckpointKind
from workloads.models.rules import text_refusals
from workloads.registry import TASKS, WORKLOADS, TaskSpec, WorkloadSpec, task_of


def refusals(spec: WorkloadSpec, job: JobDescription) -> tuple[Refusal, ...]:
    """All that speaks against a job: its engine, its model, and the workload's own rules."""
    objections: list[Refusal] = []
    if spec.ability is not None:
        objections += engine_refusals(job, spec.ability)
    if spec.tasks:
        objections += _model_refusals(spec, job)
    if issubclass(spec.parameters, DatasetParameters):
        objections += dataset_refusals(job)
    if spec.refuse is not None:
        objections += spec.refuse(job)
    return tuple(objections)


def refusals_by(
    workloads: Mapping[str, WorkloadSpec],
) -> Callable[[str], Callable[[JobDescription], tuple[Refusal, ...]] | None]:
    """The refusals of a workload of these, by its name; None for one that is not among them."""

    def rule_of(name: str) -> Callable[[JobDescription], tuple[Refusal, ...]] | None:
        spec = workloads.get(name)
        return None if spec is None else partial(refusals, spec)

    return rule_of


def _model_refusals(spec: WorkloadSpec, job: JobDescription) -> Iterator[Refusal]:
    """A model of a kind that the workload or the engine does not run, and what its kind refuses."""
    kind = checkpoint_kind(job.model)
    task = task_of(kind) if kind is not None else None
    if kind is None or task is None:
        return  # it cannot be told: the job itself will look
    if task.name in spec.tasks:
        yield from _task_refusals(spec, job, task, kind)
        yield from text_refusals(job)
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
    spec: WorkloadSpec, job: JobDescription, task: TaskSpec, kind: CheckpointKind
) -> Iterator[Refusal]:
    """Objections to a job with a model of a kind that its workload runs."""
    able = _ability(spec, job.engine)
    if able is not None and not able.takes(task.name):
        abilities = ((name, _ability(spec, name)) for name in spec.engines)
        others = [name for name, other in abilities if other is not None and other.takes(task.name)]
        yield Refusal(
            setting="engine",
            reason=f"it is {task.title} ({kind.architecture}), and for {spec.name} the engine "
            f"{job.engine} takes {' or '.join(TASKS[name].title for name in able.tasks)}",
            hint=f"write engine: {' or '.join(others)}" if others else "",
            unsupported=True,
        )
    declared = spec.declared(job.engine)
    for other in spec.tasks:
        for name in sorted(TASKS[other].settings - task.settings):
            if name in declared and not declared[name].is_default(job.parameters.get(name)):
                yield Refusal(
                    setting=name,
                    reason=f"{task.title} ({kind.architecture}) has none; it is a setting of "
                    f"{TASKS[other].title}",
                    hint=f"leave {name} out",
                )
    if task.refuse is not None:
        yield from task.refuse(job, kind)


def _ability(spec: WorkloadSpec, engine: str) -> Ability | None:
    """An engine's declaration of a workload's ability; None where it has it not."""
    spec_of_engine = ENGINES.get(engine)
    return (
        None
        if spec_of_engine is None or spec.ability is None
        else spec_of_engine.abilities.get(spec.ability)
    )
