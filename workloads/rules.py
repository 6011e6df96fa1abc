"""Objections of engine, model, dataset and workload to a job, for plans and workers. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.base import JobDescription, Refusal, Request, require
from workloads.data.datasets import DatasetParameters, dataset_notes, dataset_refusals
from workloads.engines import ENGINES, elsewhere
from workloads.engines.base import Ability, EngineSpec
from workloads.models.catalog import checkpoint_kind
from workloads.models.random_weights import PREFIX as RANDOM
from workloads.models.rules import look_notes, look_refusals, text_refusals
from workloads.registry import (
    TASKS,
    WORKLOADS,
    CheckpointKind,
    TaskSpec,
    WorkloadSpec,
    find_workload,
    task_of,
)
from workloads.settings import declarations


def refusals(spec: WorkloadSpec, job: JobDescription) -> tuple[Refusal, ...]:
    """All objections to a job: of its engine, its model and the workload's own rules."""
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


def notes(spec: WorkloadSpec, job: JobDescription) -> tuple[str, ...]:
    """Remarks of a plan on a job that it accepts: on its model, its data and by the workload."""
    own = tuple(spec.notes(job)) if spec.notes is not None else ()
    of_data = dataset_notes(job) if issubclass(spec.parameters, DatasetParameters) else ()
    kind = checkpoint_kind(job.model) if spec.tasks else None
    task = task_of(kind) if kind is not None and not kind.pipeline else None
    of_model = look_notes(job, task.name) if task is not None else ()
    return (*of_model, *of_data, *own)


def require_allowed(request: Request, device: str, cards: int) -> None:
    """Check all rules in the process that runs the job; raises as ``require``."""
    job = JobDescription(
        model=request.model,
        dataset=request.dataset,
        precision=request.precision,
        device=device,
        batch_size=request.batch_size,
        cards=cards,
        parameters={**request.parameters, **request.settings},
        engine=request.engine,
    )
    require(refusals(find_workload(request.workload), job))


def engine_refusals(job: JobDescription, ability: str) -> Iterator[Refusal]:
    """Objections to a job's engine, and to settings that depend on it. Pure."""
    spec = ENGINES.get(job.engine)
    if spec is None:
        return  # the grid's reader has said so
    if not spec.runs_on(job.device):
        yield Refusal(setting="engine", reason=elsewhere(spec, job.device), unsupported=True)
        return
    yield from _mode_refusals(spec, job)
    yield from _setting_refusals(spec, job, ability)
    settings = spec.settings(ability)
    able = "tensor_parallel" in spec.features or (
        settings is not None and "tensor_parallel" in settings.model_fields
    )
    if (job.parameters.get("tensor_parallel") or 1) > 1 and not able:
        others = [other.name for other in ENGINES.known() if "tensor_parallel" in other.features]
        reason = f"with the engine {spec.name} this version gives every card the whole model"
        hint = f"engine {' or '.join(others)} splits matrices over cards"
        yield Refusal(setting="tensor_parallel", reason=reason, hint=hint, unsupported=True)
    if (declared := spec.abilities.get(ability)) is not None:
        yield from _ability_refusals(spec, declared, ability, job)


def _ability_refusals(
    spec: EngineSpec, able: Ability, ability: str, job: JobDescription
) -> Iterator[Refusal]:
    """Refuse adapters, attentions and random weights that the engine lacks; add its own
    objections."""
    makes = not spec.own_loader if able.random_weights is None else able.random_weights
    if job.model.startswith(RANDOM) and not makes:
        reason = f"the engine {spec.name} reads weights from files, and {job.model} has none"
        hint = "leave out `engine:`, or name a checkpoint"
        yield Refusal(setting="model", reason=reason, hint=hint, unsupported=True)
    if job.parameters.get("adapter") and not able.adapters:
        others = [
            other.name
            for other in ENGINES.known()
            if other.runs_on(job.device)
            and ability in other.abilities
            and other.abilities[ability].adapters
        ]
        reason = f"with the engine {spec.name} this version puts on no adapters"
        hint = f"engine {' or '.join(others)} does" if others else ""
        yield Refusal(setting="adapter", reason=reason, hint=hint, unsupported=True)
    attention = job.parameters.get("attention")
    if attention is not None and able.attentions is not None and attention not in able.attentions:
        yield Refusal(
            setting="attention",
            reason=f"the engine {spec.name} has its own in the place of "
            f"{' or '.join(able.attentions)}, and none for {attention}",
            hint="leave attention out",
            unsupported=True,
        )
    if able.refuse is not None:
        yield from able.refuse(job)


def _mode_refusals(spec: EngineSpec, job: JobDescription) -> Iterator[Refusal]:
    for device, modes in spec.modes.items():
        wanted = job.parameters.get(modes.setting)
        if wanted is None:
            continue
        if device != job.device:
            reason, hint = f"{job.device} has no such mode; it is one of {device} cards", ""
        elif wanted in modes.lacking:
            reason = f"the engine {spec.name} {modes.lacking[wanted]}"
            hint = f"leave {modes.setting} out"
        else:
            continue
        yield Refusal(setting=modes.setting, reason=reason, hint=hint, unsupported=True)


def _setting_refusals(spec: EngineSpec, job: JobDescription, ability: str) -> Iterator[Refusal]:
    own = declarations(settings) if (settings := spec.settings(ability)) else {}
    refused = set(own)
    for other in ENGINES.known():
        settings = other.settings(ability)
        for name, declaration in declarations(settings).items() if settings else ():
            value = job.parameters.get(name, declaration.default)
            if name not in refused and not declaration.is_default(value):
                refused.add(name)
                reason = f"the engine {spec.name} has no {name}; {other.name} has"
                yield Refusal(setting=name, reason=reason, unsupported=True)


def _model_refusals(spec: WorkloadSpec, job: JobDescription) -> Iterator[Refusal]:
    """Refuse kinds of models that the workload or engine cannot run; add the task's objections."""
    kind = checkpoint_kind(job.model)
    task = task_of(kind) if kind is not None else None
    if kind is None:
        return  # unknown: the job itself will look
    if task is None:
        engine = ENGINES.get(job.engine)
        own_loader = engine is not None and engine.own_loader
        yield from look_refusals(job, "" if own_loader else spec.tasks[0])  # as by ``task_for``
        return
    if task.name in spec.tasks:
        yield from _task_refusals(spec, job, task, kind)
        if task.functions:  # else its workload reads the files, in a way of its own
            yield from text_refusals(job, task.name)
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
    declared = ENGINES.get(engine)
    return None if declared is None else declared.abilities.get(spec.ability or "")
