"""Predictions of the cells of a grid that were not measured, from those that were. Pure.

The surrogates are those of the search (``surrogate.py``), with intervals calibrated on the cells
measured. Cells of one workload on one kind of card inform each other. Cells of earlier runs join
them if the caller gives them, who sees to it that they ran on the same hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from statistics import mean

import numpy as np

from orchestrator.core.job import UNANSWERED, Job, State
from orchestrator.core.labels import Label, labels_of
from orchestrator.core.measurement import Prediction
from orchestrator.grid.objectives import directions_of
from orchestrator.search.order import mean_of, space_of
from orchestrator.search.roofline import Roofline
from orchestrator.search.search import Metric, Search
from orchestrator.search.surrogate import Z_95

#: Figures that are predicted where no others are asked for.
FIGURES = ("throughput", "latency_p50_s", "peak_memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A job's result; ``figures`` by name, as ``analysis.metrics.named_figures`` gives them."""

    job: Job
    state: State
    figures: Mapping[str, float] = field(default_factory=dict)
    earlier: bool = False  # of another run


def predict(
    jobs: Iterable[Job], known: Iterable[Known], figures: Sequence[str] = FIGURES
) -> list[Prediction]:
    """Predict these figures of the cells that have no result in their own run, in their order.

    A cell whose jobs all failed has a result, too. A figure that no known cell of its workload and
    kind of card has is not predicted: the prior alone says next to nothing.
    """
    cells: dict[tuple[str, str], dict[str, Job]] = {}
    results: dict[tuple[str, str], dict[str, list[Known]]] = {}
    for job in jobs:
        of_kind = cells.setdefault((job.workload, str(job.accelerator)), {})
        of_kind.setdefault(job.cell_id, job)
    for one in known:
        if one.state not in UNANSWERED:
            of_cell = results.setdefault((one.job.workload, str(one.job.accelerator)), {})
            of_cell.setdefault(one.job.cell_id, []).append(one)
    labels = labels_of([job for of_kind in cells.values() for job in of_kind.values()])
    return [
        prediction
        for kind, of_kind in cells.items()
        for prediction in _of_kind(of_kind, results.get(kind, {}), figures, labels)
    ]


def _of_kind(
    cells: Mapping[str, Job],
    results: Mapping[str, Sequence[Known]],
    figures: Sequence[str],
    labels: Mapping[str, Label],
) -> Iterator[Prediction]:
    """Predictions for the cells of one workload on one kind of card."""
    others = {cell: known[0].job for cell, known in results.items() if cell not in cells}
    jobs = {**others, **cells}
    space = space_of(list(jobs.values()))
    more_is_better = directions_of(job.workload for job in jobs.values())
    metrics = [
        Metric(name, mean_of(space, name), more_is_better.get(name, True)) for name in figures
    ]
    search = Search(space, metrics[0])
    unmeasured: list[int] = []
    earlier: set[int] = set()
    for row, cell in enumerate(jobs):
        known = results.get(cell, ())
        own = [one for one in known if not one.earlier]
        if not own:
            earlier.add(row)
            if cell in cells:
                unmeasured.append(row)
        values = [one.figures for one in own or known if one.state is State.SUCCEEDED]
        names = {name for figures_of_job in values for name in figures_of_job}
        if names:
            search.measured(row, {n: mean(v[n] for v in values if n in v) for n in names})
        elif known and not values:
            search.fails(row)
    if not unmeasured:
        return
    runs = search.chance_of_success(np.array(unmeasured))
    of_jobs = list(jobs.values())
    for metric in metrics:
        rests_on = search.values.get(metric.name, {}).keys()
        if not rests_on:
            continue
        belief = search.predictions(metric, unmeasured)
        from_earlier = len(rests_on & earlier)
        own_count = len(rests_on) - from_earlier
        for row, log_value, deviation, chance in zip(unmeasured, *belief, runs, strict=True):
            job = of_jobs[row]
            # 12 measured, 40 of earlier runs with this cell, roofline prior
            words = [f"{own_count} measured"] if own_count else []
            itself = " with this cell" if row in rests_on else ""
            words += [f"{from_earlier} of earlier runs{itself}"] if from_earlier else []
            words += ["roofline prior"] if isinstance(metric.mean, Roofline) else []
            yield Prediction(
                job_id=job.job_id,
                label=str(labels[job.job_id]),
                workload=job.workload,
                model=job.model,
                dataset=job.dataset,
                accelerator=str(job.accelerator),
                cards=job.cards,
                precision=job.precision,
                batch_size=str(job.batch_size),
                engine=job.engine,
                figure=metric.name,
                value=exp(log_value),
                low=exp(log_value - Z_95 * deviation),
                high=exp(log_value + Z_95 * deviation),
                log_deviation=float(deviation),
                runs=float(chance),
                measured=own_count,
                earlier=from_earlier,
                basis=", ".join(words),
            )
