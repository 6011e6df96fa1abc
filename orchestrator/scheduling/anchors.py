"""Choice of the cells that tell most; they go first in a night that may end before the grid does.

A *configuration* is everything that a row can win by: model, workload, dataset, precision, engine,
accelerator, number of cards and techniques. Its cells differ in *sizes*: the batch size and the
lengths. One of them is its *anchor*: the sizes that most configurations of the grid have in common,
so that their anchors can be compared, and of those the middle ones. ``max`` is an anchor only where
there is nothing else, since a search costs several measurements. All other cells are refinements.

A configuration of which some cell is measured already has no anchor left to run. What an anchor
needs (the job that trains its adapter) goes as early as the anchor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from orchestrator.core.job import Job
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.scheduling.record import configuration_of
from workloads import registry

_Sizes = tuple[bool, int, tuple[tuple[str, float], ...]]


def anchors(planned: Sequence[PlannedJob]) -> frozenset[str]:
    """Ids of the jobs to run first: an anchor for each configuration that has no measured cell
    yet, and what the anchors need. Only jobs that the plan runs are named."""
    to_run = {each.job.job_id: each for each in planned if each.action is Action.RUN}
    begun = {_configuration(p.job) for p in planned if p.action is Action.REUSE}
    cells: dict[Job, list[Job]] = defaultdict(list)
    for each in to_run.values():
        if each.job.replicate == 1:  # others refine what is known already
            cells[_configuration(each.job)].append(each.job)
    common = Counter(sizes for group in cells.values() for sizes in set(map(_sizes, group)))
    chosen = {
        _anchor(group, common).job_id
        for configuration, group in cells.items()
        if configuration not in begun
    }
    return frozenset(_with_needs(chosen, to_run))


def _anchor(cells: Iterable[Job], common: Counter[_Sizes]) -> Job:
    """The cell with the commonest sizes; of several the (lower) middle one."""
    known = [(_sizes(cell), cell.job_id, cell) for cell in cells]
    fixed = [entry for entry in known if not entry[0][0]] or known
    most = max(common[sizes] for sizes, _, _ in fixed)
    best = sorted(entry[:2] for entry in fixed if common[entry[0]] == most)
    middle = best[(len(best) - 1) // 2]
    return next(cell for sizes, job_id, cell in fixed if (sizes, job_id) == middle)


def _configuration(job: Job) -> Job:
    lengths = _lengths(job)
    techniques = tuple(pair for pair in job.parameters if pair[0] not in lengths)
    return replace(configuration_of(job), parameters=techniques)


def _lengths(job: Job) -> frozenset[str]:
    """The workload's settings that say how much is done. All others tell configurations apart."""
    declared = registry.declared(job.workload, job.engine)
    return frozenset(name for name, declaration in declared.items() if declaration.length)


def _sizes(job: Job) -> _Sizes:
    """Sort key of a job's sizes: searched or not, the batch size, and the lengths in an order in
    which sizes grow. A length that the job does not set counts as the shortest."""
    searched = not isinstance(job.batch_size, int)
    known = _lengths(job)
    lengths = [
        (name, float(value) if isinstance(value, int | float) else 0.0)
        for name, value in job.parameters
        if name in known
    ]
    return (searched, 0 if searched else int(job.batch_size), tuple(lengths))


def _with_needs(job_ids: set[str], planned: dict[str, PlannedJob]) -> set[str]:
    """These jobs and all that they wait for."""
    found: set[str] = set()
    todo = sorted(job_ids)
    while todo:
        job_id = todo.pop()
        if job_id in planned and job_id not in found:
            found.add(job_id)
            todo += (*planned[job_id].needs, *planned[job_id].after)
    return found
