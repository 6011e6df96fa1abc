"""The search of a grid's cells as the order of its jobs (``scheduler/order.py``). Pure.

A cell is a job with its replicates, which are released together. Rows of earlier runs of the grid
count as measured, so a resumed run goes on with the same search.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from orchestrator.core.events import RecordRow
from orchestrator.core.job import UNANSWERED, Accelerator, Job, Scalar, State
from orchestrator.grid.objectives import COMMON, Constraint, SearchSettings
from orchestrator.search.roofline import PARAMETERS, Mean, Plane, Roofline
from orchestrator.search.search import Answer, Limit, Metric, Search
from orchestrator.search.space import Role, Space
from workloads import registry

#: Probability at which ``within`` is believed.
SURE = 0.95
#: Fewest measured cells before ``within`` may end a search: intervals of fewer are guesses.
LEAST_MEASURED = 5
#: Spread of the roofline's level: a grid may be of any kind of card, or of none.
_ANY_CARD = 2.0
#: The figures of a row by name; those of ``Constraint.of_card`` are named ``FIGURE/card``.
Figures = Callable[[RecordRow], Mapping[str, float]]


def figure_of(constraint: Constraint) -> str:
    """The name of a constraint's figure among those of a row."""
    return f"{constraint.figure}/card" if constraint.of_card else constraint.figure


def space_of(jobs: Sequence[Job]) -> Space:
    """The jobs' settings by role: sequences in flight, lengths, cards, sizes and categories."""
    roles: dict[str, Role] = {
        **dict.fromkeys(("workload", "model", "dataset", "accelerator"), Role.CATEGORY),
        **dict.fromkeys(("precision", "engine", "batch"), Role.CATEGORY),
        "cards": Role.CARDS,
        "sequences": Role.LOAD,
    }
    cells: list[dict[str, Scalar]] = []
    for job in jobs:
        sized = isinstance(job.batch_size, int)
        declared = registry.declared(job.workload, job.engine)
        for name, _ in job.parameters:
            if name in declared and declared[name].length:
                roles.setdefault(name, Role.OUTPUT if "output" in name else Role.INPUT)
            else:
                roles.setdefault(name, Role.SIZE)
        fields: dict[str, Scalar] = {
            name: str(getattr(job, name))
            for name in ("workload", "model", "dataset", "accelerator")
        }
        cells.append(
            {
                **dict(job.parameters),
                **fields,
                "precision": job.precision,
                "engine": job.engine,
                "batch": "" if sized else str(job.batch_size),
                "cards": job.cards,
                "sequences": job.cards * (int(job.batch_size) if sized else 1),
            }
        )
    return Space(cells, roles)


def mean_of(space: Space, name: str) -> Mean:
    """Prior mean of a figure: a roofline of times and rates, of whatever card."""
    rate, time = name in _RATES, name.startswith(("tpot", "latency"))
    if not (rate or time):
        return Plane(space)
    roofline = Roofline(space, rate=rate)
    spread = roofline.spread.copy()
    spread[list(PARAMETERS).index("level")] = _ANY_CARD
    return replace(roofline, spread=spread)


_RATES = frozenset(name for name, more in COMMON.items() if more) - {"throughput_per_watt"}


