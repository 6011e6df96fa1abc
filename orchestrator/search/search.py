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
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from orchestrator.search.roofline import Mean, Plane
from orchestrator.search.space import KINDS, Floats, Rows, Space
from orchestrator.search.surrogate import Belief, Kernel, Surrogate
from workloads.util.statistics import pareto

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
        below = normal_cdf((log(self.bound) - belief.mean) / belief.deviation)
        return below if self.at_most else 1.0 - below


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best measured cell that keeps the limits, and what is left to chance."""

    row: int
    value: float
    #: Probability that no other cell is better by more than the tolerance.
    probability: float


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
        first = [int(np.random.default_rng(self.seed).integers(self.space.size))]
        if self.known or first[0] in barred:
            first = []
        certain = [*sorted(self.running), *first]
        rows = np.array([*certain, *candidates[~np.isin(candidates, first)]])
        metrics = [self.objective, *(limit.metric for limit in self.limits)]
        metrics += [self.second] if self.second is not None else []
        beliefs = {metric.name: self._believe(metric, rows) for metric in metrics}
        taken = np.arange(len(rows)) < len(certain)
        chosen = list(first)
        success = self.chance_of_success(rows)
        for at in range(len(certain)):
            beliefs = self._narrowed(beliefs, rows, at)
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
            if len(chosen) < count:
                beliefs = self._narrowed(beliefs, rows, at)
        return chosen[:count]

    def _narrowed(
        self, beliefs: Mapping[str, Belief], rows: NDArray[np.intp], at: int
    ) -> dict[str, Belief]:
        """Beliefs once the value of one cell is as expected: less is uncertain around it."""
        kernel = Kernel()
        covariance = kernel.between(self.space, rows[[at]], rows)[0]
        correlation = covariance / kernel.variance(self.space)
        rest = np.sqrt(np.maximum(1.0 - np.square(correlation), 1e-4))
        return {name: Belief(one.mean, one.deviation * rest) for name, one in beliefs.items()}

    def predictions(self, metric: Metric, rows: Rows) -> Belief:
        """Beliefs about the log of a metric of these cells.

        The cells that a search measures lie close together, and their errors say little of cells
        far from them: they may widen intervals here, but not narrow them."""
        belief = self._believe(metric, np.asarray(rows, dtype=np.intp))
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
        return normal_cdf(belief.mean / belief.deviation)

    def answer(self, tolerance: float = 0.0) -> Answer | None:
        """The best cell so far; None while no measured one keeps the limits."""
        keeping = self._keeping()
        if not keeping:
            return None
        sign = self.objective.sign
        best = min(keeping, key=lambda row: (-sign * log(keeping[row]), row))
        left = self._candidates(add=sorted(self.running))
        chances = np.zeros(len(left))
        if len(left):
            belief = _turned(self._believe(self.objective, left), sign)
            aim = sign * log(keeping[best]) + log(1.0 + tolerance)
            chances = 1.0 - normal_cdf((aim - belief.mean) / belief.deviation)
            for limit in self.limits:
                chances = chances * limit.probability(self._believe(limit.metric, left))
            chances = chances * self.chance_of_success(left)
        return Answer(row=best, value=keeping[best], probability=float(np.prod(1.0 - chances)))

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

    def _believe(self, metric: Metric, rows: NDArray[np.intp]) -> Belief:
        surrogate = self._surrogates.get(metric.name)
        if surrogate is None:
            kernel = _UNKNOWN if isinstance(metric.mean, Plane) else None
            surrogate = self._surrogates[metric.name] = Surrogate(self.space, metric.mean, kernel)
        values = self.values.get(metric.name, {})
        fitted = sorted(values)
        if len(fitted) > MOST_FITTED:
            half = MOST_FITTED // 2
            ordered = sorted(values, key=lambda row: (-metric.sign * values[row], row))
            others = _spread(sorted(ordered[half:]), MOST_FITTED - half)
            fitted = sorted([*ordered[:half], *others])
        logs = np.log([values[row] for row in fitted])
        return surrogate.fit(fitted, logs, rows)

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
            gain = expected_area_gain(belief, _turned(beliefs[other.name], other.sign), points)
        else:
            best = max((sign * log(value) for value in keeping.values()), default=None)
            gain = expected_improvement(belief, best)
        for limit in self.limits:
            gain = gain * limit.probability(beliefs[limit.metric.name])
        return gain / self.cost(rows) if self.cost is not None else gain


def _spread(rows: list[int], count: int) -> list[int]:
    if len(rows) <= count:
        return rows
    return [rows[at] for at in np.linspace(0, len(rows) - 1, count).astype(int)]


def _turned(belief: Belief, sign: float) -> Belief:
    return Belief(sign * belief.mean, belief.deviation)


# ---------------------------------------------------------------- scores of cells

#: Deviation (natural log) beyond which ignorance alone does not raise a score any more.
_WIDEST = 1.0
_QUANTILES = np.array([NormalDist().inv_cdf((at + 0.5) / 6) for at in range(6)])


def normal_cdf(z: Floats) -> Floats:
    """Cumulative standard normal distribution, to 2e-4."""
    return 0.5 * (1.0 + np.tanh(0.7978845608 * (z + 0.044715 * z**3)))


def expected_improvement(belief: Belief, best: float | None) -> Floats:
    """Expected excess of exp(value) over exp(best), relative to it; of a log-normal.

    Without a best, the expected value itself, up to a common factor.
    """
    deviation = np.minimum(belief.deviation, _WIDEST)
    reference = best if best is not None else float(belief.mean.max())
    above = belief.mean - reference
    value = np.exp(np.minimum(above + deviation**2 / 2, 50.0))
    if best is None:
        return value
    z = above / deviation
    return np.maximum(value * normal_cdf(z + deviation) - normal_cdf(z), 0.0)


def expected_area_gain(
    first: Belief, second: Belief, points: Sequence[tuple[float, float]]
) -> Floats:
    """Expected gain of the area dominated by a front, both coordinates log values to raise.

    Area is measured from a corner below all points and beliefs, over independent quantiles.
    """
    corner = (
        min([float(first.mean.min()), *(x for x, _ in points)]) - 1.0,
        min([float(second.mean.min()), *(y for _, y in points)]) - 1.0,
    )
    steps = pareto(points, lambda point: point)
    xs = first.mean[:, None] + first.deviation[:, None] * np.repeat(_QUANTILES, len(_QUANTILES))
    ys = second.mean[:, None] + second.deviation[:, None] * np.tile(_QUANTILES, len(_QUANTILES))
    gain = np.zeros_like(xs)
    # Vertical strips between neighbours of the front; in each the front has one height.
    edges = [*(x for x, _ in reversed(steps)), np.inf]
    heights = [*(y for _, y in reversed(steps)), corner[1]]
    left = corner[0]
    for right, height in zip(edges, heights, strict=True):
        width = np.clip(xs, left, right) - left
        gain += width * np.maximum(ys - height, 0.0)
        left = right
    return gain.mean(axis=1)
