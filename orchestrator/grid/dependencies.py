"""Dependencies between jobs, and the implied jobs that others start from. Pure.

A job whose setting ``consumes`` a named thing needs the job of the grid that ``produces`` it:
``adapter: NAME`` and ``save_adapter: NAME``. An engine may need a calibration of the model before
it runs in a precision (``EngineSpec.calibrations``); the plan adds it. A job with ``quality: true``
comes after the reference of its model and prompts, even if that fails.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.core.errors import Problem
from orchestrator.core.job import Job, Scalar
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.settings import FIELDS
from orchestrator.grid.vocabulary import foreign_spelling
from workloads import registry
from workloads.engines import ENGINES, default_engine
from workloads.models.products import Saving, product_root
from workloads.settings import Declaration, declarations
from workloads.util.contents import FILES

if TYPE_CHECKING:
    from orchestrator.grid.parser import Grid


#: What a job that a plan adds has in the place of its job's own.
_PLAIN: Mapping[str, Any] = {"batch_size": 1, "isolation": "warm", "replicate": 1}


def calibration_of(job: Job) -> Job | None:
    """The calibration that a job needs; None if it needs none."""
    spec = ENGINES.get(job.engine)
    workload = spec.calibrations.get(job.precision) if spec is not None else None
    if spec is None or workload in (None, job.workload):
        return None
    if not spec.runs_on(job.accelerator.device):
        return None
    return replace(
        job,
        workload=workload,
        precision="bf16",  # in which it is measured
        parameters=_parameters(workload, job.engine),
        **_PLAIN,
    )


def calibrated(job: Job) -> tuple[str, str, str, int]:
    """Identity of a calibration: jobs with equal identities share one."""
    return (job.workload, job.engine, job.model, job.cards)


def is_calibration(job: Job) -> bool:
    """Return whether other jobs of its engine start from what this job measures."""
    spec = ENGINES.get(job.engine)
    return spec is not None and job.workload in spec.calibrations.values()


_REFERENCE = "quality-reference"


def quality_reference_of(job: Job) -> Job | None:
    """The reference of a job's texts (transformers in fp32, one card, one prompt at a time); None
    if it compares nothing."""
    settings = dict(job.parameters)
    if not settings.get("quality") or "quality_of" not in settings:
        return None  # text-encoding compares by itself
    spec = registry.find_workload(_REFERENCE)
    engine = default_engine(spec.ability)
    work = {n for n, declared in declarations(spec.parameters).items() if declared.role == "work"}
    of = settings.get("quality_of")
    own = {"prompts", "output_tokens", *(["adapter"] if of else [])}
    given = {name: settings[name] for name in work - own if name in settings}
    return replace(
        job,
        workload=_REFERENCE,
        model=str(of or job.model),
        cards=1,
        precision="fp32",
        engine=engine,
        parameters=tuple(sorted(spec.validate(given, engine).items())),
        **_PLAIN,
    )


def with_implied(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Insert each calibration (on the first dataset of its jobs) and each reference once, before
    the first job that needs it."""
    calibrations: set[tuple[str, str, str, int]] = set()
    references = {job.job_id for job in jobs if job.workload == _REFERENCE}
    complete: list[Job] = []
    for job in jobs:
        reference = quality_reference_of(job)
        if reference is not None and reference.job_id not in references:
            references.add(reference.job_id)
            complete.append(reference)
        calibration = calibration_of(job)
        if calibration is not None and calibrated(calibration) not in calibrations:
            calibrations.add(calibrated(calibration))
            complete.append(calibration)
        complete.append(job)
    return tuple(complete)


@cache
def _parameters(workload: str, engine: str) -> tuple[tuple[str, Scalar], ...]:
    return tuple(sorted(registry.find_workload(workload).validate({}, engine).items()))


#: A kind of thing, such as ``adapter``, and the name of one.
Thing = tuple[str, str]


def took(thing: Thing, saving: str) -> str:
    """Text in a row for a saved thing that its job loaded by name."""
    return f"{thing[0]} {saving}"


