"""The search of a grid's cells as the order of its jobs (``scheduler/repeats.py``). Pure.

A cell is a job with its replicates, which are released together. Rows of earlier runs of the grid
count as measured, so a resumed run goes on with the same search. Where the grid asks questions, the
cells that matter most to those without a sure answer come first. Questions of a grid without a
search are answered, too; its jobs then come in the schedule's own order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import hypot, log
from statistics import mean, pstdev
from typing import NamedTuple

import numpy as np

from orchestrator.core.events import RecordRow
from orchestrator.core.job import UNANSWERED, Accelerator, Job, Scalar, State
from orchestrator.core.labels import labels_of
from orchestrator.core.measurement import Doubt
from orchestrator.core.plan import SEARCH_ENDED
from orchestrator.core.status import Answered
from orchestrator.grid.objectives import COMMON, Constraint, Question, SearchSettings
from orchestrator.scheduler.repeats import WON
from orchestrator.search.questions import LEAST_MEASURED, UNKNOWN_DEVIATION, Inquiry, Verdict
from orchestrator.search.roofline import PARAMETERS, Mean, Plane, Roofline
from orchestrator.search.search import Answer, Limit, Metric, Search
from orchestrator.search.space import Floats, Role, Rows, Space
from orchestrator.util.format import plural
from workloads import registry

#: Probability at which ``within`` is believed.
SURE = 0.95
#: Least seconds between two answers to the questions while rows come in: one takes 0.6 to 1.9 s
#: of a core for 10,000 cells.
ANSWER_EVERY_S = 10.0
#: Spread of the roofline's level: a grid may be of any kind of card, or of none.
_ANY_CARD = 2.0
#: Seconds added to those of a cell, so that none is free.
_MOMENT_S = 0.1
#: Value of a bounded figure that is 0, of which there is no log: this part of its lowest bound.
_NOUGHT = 0.1
#: The figures of a row by name; those of ``Constraint.of_card`` are named ``FIGURE/card``.
Figures = Callable[[RecordRow], Mapping[str, float]]


def figure_of(constraint: Constraint) -> str:
    """The name of a constraint's figure among those of a row."""
    return f"{constraint.figure}/card" if constraint.of_card else constraint.figure


