"""Implied jobs: the measurements that a model needs before it can run in fp8. Pure.

optimum-habana's fp8 needs a calibration of the same model on the same number of cards
(``workloads/engines/gaudi_quantization.py``). The plan adds one for each such pair, in front of the
jobs that need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from orchestrator.domain.job import Job, Scalar
from workloads.engines import find_engine

WORKLOAD = "fp8-calibration"
_ENGINE = "optimum-habana"


def calibration_of(job: Job) -> Job | None:
    """The calibration that a job needs; None if it needs none."""
    if job.precision != "fp8" or job.engine != _ENGINE or job.workload == WORKLOAD:
        return None
    if not find_engine(_ENGINE).runs_on(job.accelerator.device):
        return None
    return Job(
        experiment=job.experiment,
        workload=WORKLOAD,
        model=job.model,
        dataset=job.dataset,
        accelerator=job.accelerator,
        cards=job.cards,
        precision="bf16",  # in which it is measured
        batch_size=1,
        engine=_ENGINE,
        parameters=_parameters(),
        measure=job.measure,
    )


def with_calibrations(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """The jobs, with each calibration once before the first job that needs it.

    One dataset does for a model and card count: the first one asked for.
    """
    done: dict[tuple[str, int], Job] = {}
    found: list[Job] = []
    for job in jobs:
        calibration = calibration_of(job)
        if calibration is not None and (job.model, job.cards) not in done:
            done[job.model, job.cards] = calibration
            found.append(calibration)
        found.append(job)
    return tuple(found) if done else tuple(jobs)


@lru_cache(maxsize=1)
def _parameters() -> tuple[tuple[str, Scalar], ...]:
    from workloads.registry import find_workload

    return tuple(sorted(find_workload(WORKLOAD).validate({}).items()))
