"""Which jobs must wait for which: an adapter has to be trained before a model runs with it. Pure.

Nobody writes the order down: a job with ``adapter: NAME`` needs the job of the same grid that has
``save_adapter: NAME``. A name that no job of the grid saves must exist already. What runs in a
precision that needs a calibration waits for it (``implied_jobs.py``).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.domain.job import Job, Scalar
from orchestrator.errors import Problem
from orchestrator.planning.implied_jobs import calibrated, calibration_of, is_calibration
from orchestrator.planning.plan import Action, PlannedJob

if TYPE_CHECKING:
    from orchestrator.grid.model import Grid

SAVES, USES = "save_adapter", "adapter"


def savers(jobs: Sequence[Job]) -> Mapping[str, list[Job]]:
    """The jobs that save each adapter, by its name, in order."""
    found: dict[str, list[Job]] = {}
    for job, name in _naming(jobs, SAVES):
        found.setdefault(name, []).append(job)
    return found


def _naming(jobs: Sequence[Job], parameter: str) -> Iterator[tuple[Job, str]]:
    """The jobs that have a name as this parameter, each with the name."""
    known: dict[int, Scalar] = {}  # by the id of their parameters, which thousands of jobs share
    for job in jobs:
        key = id(job.parameters)
        if key not in known:
            known[key] = dict(job.parameters).get(parameter)
        name = known[key]
        if isinstance(name, str):
            yield job, name


def needs_of(jobs: Sequence[Job]) -> dict[str, tuple[str, ...]]:
    """For each job that needs others: their ids."""
    saved = savers(jobs)
    measured = {calibrated(job): job for job in jobs if is_calibration(job)}
    if not saved and not measured:
        return {}
    needs: dict[str, tuple[str, ...]] = {}
    for job in jobs:
        wanted = dict(job.parameters).get(USES)
        found = [*saved.get(wanted, ())] if isinstance(wanted, str) else []
        if measured and (calibration := calibration_of(job)) is not None:
            found += [measured[key] for key in [calibrated(calibration)] if key in measured]
        if found:
            needs[job.job_id] = tuple(other.job_id for other in found)
    return needs


def with_needs(planned: Sequence[PlannedJob]) -> list[PlannedJob]:
    """The plan with each job's needs; one that needs what cannot run is unsupported as well."""
    needs = needs_of([item.job for item in planned])
    if not needs:
        return list(planned)
    by_id = {item.job.job_id: item for item in planned}
    done = []
    for item in planned:
        wanted = needs.get(item.job.job_id, ())
        lacking = [by_id[job_id] for job_id in wanted]
        lacking = [other for other in lacking if other.action is Action.UNSUPPORTED]
        item = replace(item, needs=wanted)
        if lacking and item.action is Action.RUN:
            what = "calibration" if is_calibration(lacking[0].job) else "adapter"
            reason = f"needs the {what} of job {lacking[0].job.job_id}, which is unsupported: "
            item = replace(
                item,
                action=Action.UNSUPPORTED,
                reason=reason + lacking[0].reason,
                estimate_s=0.0,
            )
        done.append(item)
    return done


def adapter_problems(grid: Grid, exists: Callable[[str], bool]) -> list[Problem]:
    """A problem for each adapter that a job wants and that nobody saves, or several jobs do.

    ``exists`` says whether an adapter of this name, or at this path, is there already.
    """
    saved = savers(grid.jobs())
    problems: dict[tuple[str, str], Problem] = {}
    for job, wanted in _naming(grid.jobs(), USES):
        if (job.experiment, wanted) in problems:
            continue
        if wanted not in saved and not exists(wanted):
            close = difflib.get_close_matches(wanted, saved, n=1, cutoff=0.5)
            message = f"no job of this grid saves adapter {wanted!r}, and there is none"
            hint = (
                f"did you mean {close[0]!r}?"
                if close
                else f"train it in a fine-tuning job with save_adapter: {wanted}"
            )
        elif len(saved.get(wanted, ())) > 1:
            message = f"{len(saved[wanted])} jobs of this grid save adapter {wanted!r}"
            hint = "each would replace the other's; let one job save it, or give each a name"
        else:
            continue
        problems[job.experiment, wanted] = grid.problem(job, USES, wanted, message, hint)
    return list(problems.values())
