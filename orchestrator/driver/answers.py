"""The search and the questions of a run: what earlier rows say, a ready file for each answer, and
predictions of the cells that were not measured.

An answer's file is the grid of its one job, which `nightgrid run` takes as it is. Where the engine
serves, the command that starts it as a server stands in the file, too.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.analysis.flags import FALSE, raised_on
from orchestrator.analysis.metrics import named_figures
from orchestrator.analysis.rankings import doubt_of
from orchestrator.analysis.selection import newest_final
from orchestrator.core.job import Job, State
from orchestrator.core.measurement import Measurement, Prediction
from orchestrator.core.outcome import Attempt
from orchestrator.core.plan import Action, Plan
from orchestrator.core.status import Answered
from orchestrator.grid.objectives import SearchSettings
from orchestrator.grid.parser import Grid
from orchestrator.grid.schema import one_job_grid
from orchestrator.scheduler.repeats import WON
from orchestrator.store import files as run_files
from orchestrator.store.store import Store
from orchestrator.worker.worker import request_of
from workloads.engines import engine_function
from workloads.registry import find_workload
from workloads.serving.servers import command_line

if TYPE_CHECKING:
    from orchestrator.search.order import SearchOrder
    from orchestrator.search.predictions import Known


def order_of(grid: Grid, plan: Plan, store: Store, seed: int) -> SearchOrder | None:
    """The search of a grid's cells with its questions and with what earlier runs measured; None
    for a grid that has neither."""
    if grid.search is None and not grid.questions:
        return None
    # Its arrays take a tenth of a second to import, which other runs need not wait for.
    from orchestrator.search.order import SearchOrder

    actions, workloads = (Action.RUN, Action.REUSE), {job.workload for job in grid.jobs()}
    jobs = [planned.job for planned in plan.jobs if planned.action in actions]
    jobs = [job for job in jobs if job.workload in workloads]  # those that a plan adds are no cells
    order = SearchOrder(jobs, grid.search, seed, questions=grid.questions)
    rows = store.measurements(samples=False)
    for row in _in_turn(rows):
        figures, doubt = named_figures(row), doubt_of(row)
        again = row.reason.startswith(WON)
        order.know(row.job_id, row.state, figures, doubt, again=again)
    return order


def _in_turn(rows: Sequence[Measurement]) -> Iterator[Measurement]:
    """The newest final row of each job; of a winner its two measurements."""
    measured: defaultdict[str, list[Measurement]] = defaultdict(list)
    for row in rows:
        if row.state is State.SUCCEEDED and row.purpose == "measure":
            measured[row.job_id].append(row)
    for final in newest_final(rows):
        both = measured[final.job_id][-2:]
        if final.state is State.SUCCEEDED and both and both[-1].reason.startswith(WON):
            yield from both
        else:
            yield final


def with_files(answers: tuple[Answered, ...], plan: Plan) -> tuple[Answered, ...]:
    """The answers with the names of their files and the commands that serve them."""
    jobs = _jobs(plan)
    return tuple(
        replace(one, file=run_files.answer_file(number), launch=serving_command(jobs[one.job_id]))
        if one.job_id
        else one
        for number, one in enumerate(answers, 1)
    )


def write_files(answers: tuple[Answered, ...], plan: Plan, store: Store) -> list[str]:
    """Write the answers' files; returns lines about each answer."""
    lines, jobs = [], _jobs(plan)
    for number, one in enumerate(answers, 1):
        lines.append(f"question {number}: {one.question}: {one.sentence} ({one.basis})")
        if one.job_id:
            name = f"{store.run[:48]}-answer-{number}"
            about = [f"{one.question}:", one.sentence, f"({one.basis})"]
            about += ["", f"As a server: {one.launch}"] if one.launch else []
            store.write_file(one.file, one_job_grid(jobs[one.job_id], name, about))
            lines.append(f"  its grid: {store.path / one.file}")
            lines += [f"  its server: {one.launch}"] if one.launch else []
    return lines


def _jobs(plan: Plan) -> dict[str, Job]:
    return {planned.job.job_id: planned.job for planned in plan.jobs}


def serving_command(job: Job) -> str:
    """The command that serves the setting of a job; "" if its engine cannot, or is not here."""
    # Unknown ones, and the model and the engine's library may be on the nodes only.
    with contextlib.suppress(Exception):
        if find_workload(job.workload).ability in ("serve", "generate"):
            if not isinstance(job.batch_size, int):
                job = replace(job, batch_size=1)
            attempt = Attempt(attempt_id="", job_id=job.job_id, number=1, job=job, cards=())
            device = job.accelerator.device
            serve = engine_function(job.engine, "serve", device)
            return command_line(serve, request_of(attempt), device)
    return ""


#: Most cells of a grid that is predicted when its run ends: more take over a minute.
MOST_CELLS = 50_000


def predictions_of(
    plan: Plan, search: SearchSettings | None, store: Store, others: Iterable[Store] = ()
) -> list[Prediction]:
    """Predict the cells of which a run has no result; ``others`` are earlier runs, whose rows count
    if they ran on the same devices. The objective and the limits of a search are predicted, too.

    Raises StoreError if rows cannot be read.
    """
    # Its arrays take a tenth of a second to import, which most runs need not wait for.
    from orchestrator.search.order import figure_of
    from orchestrator.search.predictions import FIGURES, predict

    jobs = {
        item.job.job_id: item.job for item in plan.jobs if item.action is not Action.UNSUPPORTED
    }
    rows = newest_final(store.measurements(samples=False)) if store.exists else ()
    known = list(_known(rows, jobs, earlier=False))
    devices = {(row.emulated, row.device_name) for row in rows if row.device_name}
    footing = {node.emulated for node in plan.nodes}
    for other in others:
        alike = [
            row
            for row in newest_final(other.measurements(samples=False))
            if ((row.emulated, row.device_name) in devices if devices else row.emulated in footing)
        ]
        known += _known(alike, jobs, earlier=True)
    figures = dict.fromkeys(FIGURES)
    if search is not None:
        limits = (figure_of(constraint) for constraint in search.constraints)
        figures = dict.fromkeys((search.objective, *limits, *FIGURES))
    return predict(jobs.values(), known, list(figures))


def _known(
    rows: Iterable[Measurement], jobs: Mapping[str, Job], *, earlier: bool
) -> Iterator[Known]:
    from orchestrator.search.predictions import Known

    rows = list(rows)
    for row, raised in zip(rows, raised_on(rows), strict=True):
        job = jobs.get(row.job_id) or row.job
        true = FALSE.isdisjoint(one.flag.name for one in raised)
        figures = named_figures(row) if true else {}
        yield Known(job=job, state=row.state, figures=figures, earlier=earlier)
