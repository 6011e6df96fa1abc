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
from math import exp, hypot, log, log1p
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.measurement import Doubt
from orchestrator.core.status import Answered
from orchestrator.grid.objectives import Question
from orchestrator.search.acquisition import normal_cdf
from orchestrator.search.search import Metric, Search
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
#: Chance from which a measured cell may be the best.
_CLOSE = 0.05
_CERTAIN = Doubt()


class Verdict(NamedTuple):
    """An answer with its rows."""

    answered: Answered
    row: int | None
    #: The measured cell that is likeliest to be better, while it is too close to call.
    rival: int | None


class _Cells(NamedTuple):
    """Knowledge of the cells of a question, shape (cells,); more is better."""

    own: Belief  # of the objective, by the rows of measured cells
    rival: Belief  # the same, up to where the truth of lower bounds may be
    keeps: Floats  # probability that it can be measured and keeps the limits, by its rows
    may_keep: Floats  # the same, up to where the truth may be
    measured: NDArray[np.bool_]
    unknown: NDArray[np.bool_]
    failed: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A question, the search of its best cell, and the rows that it is about."""

    question: Question
    search: Search
    rows: NDArray[np.intp]

    def verdict(self, labels: Sequence[str], doubts: Mapping[int, Doubt]) -> Verdict:
        """The present answer; labels and doubts are of rows."""
        cells, question = self._cells(doubts), self.question
        measured, unknown = int(cells.measured.sum()), int(cells.unknown.sum())
        failed = int(cells.failed.sum())
        flagged = len(self.search.flagged.intersection(map(int, self.rows)))
        base = Answered(
            question=str(question),
            figure=question.best,
            confidence=question.confidence,
            within=question.within,
            measured=measured,
            predicted=len(self.rows) - measured - unknown - failed - flagged,
            flagged=flagged,
            unknown=unknown,
            failed=failed,
            changes=(f"{plural(unknown, 'cell')} of which nothing is known",) * bool(unknown),
        )
        sure = not unknown and measured >= min(LEAST_MEASURED, len(self.rows) - failed)
        contenders = np.flatnonzero(cells.measured & (cells.keeps > _HARDLY))
        if not len(contenders):
            return self._without(base, cells, labels, sure=sure)
        unlikely, worse = cells.keeps[contenders] <= 0.5, -cells.own.mean[contenders]
        contenders = contenders[np.lexsort((worse, unlikely))]
        chances = self._chances(cells, contenders[:_CONTENDERS])
        # Where hardly any can win, as among lower bounds, the best value is the best guess.
        place = int(chances.argmax()) if chances.max() >= _CLOSE else 0
        best, probability = int(contenders[place]), float(chances[place])
        better = self._better(cells, best)
        bound = "at least" if question.more_is_better else "at most"
        answered = replace(
            base,
            job=labels[self.rows[best]],
            value=exp(self.search.objective.sign * cells.own.mean[best]),
            bound=bound if cells.rival.mean[best] > cells.own.mean[best] else "",
            probability=probability,
            reached=sure and probability >= question.confidence,
            changes=(*self._changes(cells, best, better, labels), *base.changes),
        )
        answered = self._with_lead(answered, cells, best, contenders, labels)
        close = np.where(cells.measured, better, 0.0)
        rival = int(close.argmax())
        again = close[rival] >= _CLOSE and not answered.reached
        return Verdict(answered, int(self.rows[best]), int(self.rows[rival]) if again else None)

    def _cells(self, doubts: Mapping[int, Doubt]) -> _Cells:
        search, rows = self.search, self.rows
        metrics = [search.objective, *(limit.metric for limit in search.limits)]
        known = [search.values.get(metric.name, {}) for metric in metrics]
        failed = np.isin(rows, list(search.failed))
        some = np.isin(rows, list(known[0])) & ~failed
        complete = some & np.isin(rows, list(set(known[0]).intersection(*known[1:])))
        # A figure that no cell has cannot be predicted; a row that lacks one will never have it.
        unknown = ~complete & ~failed & (some if all(known) else True)
        measured = complete & ~np.isin(rows, list(search.flagged))
        beliefs = [self._beliefs(metric, doubts) for metric in metrics]
        own, rival = [mine for mine, _ in beliefs], [others for _, others in beliefs]
        success = np.where(measured, 1.0, search.chance_of_success(rows))
        success[unknown | failed] = 0.0

        def keep(beliefs: list[Belief]) -> Floats:
            chances = (
                limit.probability(belief)
                for limit, belief in zip(search.limits, beliefs[1:], strict=True)
            )
            return success * np.prod([np.ones(len(rows)), *chances], axis=0)

        def better(belief: Belief) -> Belief:
            return Belief(search.objective.sign * belief.mean, belief.deviation)

        return _Cells(
            own=better(own[0]),
            rival=better(rival[0]),
            keeps=keep(own),
            may_keep=keep(rival),
            measured=measured,
            unknown=unknown,
            failed=failed,
        )

    def _beliefs(self, metric: Metric, doubts: Mapping[int, Doubt]) -> tuple[Belief, Belief]:
        """The log of a metric by its rows, and up to where the truth of lower bounds may be."""
        values, count = self.search.values.get(metric.name, {}), len(self.rows)
        own = Belief(np.zeros(count), np.ones(count))
        if values:
            own = self.search.predictions(metric, self.rows)
        rival = Belief(own.mean.copy(), own.deviation.copy())
        for at, row in enumerate(map(int, self.rows)):
            if row in values and row not in self.search.flagged:
                doubt = doubts.get(row, _CERTAIN)
                deviation = doubt.deviations.get(metric.name, UNKNOWN_DEVIATION)
                # The truth lies between the bound and so much more, evenly.
                half = doubt.better_by.get(metric.name, 0.0) / 2
                own.mean[at] = log(values[row])
                own.deviation[at] = max(deviation, LEAST_DEVIATION)
                rival.mean[at] = own.mean[at] + metric.sign * half
                rival.deviation[at] = hypot(own.deviation[at], half / Z_95)
        return own, rival

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

    def _better(self, cells: _Cells, best: int) -> Floats:
        """Probability of each cell that it keeps the limits and is better than the answer."""
        ahead = cells.rival.mean - cells.own.mean[best] - log1p(self.question.within)
        spread = np.hypot(cells.rival.deviation, cells.own.deviation[best])
        better = cells.may_keep * normal_cdf(ahead / spread)
        better[best] = 0.0
        return better

    def _with_lead(
        self,
        answered: Answered,
        cells: _Cells,
        best: int,
        contenders: NDArray[np.intp],
        labels: Sequence[str],
    ) -> Answered:
        """The answer with the second measured cell that likely keeps the limits."""
        others = [at for at in contenders if at != best and cells.keeps[at] > 0.5]
        if not others:
            return answered
        own, second = cells.own, others[0]
        lead = own.mean[best] - own.mean[second]
        spread = Z_95 * hypot(own.deviation[best], own.deviation[second])
        low, middle, high = (exp(one) - 1 for one in (lead - spread, lead, lead + spread))
        label = labels[self.rows[second]]
        return replace(answered, next=label, lead=middle, lead_low=low, lead_high=high)

    def _changes(
        self, cells: _Cells, best: int, better: Floats, labels: Sequence[str]
    ) -> Iterator[str]:
        """Events that would give another answer, the likeliest first."""
        metric = self.search.objective
        for limit in self.search.limits:
            if cells.keeps[best] < 1 - _WORTH_NAMING:
                value = self.search.values[limit.metric.name][int(self.rows[best])]
                sign = "<=" if limit.at_most else ">="
                bound = f"{limit.metric.name} {number(value)} is close to {sign} {limit.bound:g}"
                yield f"its {bound}: it keeps its limits with probability {cells.keeps[best]:.2f}"
                break
        for at in np.argsort(-better, kind="stable")[:_MOST_CHANGES]:
            if better[at] < _WORTH_NAMING:
                break
            label, chance = labels[self.rows[at]], f"better with probability {better[at]:.2f}"
            value = exp(metric.sign * cells.rival.mean[at])
            if cells.measured[at]:
                bound = " (a lower bound)" if cells.rival.mean[at] > cells.own.mean[at] else ""
                value = exp(metric.sign * cells.own.mean[at])
                yield f"{label}, measured at {number(value)}{bound}, is {chance}"
            else:
                share = f"±{Z_95 * cells.rival.deviation[at]:.0%}"
                yield f"{label}, predicted at {number(value)} {share}, is {chance}"

    def _without(
        self, base: Answered, cells: _Cells, labels: Sequence[str], *, sure: bool
    ) -> Verdict:
        """The answer while no measured cell keeps the limits."""
        none = float(np.exp(np.log1p(-np.minimum(cells.may_keep, 1 - 1e-12)).sum()))
        changes = [
            f"{labels[self.rows[at]]} keeps the limits with probability {cells.may_keep[at]:.2f}"
            for at in np.argsort(-cells.may_keep, kind="stable")[:_MOST_CHANGES]
            if cells.may_keep[at] >= _WORTH_NAMING
        ]
        answered = replace(
            base,
            probability=none if sure else 0.0,
            reached=sure and none >= self.question.confidence,
            changes=(*changes, *base.changes),
        )
        return Verdict(answered, None, None)
