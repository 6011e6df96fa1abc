"""Trials of a search: how they are timed, and the throughput that they gave. Pure."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.job import Job
from orchestrator.core.measurement import complete_of, repeats_of, totals_of
from orchestrator.core.outcome import Outcome, Purpose
from orchestrator.core.settings import Goal, Search
from workloads import registry
from workloads.confidence import Interval, mean_interval


def purpose_of(goal: Goal) -> Purpose:
    """Purpose of the trials of a search."""
    return "trial" if goal == "best" else "probe"


def timed_roughly(job: Job, wish: Search) -> Job:
    """The job with the timing of a trial: as tight as the search can tell sizes apart, in a third
    of the time."""
    measure = job.measure
    return replace(
        job,
        measure=replace(
            measure,
            relative_half_width=max(measure.relative_half_width, wish.tolerance),
            time_limit_s=measure.time_limit_s / 3,
            least_s=0.0,
        ),
    )


def rate_of(job: Job, outcome: Outcome) -> Interval | None:
    """Throughput of an attempt with its interval over complete repeats; without one where there is
    a single repeat."""
    counts = registry.throughput_of(job.workload)
    field = counts.counts if counts is not None else "items"
    timed = [
        (rank.rank, sample)
        for rank in outcome.ranks
        for sample in (rank.result.samples if rank.result is not None else ())
        if not sample.warmup
    ]
    repeats = repeats_of(timed)
    totals = map(totals_of, (complete_of(repeats) or repeats).values())
    rates = [getattr(total, field) / total.wall_s for total in totals if total.wall_s > 0]
    if len(rates) == 1:
        return Interval(mean=rates[0], low=rates[0], high=rates[0])
    return mean_interval(rates, job.measure.confidence)


def unit_of(job: Job) -> str:
    """The unit of a job's throughput."""
    counts = registry.throughput_of(job.workload)
    return counts.unit if counts is not None else "samples/s"
