"""Planner: from jobs, cards and earlier rows to the plan.

A job is *unsupported* if its device lacks the precision, no node has its kind of card, or its
workload's rules refuse it (``workloads/base.py``), which is decided anew each time. Else its newest
terminal row decides: a success is *reused*, a failure that would repeat itself *skipped*, all else
*run*. Rows of emulated cards never count for real ones, and rows count only for what the names of
models, adapters and calibrations stand for now (``dependencies.measured_again``). Card counts that
the cluster can never give, and settings that rules call wrong, are errors in the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, product
from typing import TYPE_CHECKING

from orchestrator.core.errors import ClusterError, GridError
from orchestrator.core.job import Job, State, supersedes
from orchestrator.core.plan import Action, PastRow, Plan, PlannedJob
from orchestrator.core.topology import Node
from orchestrator.grid.dependencies import Thing, measured_again, with_implied, with_needs
from orchestrator.grid.diagnostics import Rules, card_problems, summed_up
from orchestrator.planning.engine_choice import PackageCheck, differences, with_engines
from orchestrator.planning.forecast import Startup, duration, with_fresh_processes
from orchestrator.scheduler.estimator import Estimate, Estimator
from orchestrator.util.format import listed
from workloads import registry
from workloads.base import Refusal
from workloads.models.catalog import rough_parameters
from workloads.models.precision import support
from workloads.models.products import Saving
from workloads.registry import find_workload
from workloads.rules import notes as workload_notes
from workloads.rules import refusals
from workloads.util.contents import place_of

if TYPE_CHECKING:
    from orchestrator.grid.parser import Grid

#: Ended without having been measured, through no fault of the job.
_AGAIN = (State.LOST, State.NOT_STARTED, State.UNSUPPORTED)


def make_plan(
    grid: Grid,
    nodes: Sequence[Node],
    history: Sequence[PastRow],
    *,
    retry_failed: bool = False,
    force: bool = False,
    estimator: Estimator | None = None,
    startup: Startup | None = None,
    saving_of: Callable[[Thing], Saving] = lambda thing: Saving(),
    run_ids: Collection[str] = (),
    host_notes: Iterable[str] = (),
) -> Plan:
    """Choose an action for every job of the grid.

    Args:
        nodes: actual or assumed.
        history: earlier rows of this run, oldest first.
        retry_failed: also run jobs that failed earlier.
        force: run everything that can run, measured or not.
        estimator: by default made from ``history``.
        saving_of: what a name stands for now, if known.
        run_ids: current and former ids of this run.
        host_notes: on this host, beside the faults that the nodes have.

    Raises:
        GridError: a job needs a card count that these nodes can never give.
        ClusterError: no job has a node with its kind of card.
    """
    planner = _Planner(_newest_terminal(history), retry_failed, force, PackageCheck(nodes))
    jobs, notes = with_engines(grid.jobs(), grid.open_engines, nodes)
    if estimator is None:
        estimator = estimator_for(history, nodes)
    planned = []
    for job in with_implied(_as_spelled(jobs, history)):
        action, reason = planner.decide(job)
        estimate = estimator.estimate(job) if action is Action.RUN else Estimate(load_s=0, run_s=0)
        planned.append(
            PlannedJob(
                job=job,
                action=action,
                reason=reason,
                estimate_s=estimate.total_s,
                load_s=estimate.load_s,
            )
        )
    running = [one.job for one in planned if one.action is Action.RUN]
    planned = measured_again(
        with_needs(planned),
        planner.took,
        lambda job: estimator.estimate(job).total_s,
        saving_of,
        run_ids,
    )
    planned = with_fresh_processes(planned)
    if jobs and planner.nowhere >= len(jobs):
        wanted = ", ".join(map(str, grid.accelerators()))
        have = ", ".join(dict.fromkeys(str(node.accelerator) for node in nodes)) or "none"
        raise ClusterError(f"the grid asks for {wanted} cards and the nodes have {have}")
    problems = card_problems(grid, nodes)
    if problems:
        raise GridError(problems)
    rules = Rules(workload_notes, registry.WORKLOADS)
    of_jobs = (rules.answers(job, job.accelerator.device) for job in running)
    of_workloads = dict.fromkeys(chain.from_iterable(of_jobs))
    by_fault: dict[str, list[str]] = {}
    for node in nodes:
        for fault in node.faults:
            by_fault.setdefault(fault, []).append(node.name)
    faults = (f"{listed(names)}: {fault}" for fault, names in by_fault.items())
    return Plan(
        grid_name=grid.name,
        jobs=tuple(planned),
        nodes=tuple(nodes),
        duration=duration(
            planned, nodes, estimator_for(history, nodes, queued=False), startup or Startup()
        ),
        notes=(*grid.notes, *notes, *summed_up(of_workloads), *differences(nodes)),
        host_notes=(*host_notes, *faults),
        questions=tuple(map(str, grid.questions)),
    )


def _as_spelled(jobs: Sequence[Job], history: Sequence[PastRow]) -> list[Job]:
    """Jobs whose rows spell their model or dataset in another way, spelled so: ids of old rows are
    not rewritten."""
    measured = {row.job_id for row in history}
    spellings: dict[str, set[str]] = {}
    for name in {name for row in history for name in (row.model, row.dataset) if "/" in name}:
        spellings.setdefault(place_of(name), set()).add(name)
    result = []
    for job in jobs:
        if spellings and job.job_id not in measured:
            ways = product(
                *(
                    sorted(spellings.get(place_of(name), {name})) if "/" in name else [name]
                    for name in (job.model, job.dataset)
                )
            )
            others = (replace(job, model=model, dataset=dataset) for model, dataset in ways)
            job = next((other for other in others if other.job_id in measured), job)
        result.append(job)
    return result


def estimator_for(
    history: Iterable[PastRow], nodes: Iterable[Node], *, queued: bool = True
) -> Estimator:
    """Estimator from earlier rows of the nodes' sort (emulated or real); ``queued`` includes a
    job's wait for a turn."""
    kinds = {node.emulated for node in nodes}
    footing = kinds.pop() if len(kinds) == 1 else None  # None: rows of both kinds inform
    # Kept for one plan: a saved model of the same name may be another one in the next.
    parameters_of = cache(rough_parameters)
    return Estimator.from_history(
        history, emulated=footing, queued=queued, parameters_of=parameters_of
    )


