"""The cost of replicates in a plan: jobs, card time, and processes to start. Pure.

A replicate from 2 on runs in a process that has run no other replicate. The plan reckons with one
more start of a process for each model of each such replicate, and for each card of a job that gets
processes of its own anyway none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.plan import Action, Plan, PlannedJob
from orchestrator.scheduler.estimator import PRIOR_START_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateCost:
    """Additional work of the replicates from 2 on."""

    jobs: int
    card_seconds: float  # starts of processes included
    fresh_processes: int


def with_fresh_processes(planned: Iterable[PlannedJob]) -> list[PlannedJob]:
    """The plan with the start of each fresh process in the estimate of the job that is its first
    in the plan."""
    begun: set[tuple[str, int]] = set()
    done = []
    for item in planned:
        block = _block(item)
        if block is not None and block not in begun:
            begun.add(block)
            item = replace(item, estimate_s=item.estimate_s + PRIOR_START_S)
        done.append(item)
    return done


def cost_of_replicates(plan: Plan) -> ReplicateCost | None:
    """The cost of what the plan runs again; None where it runs everything once."""
    again = [p for p in plan.jobs if p.action is Action.RUN and p.job.replicate > 1]
    if not again:
        return None
    return ReplicateCost(
        jobs=len(again),
        card_seconds=sum(item.estimate_s * item.job.cards for item in again),
        fresh_processes=_fresh(again),
    )


def _fresh(again: Sequence[PlannedJob]) -> int:
    alone = sum(item.job.cards for item in again if _block(item) is None)
    return alone + len({block for item in again if (block := _block(item)) is not None})


def _block(item: PlannedJob) -> tuple[str, int] | None:
    """The residency key and number of a replicate that shares its process with others of its
    number; None for a first replicate, and for a job with processes of its own."""
    job = item.job
    if item.action is not Action.RUN or job.replicate == 1:
        return None
    if job.alone:
        return None
    return job.residency_key, job.replicate