def space_of(jobs: Sequence[Job]) -> Space:
    """The jobs' settings by role: sequences in flight, lengths, cards, sizes and categories."""
    names = ("workload", "model", "dataset", "accelerator", "precision", "engine")
    roles = dict.fromkeys((*names, "batch"), Role.CATEGORY)
    roles |= {"cards": Role.CARDS, "sequences": Role.LOAD}
    cells: list[dict[str, Scalar]] = []
    for job in jobs:
        sized = isinstance(job.batch_size, int)
        declared = registry.declared(job.workload, job.engine)
        for name, _ in job.parameters:
            if name in declared and declared[name].length:
                roles.setdefault(name, Role.OUTPUT if "output" in name else Role.INPUT)
            else:
                roles.setdefault(name, Role.SIZE)
        cells.append(
            {
                **dict(job.parameters),
                **{name: str(getattr(job, name)) for name in names},
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


class SearchOrder:
    """An ``Order`` of the scheduler: releases the cells that a search chooses.

    None of the jobs is measured yet. Without ``settings`` the grid only asks ``questions``.
    """

    def __init__(
        self,
        jobs: Iterable[Job],
        settings: SearchSettings | None,
        seed: int,
        questions: Sequence[Question] = (),
    ) -> None:
        by_cell: dict[str, list[Job]] = {}
        for job in jobs:
            by_cell.setdefault(job.cell_id, []).append(job)
        self.settings = settings
        self.cells = [by_cell[cell] for cell in sorted(by_cell)]  # by row: a job and its replicates
        self.figures: Figures = lambda row: {}
        self.doubt: Callable[[RecordRow], Doubt] = lambda row: Doubt()
        self.ended = ""  # why, once it has
        firsts = [jobs[0] for jobs in self.cells]
        space = space_of(firsts)

        def metric(name: str, *, more: bool) -> Metric:
            return Metric(name, mean_of(space, name), more_is_better=more)

        def limits(constraints: Iterable[Constraint]) -> list[Limit]:
            return [
                Limit(metric(figure_of(one), more=not one.at_most), one.bound, at_most=one.at_most)
                for one in constraints
            ]

        main = settings if settings is not None else questions[0]
        objective = main.objective if isinstance(main, SearchSettings) else main.best
        front = settings is not None and settings.front
        self.search = Search(
            space,
            metric(objective, more=main.more_is_better),
            limits(main.constraints),
            metric("latency_p50_s", more=False) if front else None,
            seed=seed,
        )
        bounds: dict[str, float] = {}  # the lowest of each bounded figure
        for asked in (*questions, *([settings] if settings is not None else ())):
            for one in asked.constraints:
                figure = figure_of(one)
                bounds[figure] = min(one.bound, bounds.get(figure, one.bound))
        self._noughts = {figure: _NOUGHT * bound for figure, bound in bounds.items()}
        labels = labels_of(firsts)
        self._doubts: dict[int, Doubt] = {}
        inquiries = (
            Inquiry(
                one,
                # The same measurements and surrogates, another aim.
                replace(
                    self.search,
                    objective=metric(one.best, more=one.more_is_better),
                    limits=limits(one.constraints),
                    second=None,
                ),
                np.array([row for row, job in enumerate(firsts) if one.covers(job)], dtype=int),
                [str(labels[job.job_id]) for job in firsts],
                self._doubts,
            )
            for one in questions
        )
        self.questions = [one for one in inquiries if len(one.rows)]
        self._row_of = {job.job_id: row for row, jobs in enumerate(self.cells) for job in jobs}
        self._rows_of: dict[Accelerator, set[int]] = {}
        for row, job in enumerate(firsts):
            self._rows_of.setdefault(job.accelerator, set()).add(row)
        self._released: set[int] = set()
        #: By row and job: its measurements, of which there are two of a winner.
        self._values: dict[int, dict[str, list[_Measured]]] = {}
        self._states: dict[int, dict[str, State]] = {}
        self._began: float | None = None
        self._results = 0  # that were taken in
        self._answer: Answer | None = None
        self._answered_for = -1  # results when the answer was computed
        self._verdicts: list[Verdict] = []
        self._verdicts_for = -1
        self._verdicts_at = float("-inf")

    def know(
        self,
        job_id: str,
        state: State,
        figures: Mapping[str, float],
        doubt: Doubt | None = None,
        *,
        again: bool = False,
    ) -> None:
        """Take in a job's result, of this run or of an earlier one; ``again``: beside the one that
        it has, unless that is surer."""
        row, doubt = self._row_of.get(job_id), doubt or Doubt()
        if row is None or state in UNANSWERED:
            return
        self._results += 1
        self._states.setdefault(row, {})[job_id] = state
        if state is State.SUCCEEDED and doubt.usable:
            known = self._values.setdefault(row, {}).setdefault(job_id, [])
            if again and known:
                earlier, new = ((bool(d.flags), bool(d.better_by)) for d in (known[0].doubt, doubt))
                if new > earlier:  # it says less
                    return
            known[:] = [*(known if again else ()), _Measured(figures, doubt)]
            every = [one for of_job in self._values[row].values() for one in of_job]
            if good := [one for one in every if not one.doubt.flags]:
                self.search.flagged.discard(row)
            else:
                self.search.flagged.add(row)
            joined = _joined(good or every)
            self._doubts[row] = joined.doubt
            noughts = {
                name: nought
                for name, nought in self._noughts.items()
                if joined.figures.get(name) == 0.0
            }
            self.search.measured(row, {**joined.figures, **noughts})
        elif not any(state is State.SUCCEEDED for state in self._states[row].values()) and (
            len(self._states[row]) == len(self.cells[row])
        ):  # a flagged row is no failure
            self.search.fails(row)

    def governs(self, job_id: str) -> bool:
        """Return whether a job is one of the cells of a search."""
        return self.settings is not None and job_id in self._row_of

    def learn(self, row: RecordRow) -> None:
        """Take in a row; a cell whose job ended without an answer is not chosen again. The row of a
        repeat is final only if it replaces the one before it, except for that of a winner."""
        again = bool(row.repeat) and row.reason.startswith(WON)
        if row.job.job_id not in self._row_of or not (row.final or again):
            return
        good = row.state is State.SUCCEEDED
        if good or not row.repeat:
            figures, doubt = (self.figures(row), self.doubt(row)) if good else ({}, None)
            self.know(row.job.job_id, row.state, figures, doubt, again=again)
        self.search.running.discard(self._row_of[row.job.job_id])

    def release(
        self, free: Mapping[Accelerator, int], now: float, seconds: Callable[[str], float]
    ) -> Sequence[str]:
        """Jobs of the next cells, until their cards are as many as are free; ``seconds`` are those
        of a job if it starts now, loading included."""
        if self._began is None:
            self._began = now

        def cost(rows: Rows) -> Floats:
            of_cells = [self.cells[row] for row in rows]
            return np.array(
                [sum(j.cards * seconds(j.job_id) for j in jobs) + _MOMENT_S for jobs in of_cells]
            )

        # Gains count by card-second, so that of equals a model that is loaded comes first.
        for search in (self.search, *(one.search for one in self.questions)):
            search.cost = cost
        left = dict(free)
        jobs: list[Job] = []
        while any(count > 0 for count in left.values()):
            none_free = (rows for kind, rows in self._rows_of.items() if left.get(kind, 0) <= 0)
            barred = self._released.union(*none_free)
            rows = self._next(sum(left.values()), barred, now)
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

    def _next(self, count: int, barred: Collection[int], now: float) -> list[int]:
        """Rows to measure next: in turn for the questions that have no sure answer, the least sure
        first, then for the search itself."""
        open_ones = self._open(now)
        chosen: list[int] = []
        for inquiry in open_ones:
            share = -(-count // len(open_ones))
            others = np.setdiff1d(np.arange(len(self.cells)), inquiry.rows)
            away = {*barred, *chosen, *map(int, others)}
            chosen += inquiry.search.propose(min(share, count - len(chosen)), barred=away)
        return chosen or self.search.propose(count, barred=barred)

    def _open(self, now: float) -> list[Inquiry]:
        """Unsure questions that cells without a result may settle, the least sure first. Those that
        measured cells alone keep open wait for the repeats of these."""
        by_question = zip(self.verdicts(now), self.questions, strict=True)
        return [
            inquiry
            for verdict, inquiry in sorted(by_question, key=lambda it: it[0].answered.probability)
            if not verdict.settled
            and any(
                len(self._states.get(int(row), ())) < len(self.cells[row]) for row in inquiry.rows
            )
        ]

    def over(self, now: float) -> str:
        """Reason why the search ended, or ""."""
        self.ended = self.ended or self._end(now)
        return self.ended

    def _end(self, now: float) -> str:
        settings, size = self.settings, len(self.cells)
        if settings is None:
            return ""
        lasted = now - self._began if self._began is not None else 0.0
        if settings.hours is not None and lasted >= settings.hours * 3600:
            return f"{SEARCH_ENDED}: its {settings.hours:g} hours are over"
        if settings.cells is not None:
            most = settings.cells * size if settings.cells_are_share else settings.cells
            known = len(self.search.known)
            if known >= most:
                return f"{SEARCH_ENDED}: {known} of {size} cells were tried"
        if settings.within is not None:
            answer = self.answer()
            enough = self._measured() >= LEAST_MEASURED
            if answer is not None and enough and answer.probability >= SURE:
                return (
                    f"{SEARCH_ENDED}: no other cell is more than {settings.within:.0%} better, "
                    f"with probability {answer.probability:.2f}"
                )
        if settings.questions and self.questions and not self._open(now):
            count = len(self.questions)
            sure = sum(verdict.answered.reached for verdict in self.verdicts(now))
            rest = "; of the others all that may be the best is measured" if sure < count else ""
            of = f"{sure} of {plural(count, 'question')}"
            return f"{SEARCH_ENDED}: {of} reached the confidence asked for{rest}"
        return ""

    def left_out(self, job_id: str) -> bool:
        """Return whether a job is a cell that the search did not choose."""
        return job_id in self._row_of and self._row_of[job_id] not in self._released

    def answer(self) -> Answer | None:
        """The best cell so far, computed once for the same measurements."""
        if self._answered_for != self._results:
            self._answered_for = self._results
            within = self.settings.within if self.settings is not None else None
            self._answer = self.search.answer(within or 0.0)
        return self._answer

    def verdicts(self, now: float = float("inf")) -> list[Verdict]:
        """The present answers to the questions, computed once for the same measurements and not
        oftener than every few seconds."""
        due = now >= self._verdicts_at + ANSWER_EVERY_S or not self._verdicts
        if self._verdicts_for != self._results and due:
            self._verdicts_for = self._results
            self._verdicts_at = now if now < float("inf") else self._verdicts_at
            self._verdicts = [one.verdict() for one in self.questions]
        return self._verdicts

    def answers(self, now: float = float("inf")) -> tuple[Answered, ...]:
        """The present answers, see ``verdicts``, with the number of their measurements and how far
        they lie apart."""
        answers = []
        for answered, row, *_ in self.verdicts(now):
            if row is not None:
                every = [one for of_job in self._values[row].values() for one in of_job]
                known = [one.figures.get(answered.figure, 0.0) for one in every]
                rates = [rate for rate in known if rate > 0]  # a repeat may lack the figure
                answered = replace(
                    answered,
                    job_id=self.cells[row][0].job_id,
                    times=len(rates),
                    apart=max(rates) / min(rates) - 1 if rates else 0.0,
                )
            answers.append(answered)
        return tuple(answers)

    def winners(self) -> list[str]:
        """Ids of the jobs that won, and of those too close to call, unless they have replicates:
        worth another measurement."""
        rows = [row for verdict in self.verdicts() for row in (verdict.row, verdict.rival)]
        answer = self.answer() if self.settings is not None else None
        rows += [answer.row] if answer is not None else []
        return [
            next(job.job_id for job in self.cells[row] if job.job_id in self._values[row])
            for row in dict.fromkeys(rows)
            if row is not None and len(self.cells[row]) == 1
        ]

    def text(self) -> str:
        """The present answer in a line."""
        answer, settings, name = self.answer(), self.settings, self.search.objective.name
        tried = f"{self._measured()} of {len(self.cells)} cells measured"
        if answer is None:
            limits = ", ".join(map(str, settings.constraints if settings is not None else ()))
            return f"no measured cell keeps {limits} ({tried})" if limits else tried
        share = settings.within if settings is not None else None
        within = f"within {share:.0%} of " if share else ""
        return (
            f"best {name} {answer.value:.5g}: {self.cells[answer.row][0].label}; {within}the best "
            f"of all with probability {answer.probability:.2f} ({tried})"
        )

    def _measured(self) -> int:
        return len(self.search.values.get(self.search.objective.name, {}))


class _Measured(NamedTuple):
    figures: Mapping[str, float]
    doubt: Doubt


def _joined(every: Sequence[_Measured]) -> _Measured:
    """Means of the figures of a cell, with the doubt about them: that of each row, and the spread
    between rows. Of bounds the least disturbed counts alone, and none beside a figure that is no
    bound."""
    figures, deviations, better_by = {}, {}, {}
    for name in {name for one in every for name in one.figures}:
        known = [one for one in every if name in one.figures]
        more = min(one.doubt.better_by.get(name, 0.0) for one in known)
        known = [one for one in known if one.doubt.better_by.get(name, 0.0) == more]
        figures[name] = mean(one.figures[name] for one in known)
        if not (known := [one for one in known if one.figures[name] > 0]):
            continue
        own = mean(one.doubt.deviations.get(name, UNKNOWN_DEVIATION) for one in known)
        spread = pstdev([log(one.figures[name]) for one in known])
        deviations[name] = hypot(own / len(known) ** 0.5, spread / max(len(known) - 1, 1) ** 0.5)
        if more:
            better_by[name] = more
    return _Measured(figures, Doubt(deviations, better_by))
