"""Predict the cells of a run that were not measured, from its rows and those of earlier runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from orchestrator.analysis.flags import FALSE, raised_on
from orchestrator.analysis.metrics import named_figures
from orchestrator.analysis.selection import newest_final
from orchestrator.core.job import Job
from orchestrator.core.measurement import Measurement
from orchestrator.core.plan import Action, Plan
from orchestrator.core.prediction import Prediction
from orchestrator.grid.objectives import SearchSettings
from orchestrator.store.store import Store

if TYPE_CHECKING:
    from orchestrator.search.predictions import Known

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
