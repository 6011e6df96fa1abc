"""An attempt as its workload sees it, with a residency key of what its names stand for now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from orchestrator.core.job import Job
from orchestrator.core.outcome import Attempt
from orchestrator.worker.leftovers import Owner
from workloads.base import BadConfiguration, MeasureSettings, Request

if TYPE_CHECKING:
    from workloads.registry import WorkloadSpec

_Apart = tuple[dict[str, Any], dict[str, Any]]
_MOST_KNOWN = 256


class _Settings:
    """Settings of jobs, validated: those of as good as all jobs of a bucket are the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], tuple[WorkloadSpec, _Apart]] = {}

    def of(self, job: Job) -> _Apart:
        """The workload's own and the engine's, apart.

        Raises:
            BadConfiguration: there is no such workload.
            pydantic.ValidationError: an unknown name, a wrong type or a value out of range.
        """
        from workloads.registry import find_workload

        spec = find_workload(job.workload)
        key = (job.workload, job.engine, repr(job.parameters))  # as text: 1, 1.0 and True are equal
        known = self._known.get(key)
        if known is None or known[0] is not spec:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = spec, spec.split(dict(job.parameters), job.engine)
        own, engines = known[1]
        return own.copy(), engines.copy()


_settings = _Settings()


def request_of(attempt: Attempt) -> Request:
    """The attempt as its workload sees it.

    A probe asks only whether the batch fits, so it makes one pass without warm-up: a whole pass,
    because the longest prompts decide.
    """
    job = attempt.job
    if not isinstance(job.batch_size, int):
        raise BadConfiguration(f"attempt {attempt.attempt_id} has no batch size yet: {job.label}")
    measure = job.measure
    if attempt.purpose == "probe":
        measure = MeasureSettings(
            warmup=0, min_repeats=1, max_repeats=1, time_limit_s=measure.time_limit_s
        )
    parameters, settings = _settings.of(job)
    owner = Owner.of_this_process() if attempt.purpose == "measure" else None
    taken = ", ".join(_taken(job))
    return Request(
        workload=job.workload,
        model=job.model,
        dataset=job.dataset,
        precision=job.precision,
        batch_size=job.batch_size,
        engine=job.engine,
        residency_key="|".join(filter(None, (job.residency_key, taken))),
        parameters=parameters,
        settings=settings,
        measure=measure,
        probe=attempt.purpose == "probe",
        kept_as=f"{owner.run_id}-{job.job_id}" if owner is not None else "",
        saved_by=f"{owner.run_id}-{attempt.job_id}" if owner is not None else "",
        attempt=attempt.number,
        took=taken,
    )


def _taken(job: Job) -> Iterator[str]:
    """Savings of what a job takes by name: a model that is saved anew is another."""
    from orchestrator.grid.dependencies import things, took
    from workloads.models.products import saving_of

    for _, _, thing in things([job], "consumes"):
        if saved := saving_of(*thing).identity:
            yield took(thing, saved)