@dataclass(slots=True)
class SearchOrder:
    """An ``Order`` of the scheduler: releases the cells that a search chooses."""

    search: Search
    settings: SearchSettings
    cells: Sequence[Sequence[Job]]  # by row: the job and its replicates
    figures: Figures = field(default=lambda row: {})
    ended: str = ""  # why, once it has
    _row_of: dict[str, int] = field(default_factory=dict)  # by job id
    _released: set[int] = field(default_factory=set)
    _values: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)  # row, job, name
    _states: dict[int, dict[str, State]] = field(default_factory=dict)
    _began: float | None = None
    _answer: Answer | None = None
    _results: int = 0  # that were taken in
    _answered_for: int = -1  # results when the answer was computed

    @classmethod
    def of(
        cls,
        jobs: Iterable[Job],
        settings: SearchSettings,
        seed: int,
        figures: Figures = lambda row: {},
    ) -> SearchOrder:
        """A search of these jobs, none of which is measured."""
        by_cell: dict[str, list[Job]] = {}
        for job in jobs:
            by_cell.setdefault(job.cell_id, []).append(job)
        cells = [by_cell[cell] for cell in sorted(by_cell)]
        space = space_of([jobs[0] for jobs in cells])

        def metric(name: str, *, more: bool) -> Metric:
            return Metric(name, mean_of(space, name), more_is_better=more)

        limits = [
            Limit(
                metric(figure_of(constraint), more=not constraint.at_most),
                constraint.bound,
                at_most=constraint.at_most,
            )
            for constraint in settings.constraints
        ]
        order = cls(
            search=Search(
                space,
                metric(settings.objective, more=settings.more_is_better),
                limits,
                metric("latency_p50_s", more=False) if settings.front else None,
                seed=seed,
            ),
            settings=settings,
            figures=figures,
            cells=cells,
        )
        order._row_of = {job.job_id: row for row, jobs in enumerate(cells) for job in jobs}
        return order

    def know(self, job_id: str, state: State, figures: Mapping[str, float]) -> None:
        """Take in a job's result, of this run or of an earlier one."""
        row = self._row_of.get(job_id)
        if row is None or state in UNANSWERED:
            return
        self._results += 1
        self._states.setdefault(row, {})[job_id] = state
        if state is State.SUCCEEDED:
            self._values.setdefault(row, {})[job_id] = dict(figures)
            of_jobs = list(self._values[row].values())
            names = {name for values in of_jobs for name in values}
            joined = {n: mean(v[n] for v in of_jobs if n in v) for n in names}
            self.search.measured(row, joined)
        elif row not in self._values and len(self._states[row]) == len(self.cells[row]):
            self.search.fails(row)

    def governs(self, job_id: str) -> bool:
        """Return whether a job is one of the cells."""
        return job_id in self._row_of

    def learn(self, row: RecordRow) -> None:
        """Take in a row; a cell whose job ended without an answer is not chosen again. The row of a
        repeat is final only if it replaces the one before it."""
        if row.final:
            figures = self.figures(row) if row.state is State.SUCCEEDED else {}
            self.know(row.job.job_id, row.state, figures)
            self.search.running.discard(self._row_of[row.job.job_id])

    def release(self, free: Mapping[Accelerator, int], now: float) -> Sequence[str]:
        """Jobs of the next cells, until their cards are as many as are free."""
        if self._began is None:
            self._began = now
        left = dict(free)
        jobs: list[Job] = []
        while any(count > 0 for count in left.values()):
            rows = self.search.propose(sum(left.values()), barred=self._barred(left))
            if not rows:
                break
            for row in rows:
                kind = self.cells[row][0].accelerator
                if left.get(kind, 0) > 0:
                    left[kind] -= sum(job.cards for job in self.cells[row])
                    self._released.add(row)
                    self.search.running.add(row)
                    jobs += self.cells[row]
        return [job.job_id for job in jobs]

    def over(self, now: float) -> str:
        """Reason why the search ended, or ""."""
        self.ended = self.ended or self._end(now)
        return self.ended

    def _end(self, now: float) -> str:
        settings, size = self.settings, len(self.cells)
        lasted = now - self._began if self._began is not None else 0.0
        if settings.hours is not None and lasted >= settings.hours * 3600:
            return f"the search ended: its {settings.hours:g} hours are over"
        if settings.cells is not None:
            most = settings.cells * size if settings.cells_are_share else settings.cells
            known = len(self.search.known)
            if known >= most:
                return f"the search ended: {known} of {size} cells were tried"
        if settings.within is not None:
            answer = self.answer()
            enough = self._measured() >= LEAST_MEASURED
            if answer is not None and enough and answer.probability >= SURE:
                return (
                    f"the search ended: no other cell is more than {settings.within:.0%} better, "
                    f"with probability {answer.probability:.2f}"
                )
        return ""

    def left_out(self, job_id: str) -> bool:
        """Return whether a job is a cell that the search did not choose."""
        return job_id in self._row_of and self._row_of[job_id] not in self._released

    def answer(self) -> Answer | None:
        """The best cell so far, computed once for the same measurements."""
        if self._answered_for != self._results:
            self._answered_for = self._results
            self._answer = self.search.answer(self.settings.within or 0.0)
        return self._answer

    def text(self) -> str:
        """The present answer in a line."""
        answer, name = self.answer(), self.settings.objective
        tried = f"{self._measured()} of {len(self.cells)} cells measured"
        if answer is None:
            limits = ", ".join(map(str, self.settings.constraints))
            return f"no measured cell keeps {limits} ({tried})" if limits else tried
        lead = f", {answer.lead:.1%} ahead of the next" if answer.next_row is not None else ""
        within = f"within {self.settings.within:.0%} of " if self.settings.within else ""
        return (
            f"best {name} {answer.value:.5g}: {self.cells[answer.row][0].label}{lead}; {within}the "
            f"best of all with probability {answer.probability:.2f} ({tried})"
        )

    def _measured(self) -> int:
        return len(self.search.values.get(self.settings.objective, {}))

    def _barred(self, free: Mapping[Accelerator, int]) -> Collection[int]:
        """Rows that were released, or for whose kind of card none is free."""
        kinds = {kind for kind, count in free.items() if count > 0}
        others = {row for row, jobs in enumerate(self.cells) if jobs[0].accelerator not in kinds}
        return self._released | others
