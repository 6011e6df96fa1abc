"""Answers to the questions of a grid: which setting is the best, and how sure that is. Pure.

Each cell has a normal distribution of the log of each figure: a measured one that of its rows (up
to where the truth may be, if they are lower bounds), others what the search predicts. A measured
cell is the best with the probability that it keeps the limits and no other that keeps them is
better: the product over all others, averaged over quantiles of its own distribution. Errors of
cells count as independent, which makes it likelier that one of many alike is better. A predicted
cell is never the answer, nor is one whose rows rank nowhere: what is predicted for it, from its own
figures too, stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log1p
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.measurement import Doubt
from orchestrator.core.status import UNLIKELY, Answered
from orchestrator.grid.objectives import Question
from orchestrator.search.search import Metric, Search, normal_cdf
from orchestrator.search.space import Floats
from orchestrator.search.surrogate import Z_95, Belief
from orchestrator.util.format import number, plural

#: Fewest measured cells before an answer may be sure: intervals of fewer are guesses.
LEAST_MEASURED = 5
#: Deviation (natural log) of a figure without an interval, and the least of any: of a setting's
#: repeats in other processes, the median on public measurements.
UNKNOWN_DEVIATION, LEAST_DEVIATION = 0.02, 0.006
#: Measured cells that are looked at as the answer, the best first.
_CONTENDERS = 6
_QUANTILES = np.array([NormalDist().inv_cdf((at + 0.5) / 24) for at in range(24)])
#: Chances below which a rival is left out of a product, a cell is no contender, and a change is
#: not named.
_NEGLIGIBLE, _HARDLY, _WORTH_NAMING = 1e-7, 1e-3, 0.01
_MOST_CHANGES = 3
_CERTAIN = Doubt()


class Verdict(NamedTuple):
    """An answer with its rows."""

    answered: Answered
    row: int | None
    settled: bool  # whether the cells that are not measured leave it its confidence
    #: The measured cell that is likeliest to be better, while it is too close to call.
    rival: int | None


class _Cells(NamedTuple):
    """Knowledge of cells, shape (cells,); more is better."""

    rows: NDArray[np.intp]
    measured: NDArray[np.bool_]  # and not flagged
    own: Belief  # of the objective, by the rows of measured cells
    rival: Belief  # the same, up to where the truth of lower bounds may be
    keeps: Floats  # probability that it can be measured and keeps the limits, by its rows
    may_keep: Floats  # the same, up to where the truth may be


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A question, the search of its best cell, and the rows that it is about."""

    question: Question
    search: Search
    rows: NDArray[np.intp]
    labels: Sequence[str]  # by row
    doubts: Mapping[int, Doubt]  # about the measurements of a row

    def verdict(self) -> Verdict:
        """The present answer."""
        search, question, rows = self.search, self.question, self.rows
        known = self._known()
        failed = np.isin(rows, list(search.failed))
        some = np.isin(rows, list(known[0])) & ~failed
        complete = some & np.isin(rows, list(set(known[0]).intersection(*known[1:])))
        # A figure that no cell has cannot be predicted; a row that lacks one will never have it.
        unknown = ~complete & ~failed & (some if all(known) else True)
        measured = complete & ~np.isin(rows, list(search.flagged))
        predicted = ~measured & ~unknown & ~failed
        none = int(unknown.sum())
        flagged = len(search.flagged.intersection(map(int, rows)))
        base = Answered(
            question=str(question),
            figure=question.best,
            confidence=question.confidence,
            within=question.within,
            measured=int(measured.sum()),
            predicted=int(predicted.sum()) - flagged,
            flagged=flagged,
            unknown=none,
            failed=int(failed.sum()),
            changes=(f"{plural(none, 'cell')} of which nothing is known",) * bool(none),
        )
        least = min(LEAST_MEASURED, len(rows) - base.failed)
        sure = not none and base.measured >= least
        cells = self._cells(rows[measured])
        contenders = self._contenders(cells)
        if not len(contenders):
            return self._without(base, rows[measured | predicted], sure=sure)
        own, contenders = cells.own, contenders[:_CONTENDERS]
        lowest = (own.mean[contenders] - 3 * own.deviation[contenders]).min()
        rivals = rows[predicted]
        if len(rivals):
            sign = search.objective.sign
            belief = search.predictions(search.objective, rivals)
            z = (sign * belief.mean - lowest - log1p(question.within)) / belief.deviation
            rivals = rivals[normal_cdf(z) > _NEGLIGIBLE]
        cells = self._cells(np.sort(np.concatenate([cells.rows, rivals])))
        own, contenders = cells.own, self._contenders(cells)
        chances = self._chances(cells, contenders[:_CONTENDERS])
        # Where hardly any can win, as among lower bounds, the best value is the best guess.
        place = int(chances.argmax()) if chances.max() >= UNLIKELY else 0
        best, probability = int(contenders[place]), float(chances[place])
        ahead = cells.rival.mean - own.mean[best] - log1p(question.within)
        spread = np.hypot(cells.rival.deviation, own.deviation[best])
        better = cells.may_keep * normal_cdf(ahead / spread)  # than the answer, within the limits
        better[best] = 0.0
        bound = "at least" if question.more_is_better else "at most"
        answered = replace(
            base,
            job=self.labels[cells.rows[best]],
            value=exp(search.objective.sign * own.mean[best]),
            bound=bound if cells.rival.mean[best] > own.mean[best] else "",
            probability=probability,
            reached=sure and probability >= question.confidence,
            changes=(*self._changes(cells, best, better), *base.changes),
        )
        answered = self._with_lead(answered, cells, best, contenders)
        close = np.where(cells.measured, better, 0.0)
        rival = int(close.argmax())
        again = close[rival] >= UNLIKELY and not answered.reached
        others = float(np.prod(1.0 - better[~cells.measured]))
        return Verdict(
            answered,
            row=int(cells.rows[best]),
            settled=answered.reached or (sure and others >= question.confidence),
            rival=int(cells.rows[rival]) if again else None,
        )

    def _known(self) -> list[Mapping[int, float]]:
        """Values by row of the objective and of each limit's metric."""
        metrics = (self.search.objective, *(limit.metric for limit in self.search.limits))
        return [self.search.values.get(metric.name, {}) for metric in metrics]

    def _cells(self, rows: NDArray[np.intp]) -> _Cells:
        """Knowledge of cells that are measured or predicted."""
        own, rival = self._beliefs(self.search.objective, rows)
        sign = self.search.objective.sign
        known = self._known()
        complete = set(known[0]).intersection(*known[1:]) - self.search.flagged
        measured = np.isin(rows, list(complete))
        keeps = np.where(measured, 1.0, self.search.chance_of_success(rows))
        may_keep = keeps.copy()
        for limit in self.search.limits:
            by_rows, up_to = self._beliefs(limit.metric, rows)
            keeps *= limit.probability(by_rows)
            may_keep *= limit.probability(up_to)
        return _Cells(
            rows=rows,
            measured=measured,
            own=Belief(sign * own.mean, own.deviation),
            rival=Belief(sign * rival.mean, rival.deviation),
            keeps=keeps,
            may_keep=may_keep,
        )

    def _beliefs(self, metric: Metric, rows: NDArray[np.intp]) -> tuple[Belief, Belief]:
        """The log of a metric by its rows, and up to where the truth of lower bounds may be."""
        values = self.search.values.get(metric.name, {})
        itself = np.isin(rows, list(set(values) - self.search.flagged))
        own = Belief(np.zeros(len(rows)), np.ones(len(rows)))
        if not itself.all():
            predicted = self.search.predictions(metric, rows[~itself])
            own.mean[~itself], own.deviation[~itself] = predicted
        known = [(values[row], self.doubts.get(row, _CERTAIN)) for row in map(int, rows[itself])]
        name = metric.name
        deviations = [doubt.deviations.get(name, UNKNOWN_DEVIATION) for _, doubt in known]
        own.mean[itself] = np.log([value for value, _ in known])
        own.deviation[itself] = np.maximum(deviations, LEAST_DEVIATION)
        # The truth lies between the bound and so much more, evenly.
        half = np.zeros(len(rows))
        half[itself] = [doubt.better_by.get(name, 0.0) / 2 for _, doubt in known]
        return own, Belief(own.mean + metric.sign * half, np.hypot(own.deviation, half / Z_95))

    @staticmethod
    def _contenders(cells: _Cells) -> NDArray[np.intp]:
        """Measured cells that may be the answer, those that likely keep the limits and then the
        best first."""
        contenders = np.flatnonzero(cells.measured & (cells.keeps > _HARDLY))
        unlikely, worse = cells.keeps[contenders] <= 0.5, -cells.own.mean[contenders]
        return contenders[np.lexsort((worse, unlikely))]

    def _chances(self, cells: _Cells, contenders: NDArray[np.intp]) -> Floats:
        """Probability of each contender that it is the answer."""
        margin, (mean, deviation) = log1p(self.question.within), cells.rival
        own = cells.own
        lowest = (own.mean[contenders] - 3 * own.deviation[contenders]).min() + margin
        above = cells.may_keep * normal_cdf((mean - lowest) / deviation)
        rivals = np.flatnonzero(above > _NEGLIGIBLE)
        chances = []
        for at in contenders:
            others = rivals[rivals != at]
            aims = own.mean[at] + own.deviation[at] * _QUANTILES + margin
            z = (mean[others] - aims[:, None]) / deviation[others]
            lost = np.minimum(cells.may_keep[others] * normal_cdf(z), 1 - 1e-12)
            chances.append(cells.keeps[at] * np.exp(np.log1p(-lost).sum(axis=1)).mean())
        return np.array(chances)

    def _with_lead(
        self, answered: Answered, cells: _Cells, best: int, contenders: NDArray[np.intp]
    ) -> Answered:
        """The answer with the second measured cell that likely keeps the limits."""
        others = [at for at in contenders if at != best and cells.keeps[at] > 0.5]
        if not others:
            return answered
        own, second = cells.own, others[0]
        lead = own.mean[best] - own.mean[second]
        spread = Z_95 * hypot(own.deviation[best], own.deviation[second])
        low, middle, high = (exp(one) - 1 for one in (lead - spread, lead, lead + spread))
        label = self.labels[cells.rows[second]]
        return replace(answered, next=label, lead=middle, lead_low=low, lead_high=high)

    def _changes(self, cells: _Cells, best: int, better: Floats) -> Iterator[str]:
        """Events that would give another answer, the likeliest first."""
        metric = self.search.objective
        for limit in self.search.limits:
            if cells.keeps[best] < 1 - _WORTH_NAMING:
                value = self.search.values[limit.metric.name][int(cells.rows[best])]
                sign = "<=" if limit.at_most else ">="
                bound = f"{limit.metric.name} {number(value)} is close to {sign} {limit.bound:g}"
                yield f"its {bound}: it keeps its limits with probability {cells.keeps[best]:.2f}"
                break
        for at in np.argsort(-better, kind="stable")[:_MOST_CHANGES]:
            if better[at] < _WORTH_NAMING:
                break
            label, chance = self.labels[cells.rows[at]], f"better with probability {better[at]:.2f}"
            value = exp(metric.sign * cells.rival.mean[at])
            if cells.measured[at]:
                bound = " (a lower bound)" if cells.rival.mean[at] > cells.own.mean[at] else ""
                value = exp(metric.sign * cells.own.mean[at])
                yield f"{label}, measured at {number(value)}{bound}, is {chance}"
            else:
                share = f"±{Z_95 * cells.rival.deviation[at]:.0%}"
                yield f"{label}, predicted at {number(value)} {share}, is {chance}"

    def _without(self, base: Answered, rows: NDArray[np.intp], *, sure: bool) -> Verdict:
        """The answer while no measured cell keeps the limits."""
        may_keep = self._cells(rows).may_keep
        none = float(np.exp(np.log1p(-np.minimum(may_keep, 1 - 1e-12)).sum()))
        changes = [
            f"{self.labels[rows[at]]} keeps the limits with probability {may_keep[at]:.2f}"
            for at in np.argsort(-may_keep, kind="stable")[:_MOST_CHANGES]
            if may_keep[at] >= _WORTH_NAMING
        ]
        answered = replace(
            base,
            probability=none if sure else 0.0,
            reached=sure and none >= self.question.confidence,
            changes=(*changes, *base.changes),
        )
        return Verdict(answered, row=None, settled=answered.reached, rival=None)
