"""The search of a grid: which cells to measure next, and the answer so far. Pure.

A search knows the cells of a ``Space``, the values measured on some of them, those that failed and
those that run now. Each metric has a surrogate of its own; failures have one too, so cells that
would run out of memory are not chosen again and again. Cells that run now count as measured with
the value that is expected of them (a kriging believer: D. Ginsbourger, 2010), so a batch for many
cards spreads. The same measurements give the same choices, in whatever order they came.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np
from numpy.typing import NDArray

from orchestrator.search import acquisition
from orchestrator.search.roofline import Mean, Plane
from orchestrator.search.space import KINDS, Floats, Rows, Space
from orchestrator.search.surrogate import Belief, Kernel, Surrogate

#: Cells that one decision looks at: the best of the last one, and others in turn.
LOOKED_AT = 512
#: Measurements that a surrogate is fitted to; of more, the best and a spread of the others.
MOST_FITTED = 160
#: A kernel for success (1) and failure (-1), and how sure of success a search is at first.
_SUCCESS = Kernel(layout=0.3, load=0.2, length=0.2, layout_with_load=0.3, all=0.6, noise=0.15)
_HOPE, _HOPE_SPREAD = 1.0, 0.5
#: Of metrics without a roofline, whose effects may be larger.
_UNKNOWN = Kernel(layout=0.15, load=0.25, length=0.15, layout_with_load=0.1, all=0.1, category=0.25)


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of cells, positive, with the prior mean of its natural log."""

    name: str
    mean: Mean
    more_is_better: bool = True

    @property
    def sign(self) -> float:
        """1 if more is better, else -1."""
        return 1.0 if self.more_is_better else -1.0


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on a metric."""

    metric: Metric
    bound: float
    at_most: bool

    def keeps(self, value: float) -> bool:
        """Return whether a value is within the bound."""
        return value <= self.bound if self.at_most else value >= self.bound

    def probability(self, belief: Belief) -> Floats:
        """Probability that a value with this belief keeps the bound."""
        below = acquisition.probability_below(belief, log(self.bound))
        return below if self.at_most else 1.0 - below


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best measured cell that keeps the limits, and what is left to chance."""

    row: int
    value: float
    #: Probability that no other cell is better by more than the tolerance.
    probability: float
    #: The measured cell that comes next, None if there is none, and by what factor it is beaten.
    next_row: int | None
    lead: float