def things(
    jobs: Sequence[Job], way: Literal["produces", "consumes"]
) -> Iterator[tuple[Job, str, Thing]]:
    """Jobs that produce or consume a named thing, each with the setting and the thing."""
    of_all = _kinds(FIELDS, way)
    of_workloads: dict[tuple[str, str], dict[str, str]] = {}
    for job in jobs:
        for name, kind in of_all.items():
            yield job, name, (kind, getattr(job, name))
        key = (job.workload, job.engine)
        if key not in of_workloads:
            of_workloads[key] = _kinds(registry.declared(*key), way)
        kinds = of_workloads[key]
        for name, value in job.parameters if kinds else ():
            if name in kinds and isinstance(value, str):
                yield job, name, (kinds[name], value)


def _kinds(declared: Mapping[str, Declaration], way: str) -> dict[str, str]:
    return {
        name: kind for name, declaration in declared.items() if (kind := getattr(declaration, way))
    }


def savers(jobs: Sequence[Job]) -> Mapping[Thing, list[Job]]:
    """The jobs that save each thing, in order."""
    saved: dict[Thing, list[Job]] = {}
    for job, _, thing in things(jobs, "produces"):
        saved.setdefault(thing, []).append(job)
    return saved


def needs_of(jobs: Sequence[Job]) -> dict[str, tuple[str, ...]]:
    """Ids of the jobs that each job needs, for jobs that need others."""
    saved = savers(jobs)
    needs: dict[str, tuple[str, ...]] = {}

    def add(job: Job, needed: Sequence[Job]) -> None:
        if needed:
            ids = (*needs.get(job.job_id, ()), *(other.job_id for other in needed))
            needs[job.job_id] = tuple(dict.fromkeys(ids))

    for job, _, thing in things(jobs, "consumes") if saved else ():
        add(job, saved.get(thing, ()))
    measured = {calibrated(job): job for job in jobs if is_calibration(job)}
    for job in jobs if measured else ():
        calibration = calibration_of(job)
        if calibration is not None and calibrated(calibration) in measured:
            add(job, [measured[calibrated(calibration)]])
    return needs


def with_needs(planned: Sequence[PlannedJob]) -> list[PlannedJob]:
    """Add each job's needs; jobs that need an unsupported one become unsupported."""
    jobs = [item.job for item in planned]
    needs, references = needs_of(jobs), ((job, quality_reference_of(job)) for job in jobs)
    after = {job.job_id: (other.job_id,) for job, other in references if other is not None}
    if not needs and not after:
        return list(planned)
    unsupported = {i.job.job_id: i for i in planned if i.action is Action.UNSUPPORTED}
    result = []
    for item in planned:
        own = needs.get(item.job.job_id, ())
        item = replace(item, needs=own, after=after.get(item.job.job_id, ()))
        lacking = [unsupported[job_id] for job_id in own if job_id in unsupported]
        if lacking and item.action is Action.RUN:
            other = lacking[0].job
            saves = [kind for _, _, (kind, _) in things([other], "produces")]
            what = "calibration" if is_calibration(other) else " and ".join(saves)
            reason = f"needs the {what} of job {other.job_id}, which is unsupported: "
            reason += lacking[0].reason
            item = replace(item, action=Action.UNSUPPORTED, reason=reason, estimate_s=0.0)
        result.append(item)
    return result


