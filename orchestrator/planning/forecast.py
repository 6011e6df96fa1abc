"""Forecast of the part of a plan that is measured before a deadline, by the estimates.

The schedule of the night is played with every job lasting as long as it is estimated to. Pure, and
quick enough to be asked before a run: about a second for ten thousand jobs.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.domain.job import Job, State
from orchestrator.planning.plan import Action, Plan
from orchestrator.scheduling.anchors import anchors
from orchestrator.scheduling.estimate import Estimate
from orchestrator.scheduling.record import Estimates
from orchestrator.scheduling.schedule import ScheduleSettings
from orchestrator.scheduling.simulate import SimulationSettings, simulate

#: More jobs are not played: their number would only be waited for.
MOST_JOBS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Progress that a run is expected to make."""

    seconds: float  # for work
    jobs: int  # that the plan runs
    measured: int  # of those
    configurations: int  # without a measured cell so far
    reached: int  # of those: their first cell would be measured
    ends_after_s: float  # with the last row


class _Fixed:
    """Estimates that do not learn from a game."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates

    def estimate(self, job: Job) -> Estimate:
        return self._estimates.estimate(job)


def forecast(plan: Plan, estimates: Estimates, seconds: float) -> Forecast | None:
    """Play ``plan`` for so many seconds; None when it is too large for that."""
    to_run = [each for each in plan.jobs if each.action is Action.RUN]
    if len(to_run) > MOST_JOBS:
        return None
    result = simulate(
        plan.jobs,
        plan.nodes,
        _Fixed(estimates),
        settings=SimulationSettings(noise=0.0),
        schedule_settings=ScheduleSettings(work_until=seconds),
    )
    measured = {row.job.job_id for row in result.rows if row.state is State.SUCCEEDED}
    firsts = anchors(plan.jobs)
    return Forecast(
        seconds=seconds,
        jobs=len(to_run),
        measured=len(measured),
        configurations=len(firsts),
        reached=len(firsts & measured),
        ends_after_s=result.makespan_s,
    )
