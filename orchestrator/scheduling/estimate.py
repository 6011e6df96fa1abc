"""How long a job will hold its cards, guessed from what is already measured.

Longest-first scheduling needs only the order to be about right, backfill that the guess is of the
right size. The nearest knowledge wins: the same job, the same configuration at another batch
size, the same workload and model, and last a prior from the measure settings. Loading is told
apart from running, because a warm worker pays only the second.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from math import log, sqrt
from statistics import median

from orchestrator.history import PastRow
from orchestrator.job import Job, State

#: Prior for loading a model when nothing is known, seconds.
PRIOR_LOAD_S = 10.0
#: Prior for one repeat, seconds; with the time limit it brackets the timed part.
PRIOR_REPEAT_S = 0.5
#: ``batch_size: max`` runs a handful of short probes before it measures.
SEARCH_FACTOR = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds that a job takes: loading its model, and everything after."""

    load_s: float
    run_s: float

    @property
    def total_s(self) -> float:
        """Both together: what a worker without the model needs."""
        return self.load_s + self.run_s


_Pair = tuple[float | None, float]  # load (None when the model was resident), run


@dataclass(slots=True)
class Estimator:
    """Medians of past rows at three distances; ``Estimator()`` knows only the prior."""

    by_job: dict[str, _Pair] = field(default_factory=dict)
    by_batch: dict[Hashable, list[tuple[int, float]]] = field(default_factory=dict)
    by_model: dict[Hashable, float] = field(default_factory=dict)  # run
    load_by_precision: dict[Hashable, float] = field(default_factory=dict)
    load_by_model: dict[Hashable, float] = field(default_factory=dict)

    @classmethod
    def from_history(cls, rows: Iterable[PastRow], *, emulated: bool | None = None) -> Estimator:
        """Learn from successful final rows; ``emulated`` keeps only rows of that kind."""
        job: dict[str, list[_Pair]] = {}
        batch: dict[Hashable, dict[int, list[float]]] = {}
        model: dict[Hashable, list[float]] = {}
        loads: dict[Hashable, list[float]] = {}
        model_loads: dict[Hashable, list[float]] = {}
        for row in rows:
            if row.state is not State.SUCCEEDED or not row.final or row.busy_s is None:
                continue
            if emulated is not None and row.emulated != emulated:
                continue
            load = row.load_s if row.load_s else None  # 0 when the model was resident
            run = max(0.0, row.busy_s - (load or 0.0))
            job.setdefault(row.job_id, []).append((load, run))
            near = (row.workload, row.model, row.accelerator, row.cards)
            if row.batch_size is not None:
                sizes = batch.setdefault((*near, row.precision), {})
                sizes.setdefault(row.batch_size, []).append(run)
            model.setdefault(near[:3], []).append(run)
            if load is not None:
                loads.setdefault((row.model, row.precision, row.accelerator), []).append(load)
                model_loads.setdefault(row.model, []).append(load)
        return cls(
            by_job={key: _median_pair(pairs) for key, pairs in job.items()},
            by_batch={
                key: sorted((size, median(runs)) for size, runs in sizes.items())
                for key, sizes in batch.items()
            },
            by_model={key: median(runs) for key, runs in model.items()},
            load_by_precision={key: median(values) for key, values in loads.items()},
            load_by_model={key: median(values) for key, values in model_loads.items()},
        )

    def estimate(self, job: Job) -> Estimate:
        """Seconds for ``job``, from the nearest rows there are."""
        known = self.by_job.get(job.job_id) if self.by_job else None
        if known is not None:
            load = known[0] if known[0] is not None else self._load_s(job)
            return Estimate(load_s=load, run_s=known[1])
        return Estimate(load_s=self._load_s(job), run_s=self._run_s(job))

    def _load_s(self, job: Job) -> float:
        same = self.load_by_precision.get((job.model, job.precision, job.accelerator))
        if same is not None:
            return same
        return self.load_by_model.get(job.model, PRIOR_LOAD_S)

    def _run_s(self, job: Job) -> float:
        near = (job.workload, job.model, job.accelerator, job.cards)
        sizes = self.by_batch.get((*near, job.precision))
        if not isinstance(job.batch_size, int):  # max
            if sizes:
                return SEARCH_FACTOR * median(run for _, run in sizes)
            return SEARCH_FACTOR * self.by_model.get(near[:3], _prior_run_s(job))
        if sizes:
            wanted = log(job.batch_size)
            return min(sizes, key=lambda known: (abs(log(known[0]) - wanted), known[0]))[1]
        return self.by_model.get(near[:3], _prior_run_s(job))


def _prior_run_s(job: Job) -> float:
    """Between the fewest short repeats and the time limit, on a logarithmic scale."""
    settings = job.measure
    limit = max(settings.time_limit_s, 1e-3)
    least = min((settings.warmup + settings.min_repeats) * PRIOR_REPEAT_S, limit)
    return sqrt(max(least, 1e-3) * limit)


def _median_pair(pairs: list[_Pair]) -> _Pair:
    loads = [load for load, _ in pairs if load is not None]
    return (median(loads) if loads else None, median(run for _, run in pairs))
