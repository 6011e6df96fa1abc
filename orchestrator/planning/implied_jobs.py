"""Implied jobs: what others start from, or are compared with, and nobody writes down. Pure.

An engine may need a calibration of the same model on the same number of cards before it can run in
a precision (``EngineSpec.calibrations``). The plan adds one for each such pair, in front of the
jobs that need it. Likewise a job with ``quality: true`` comes after the reference of its model and
prompts, and runs all the same where that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from orchestrator.domain.job import Job, Scalar
from workloads.engines import ENGINES
from workloads.settings import declarations


def calibration_of(job: Job) -> Job | None:
    """The calibration that a job needs; None if it needs none."""
    spec = ENGINES.get(job.engine)
    workload = spec.calibrations.get(job.precision) if spec is not None else None
    if workload in (None, job.workload) or spec is None:
        return None
    if not spec.runs_on(job.accelerator.device):
        return None
    return Job(
        experiment=job.experiment,
        workload=workload,
        model=job.model,
        dataset=job.dataset,
        accelerator=job.accelerator,
        cards=job.cards,
        precision="bf16",  # in which it is measured
        batch_size=1,
        engine=job.engine,
        parameters=_parameters(workload, job.engine),
        measure=job.measure,
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
    """The job that writes what this one compares its texts with; None if it compares nothing.

    It is the plain path: transformers in fp32 on one card, one prompt at a time.
    """
    asked = dict(job.parameters)
    if not asked.get("quality"):
        return None
    from workloads.engines import default_engine
    from workloads.registry import find_workload

    spec = find_workload(_REFERENCE)
    engine = default_engine(spec.ability)
    work = {n for n, each in declarations(spec.parameters).items() if each.role == "work"}
    of = asked.get("quality_of")
    own = {"prompts", "output_tokens", *(["adapter"] if of else [])}
    given = {n: asked[n] for n in work - own if n in asked}
    return Job(
        experiment=job.experiment,
        workload=_REFERENCE,
        model=str(of or job.model),
        dataset=job.dataset,
        accelerator=job.accelerator,
        cards=1,
        precision="fp32",
        batch_size=1,
        engine=engine,
        parameters=tuple(sorted(spec.validate(given, engine).items())),
        measure=job.measure,
    )


def with_implied(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """The jobs, with each calibration and each reference once before the first job that needs it.

    One dataset does for the calibration of a model and card count: the first one asked for.
    """
    done: set[tuple[str, str, str, int]] = set()
    references: set[str] = {job.job_id for job in jobs if job.workload == _REFERENCE}
    found: list[Job] = []
    for job in jobs:
        reference = quality_reference_of(job)
        if reference is not None and reference.job_id not in references:
            references.add(reference.job_id)
            found.append(reference)
        calibration = calibration_of(job)
        if calibration is not None and calibrated(calibration) not in done:
            done.add(calibrated(calibration))
            found.append(calibration)
        found.append(job)
    return tuple(found) if len(found) > len(jobs) else tuple(jobs)


@cache
def _parameters(workload: str, engine: str) -> tuple[tuple[str, Scalar], ...]:
    from workloads.registry import find_workload

    return tuple(sorted(find_workload(workload).validate({}, engine).items()))