def measured_again(
    planned: list[PlannedJob],
    took_of: Callable[[Job], str],
    estimate_s: Callable[[Job], float],
    saving_of: Callable[[Thing], Saving] = lambda thing: Saving(),
    run_ids: Collection[str] = (),
) -> list[PlannedJob]:
    """Run measured jobs again if a name they consume now stands for something else (remade since,
    or to be remade by this run), or if another job saved over the name they produce. A job that
    needs what this run cannot make keeps its row.

    ``took_of`` gives the saved things that a job's measured attempt loaded, ``saving_of`` what a
    name stands for now; ``run_ids`` are current and former ids of the run (empty: any run).
    """
    blocked = _blocked(planned)
    reusable = [
        item for item in planned if item.action is Action.REUSE and blocked.isdisjoint(item.needs)
    ]
    reasons: dict[str, str] = {}
    for job, _, (kind, name) in things([item.job for item in reusable], "consumes"):
        now, earlier = saving_of((kind, name)).identity, took_of(job).split(", ")
        if not now or took((kind, name), now) in earlier:
            continue
        if not now.startswith(FILES):
            reasons[job.job_id] = f"{kind} {name} was made anew since this was measured"
        elif any(one.startswith(f"{kind} {FILES}") for one in earlier):  # older rows do not say
            reasons[job.job_id] = (
                f"the files of {kind} {name} have changed since this was measured; "
                "--keep-changed keeps the row"
            )
    taken = {job_id for item in planned for job_id in item.needs}
    makers = [item.job for item in reusable if item.job.job_id in taken]
    for job, _, (kind, name) in things(makers, "produces"):
        run_id, _, job_id = saving_of((kind, name)).saved_by.rpartition("-")
        others = job_id != job.job_id or (run_ids and run_id not in run_ids)
        if job_id and others:  # a saving that does not say counts as this job's
            reasons[job.job_id] = f"another job or run has saved its own {kind} {name} since"
    made_by = {
        item.job.job_id
        for item in planned
        if item.action is Action.RUN
        and item.job.job_id not in blocked
        and not is_calibration(item.job)
    }
    while True:
        for item in reusable:
            if others := made_by.intersection(item.needs):
                reason = f"job {min(others)} makes anew what this was measured on"
                reasons.setdefault(item.job.job_id, reason)
        if reasons.keys() <= made_by:
            break
        made_by |= reasons.keys()
    return [
        replace(item, action=Action.RUN, reason=why, estimate_s=estimate_s(item.job))
        if (why := reasons.get(item.job.job_id))
        else item
        for item in planned
    ]


def _blocked(planned: Sequence[PlannedJob]) -> set[str]:
    """Ids of jobs without a good row that are not run, or need one that is not."""
    blocked: set[str] = set()
    more = {i.job.job_id for i in planned if i.action in (Action.SKIP, Action.UNSUPPORTED)}
    while more:
        blocked |= more
        waiting = [item for item in planned if item.action is Action.RUN]
        more = {i.job.job_id for i in waiting if not blocked.isdisjoint(i.needs)} - blocked
    return blocked


def problems_of_needs(grid: Grid, missing: Callable[[str, str], str]) -> list[Problem]:
    """A problem for each needed thing that no job, or more than one, saves; ``missing`` says why a
    thing of this kind and name does not exist yet."""
    saved = savers(grid.jobs())
    problems: dict[tuple[str, Thing], Problem] = {}
    for job, setting, thing in things(grid.jobs(), "consumes"):
        if (job.experiment, thing) in problems:
            continue
        kind, wanted = thing
        reason = "" if thing in saved or setting in FIELDS else missing(*thing)
        if thing not in saved and not reason:
            continue  # fields were looked at when they were read
        if thing not in saved:
            names = [name for other, name in saved if other == kind]
            close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
            message = f"no job of this grid saves {kind} {wanted!r}, and there is none"
            hint = f"did you mean {close[0]!r}?" if close else _how_to_save(kind, wanted)
            places = (product_root(kind) / wanted, Path(wanted))
            if foreign := foreign_spelling(kind, wanted, Path(grid.file).parent):
                message, hint = foreign, ""
            elif any(map(os.path.isdir, places)):
                message, hint = reason, ""  # it is there, and cannot be used
        elif len(saved.get(thing, ())) > 1:
            message = f"{len(saved[thing])} jobs of this grid save {kind} {wanted!r}"
            hint = "each would replace the other's; let one job save it, or give each a name"
        else:
            continue
        problems[job.experiment, thing] = grid.problem(job, setting, wanted, message, hint)
    return list(problems.values())


def _how_to_save(kind: str, name: str) -> str:
    ways = [
        f"{setting}: {name} in a job of workload {workload}"
        for workload, entry in registry.WORKLOADS.items()
        for setting, declared in entry.declared(entry.engines[0]).items()
        if declared.produces == kind
    ]
    return f"save one with {' or '.join(ways)}" if ways else f"nothing here saves a {kind}"