def _newest_terminal(history: Iterable[PastRow]) -> dict[tuple[str, bool], PastRow]:
    """The newest final row of each job, apart for emulated and real cards; a row of other work
    than the job's settings mean now is not the job's."""
    newest: dict[tuple[str, bool], PastRow] = {}
    for row in history:
        if not (row.final and row.state.terminal) or row.outdated:
            continue
        known = newest.get((row.job_id, row.emulated))
        if known is None or supersedes(row.state, known.state):
            newest[row.job_id, row.emulated] = row
    return newest


@dataclass(slots=True)
class _Planner:
    past: Mapping[tuple[str, bool], PastRow]
    retry_failed: bool
    force: bool
    packages: PackageCheck
    nowhere: int = 0  # jobs whose kind of card no node has
    _unsupported: dict[tuple[object, ...], str] = field(default_factory=dict)
    _rules: Rules[Refusal] = field(default_factory=lambda: Rules(refusals, registry.WORKLOADS))

    def decide(self, job: Job) -> tuple[Action, str]:
        """Choose the action for a job, with a reason unless it simply runs."""
        software = self.packages.software(job)
        self.nowhere += bool(software.missing)
        reason = (
            software.missing
            or self.unsupported(job, software.devices)
            or self.refused(job, software.devices)
            or self.packages.lacking(job)
        )
        if reason:
            return Action.UNSUPPORTED, reason
        row = self.past.get((job.job_id, software.emulated))
        if self.force or row is None or row.state in _AGAIN:
            return Action.RUN, ""
        if row.state is State.SUCCEEDED:
            return Action.REUSE, "measured already"
        if self.retry_failed:
            return Action.RUN, ""
        why = f": {row.reason}" if row.reason else ""
        return Action.SKIP, f"{row.state} earlier{why}; --retry-failed tries it again"

    def took(self, job: Job) -> str:
        """Saved things that a job's newest terminal attempt loaded by name."""
        row = self.past.get((job.job_id, self.packages.software(job).emulated))
        return row.took if row is not None else ""

    def unsupported(self, job: Job, devices: tuple[str, ...]) -> str:
        """Reason why a precision cannot run on the device, or the CPU that emulates it."""
        key = (job.precision, job.engine, job.workload, devices)
        if key not in self._unsupported:
            ability, reason = find_workload(job.workload).ability, ""
            for device in devices:
                entry = support(job.precision, device, job.engine, ability)
                if not entry.supported and not reason:
                    where = device if device == devices[0] else f"{device}, which emulates here"
                    reason = f"{job.precision} on {where}: {entry.reason}"
            self._unsupported[key] = reason
        return self._unsupported[key]

    def refused(self, job: Job, devices: tuple[str, ...]) -> str:
        """Reason why the workload's rules refuse a job, on the device or its emulator."""
        for device in devices:
            for refusal in self._rules.answers(job, device):
                if refusal.unsupported:
                    here = "" if device == devices[0] else f" (on {device}, which emulates)"
                    hint = f"; {refusal.hint}" if refusal.hint else ""
                    return f"{refusal.reason}{here}{hint}"
        return ""


def card_seconds(plan: Plan) -> float:
    """Busy time of all cards together, as estimated."""
    return sum(item.estimate_s * item.job.cards for item in plan.jobs)