@dataclass(slots=True)
class Search:
    """A search for the best of one metric under limits, or for a front of two.

    ``cost`` gives the seconds of a cell now, so that one of a model that is loaded may come
    before one that is a little more promising. ``second`` is the other metric of a front.
    """

    space: Space
    objective: Metric
    limits: Sequence[Limit] = ()
    second: Metric | None = None
    seed: int = 0
    cost: Callable[[NDArray[np.intp]], Floats] | None = None
    values: dict[str, dict[int, float]] = field(default_factory=dict)  # by metric, of rows
    failed: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    flagged: set[int] = field(default_factory=set)  # measured, and no answer
    _surrogates: dict[str, Surrogate] = field(default_factory=dict)
    _success: Surrogate | None = None
    _promising: list[int] = field(default_factory=list)
    _cursor: int = 0

    def measured(self, row: int, values: Mapping[str, float]) -> None:
        """Add the values of a cell; another measurement replaces them. Ignores those not above 0,
        of which there is no log."""
        self.running.discard(row)
        self.failed.discard(row)
        for name, value in values.items():
            if value > 0:
                self.values.setdefault(name, {})[row] = value

    def fails(self, row: int) -> None:
        """Add a cell that cannot be measured."""
        self.running.discard(row)
        self.failed.add(row)

    @property
    def metrics(self) -> list[Metric]:
        """The metrics that matter, each once."""
        every = [self.objective, *(limit.metric for limit in self.limits)]
        if self.second is not None:
            every.append(self.second)
        return list({metric.name: metric for metric in every}.values())

    @property
    def known(self) -> set[int]:
        """Rows that are measured, failed or run now."""
        return {*self._measured, *self.failed, *self.running}

    @property
    def _measured(self) -> dict[int, float]:
        return self.values.get(self.objective.name, {})

    def propose(self, count: int = 1, barred: Collection[int] = ()) -> list[int]:
        """Rows to measure next, the most promising first; fewer if fewer are left. Those that are
        barred are for another time."""
        candidates = self._candidates(barred=barred)
        if not len(candidates) or count < 1:
            return []
        first = [] if self.known or self._first() in barred else [self._first()]
        rows = np.array([*sorted(self.running), *first, *candidates])
        beliefs = {metric.name: self._believe(metric, rows) for metric in self.metrics}
        certain = len(rows) - len(candidates)
        taken = np.zeros(len(rows), dtype=bool)
        taken[:certain] = True
        taken[certain:] = np.isin(rows[certain:], first)
        chosen = list(first)
        success = self.chance_of_success(rows)
        correlation = _Correlation(self.space, rows) if certain or count > 1 else None
        for at in range(certain):
            beliefs = {name: _believed(b, correlation, at) for name, b in beliefs.items()}
        while len(chosen) < count and not taken.all():
            scores = self._scores(rows, beliefs) * success
            scores[taken] = -1.0
            if not self._promising or len(chosen) == len(first):
                order = np.argsort(-scores, kind="stable")[: LOOKED_AT // 2]
                self._promising = [int(row) for row in rows[order]]
            left = np.flatnonzero(~taken)
            left = left[self._untried(rows[left], chosen)]
            at = int(left[scores[left].argmax()])
            taken[at] = True
            chosen.append(int(rows[at]))
            if correlation is not None and len(chosen) < count:
                beliefs = {name: _believed(b, correlation, at) for name, b in beliefs.items()}
        return chosen[:count]

    def predictions(self, metric: Metric, rows: Rows, *, roughly: bool = False) -> Belief:
        """Beliefs about the log of a metric of these cells; ``roughly``: see ``Surrogate.fit``.

        The cells that a search measures lie close together, and their errors say little of cells
        far from them: they may widen intervals here, but not narrow them."""
        belief = self._believe(metric, np.asarray(rows, dtype=np.intp), roughly=roughly)
        wider = max(1.0, 1.0 / self._surrogates[metric.name].calibration)
        return Belief(belief.mean, belief.deviation * wider)

    def chance_of_success(self, rows: NDArray[np.intp]) -> Floats:
        """Probability that these cells can be measured, from those that failed."""
        if not self.failed:
            return np.ones(len(rows))
        if self._success is None:
            self._success = Surrogate(self.space, Plane(self.space, _HOPE, _HOPE_SPREAD), _SUCCESS)
        known = _spread(sorted({*self._measured, *self.failed}), MOST_FITTED)
        labels = np.array([-1.0 if row in self.failed else 1.0 for row in known])
        belief = self._success.fit(known, labels, rows)
        return acquisition.normal_cdf(belief.mean / belief.deviation)

    def answer(self, tolerance: float = 0.0) -> Answer | None:
        """The best cell so far; None while no measured one keeps the limits."""
        keeping = self._keeping()
        if not keeping:
            return None
        sign = self.objective.sign
        ordered = sorted(keeping, key=lambda row: (-sign * log(keeping[row]), row))
        best = ordered[0]
        following = ordered[1] if len(ordered) > 1 else None
        lead = abs(keeping[best] / keeping[following] - 1.0) if following is not None else 0.0
        left = self._candidates(add=sorted(self.running))
        chances = np.zeros(len(left))
        if len(left):
            belief = _turned(self._believe(self.objective, left), sign)
            aim = sign * log(keeping[best]) + log(1.0 + tolerance)
            chances = 1.0 - acquisition.probability_below(belief, aim)
            for limit in self.limits:
                chances = chances * limit.probability(self._believe(limit.metric, left))
            chances = chances * self.chance_of_success(left)
        return Answer(
            row=best,
            value=keeping[best],
            probability=float(np.prod(1.0 - chances)),
            next_row=following,
            lead=lead,
        )

    def _keeping(self) -> dict[int, float]:
        """Measured cells that keep every limit, with the objective's values."""
        return {
            row: value
            for row, value in self._measured.items()
            if row not in self.failed
            and row not in self.flagged
            and all(
                (other := self.values.get(limit.metric.name, {}).get(row)) is not None
                and limit.keeps(other)
                for limit in self.limits
            )
        }

    def _first(self) -> int:
        return int(np.random.default_rng(self.seed).integers(self.space.size))

    def _candidates(
        self, add: Sequence[int] = (), barred: Collection[int] = ()
    ) -> NDArray[np.intp]:
        """Unknown rows to look at: all of few; of many the promising ones and some in turn."""
        known = self.known.union(barred)
        size = self.space.size
        if size <= LOOKED_AT:
            rows = [row for row in range(size) if row not in known]
        else:
            promising = [row for row in self._promising if row not in known]
            window = LOOKED_AT - len(promising)
            draw = np.random.default_rng(self.seed).permutation(size)
            turn = draw[(self._cursor + np.arange(min(window, size))) % size]
            self._cursor = (self._cursor + window) % size
            rows = sorted({*promising, *(int(row) for row in turn if int(row) not in known)})
        return np.array([*add, *rows], dtype=np.intp)

    def _untried(self, rows: NDArray[np.intp], chosen: Sequence[int]) -> NDArray[np.bool_]:
        """Mark the rows to choose from: those with most values of categories that no other cell
        has, next to the best cell in all sizes, so that engines and precisions are compared where
        it matters; all rows if every value was tried."""
        new = self.space.new_categories(rows, sorted(self.known.union(chosen)))
        some = new == new.max()
        measured = self._keeping() or self._measured
        if not new.any() or not measured:
            return some
        best = max(measured, key=lambda row: (self.objective.sign * measured[row], -row))
        distance = np.zeros(len(rows))
        for kind in KINDS:
            distance += self.space.squared_distances(kind, rows, [best])[:, 0]
        return some & (distance == distance[some].min())

    def _believe(self, metric: Metric, rows: NDArray[np.intp], *, roughly: bool = False) -> Belief:
        surrogate = self._surrogates.get(metric.name)
        if surrogate is None:
            kernel = _UNKNOWN if isinstance(metric.mean, Plane) else None
            surrogate = self._surrogates[metric.name] = Surrogate(self.space, metric.mean, kernel)
        values = self.values.get(metric.name, {})
        fitted = _most_telling(values, metric.sign)
        logs = np.log([values[row] for row in fitted])
        return surrogate.fit(fitted, logs, rows, roughly=roughly)

    def _scores(self, rows: NDArray[np.intp], beliefs: Mapping[str, Belief]) -> Floats:
        sign = self.objective.sign
        belief = _turned(beliefs[self.objective.name], sign)
        keeping = self._keeping()
        if self.second is not None:
            other = self.second
            known = self.values.get(other.name, {})
            points = [
                (sign * log(value), other.sign * log(known[row]))
                for row, value in keeping.items()
                if row in known
            ]
            gain = acquisition.expected_area_gain(
                belief, _turned(beliefs[other.name], other.sign), points
            )
        else:
            best = max((sign * log(value) for value in keeping.values()), default=None)
            gain = acquisition.expected_improvement(belief, best)
        for limit in self.limits:
            gain = gain * limit.probability(beliefs[limit.metric.name])
        return gain / self.cost(rows) if self.cost is not None else gain


def _most_telling(values: Mapping[int, float], sign: float) -> list[int]:
    """The rows that a surrogate is fitted to."""
    if len(values) <= MOST_FITTED:
        return sorted(values)
    ordered = sorted(values, key=lambda row: (-sign * values[row], row))
    best, others = ordered[: MOST_FITTED // 2], sorted(ordered[MOST_FITTED // 2 :])
    return sorted([*best, *_spread(others, MOST_FITTED - len(best))])


def _spread(rows: list[int], count: int) -> list[int]:
    if len(rows) <= count:
        return rows
    return [rows[at] for at in np.linspace(0, len(rows) - 1, count).astype(int)]


def _turned(belief: Belief, sign: float) -> Belief:
    return Belief(sign * belief.mean, belief.deviation)


class _Correlation:
    """Prior correlation of residuals among rows, one row at a time."""

    def __init__(self, space: Space, rows: NDArray[np.intp]) -> None:
        self._space, self._rows, self._kernel = space, rows, Kernel()

    def of(self, at: int) -> Floats:
        covariance = self._kernel.between(self._space, self._rows[[at]], self._rows)[0]
        return covariance / self._kernel.variance(self._space)


def _believed(belief: Belief, correlation: _Correlation | None, at: int) -> Belief:
    """The belief once the value of one cell is as expected: less is uncertain around it."""
    if correlation is None:
        return belief
    rest = np.sqrt(np.maximum(1.0 - np.square(correlation.of(at)), 1e-4))
    return Belief(belief.mean, belief.deviation * rest)
