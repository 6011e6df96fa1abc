"""A Gaussian process on log values over the cells of a space, with a mean that is learned too.

The kernel is a sum: effects of layout, load, lengths and of each category alone, of two categories
(int4 on one engine), of layout with load, and of all together. Sums of effects need far fewer
measurements than one product of all. Its amplitudes and lengths are fixed, with priors from
published measurements; a few factors on amplitude, noise and the length of load are weighed by
their marginal likelihood, and predictions are averaged over them, which keeps intervals honest
while little is known. Intervals are widened or narrowed by leave-one-out errors of the cells
measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from orchestrator.search.roofline import Mean
from orchestrator.search.space import Floats, Rows, Space

#: 95 % of a normal distribution lie within so many standard deviations.
Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Kernel:
    """Amplitudes (natural log) of effects, lengths of correlation in doublings, and noise."""

    layout: float = 0.033
    load: float = 0.029
    length: float = 0.02
    layout_with_load: float = 0.029
    all: float = 0.04
    category: float = 0.165
    layout_doublings: float = 1.8
    load_doublings: float = 2.4
    length_doublings: float = 2.0
    category_decay: float = 1.9  # of the joint effect, per category that differs
    noise: float = 0.02

    def between(self, space: Space, rows: Rows, others: Rows) -> Floats:
        """Covariances of residuals, shape (rows, others)."""
        sizes, like_size = space.distinct("size", rows)
        categories, like_category = space.distinct("category", rows)
        layout = _bell(space, "layout", sizes, others, self.layout_doublings)
        load = _bell(space, "load", sizes, others, self.load_doublings)
        length = _bell(space, "length", sizes, others, self.length_doublings)
        together = layout * load
        alone = (
            self.layout**2 * layout
            + self.load**2 * load
            + self.length**2 * length
            + self.layout_with_load**2 * together
        )
        joint = self.all**2 * together * length
        mismatches = space.mismatches(categories, others)
        alike = np.exp(-self.category_decay * mismatches)
        shared = space.categories - mismatches
        effects = self.category**2 * shared * (shared + 1) / 2  # of each, and of each two
        covariance = joint[like_size]
        covariance *= alike[like_category]
        covariance += alone[like_size]
        covariance += effects[like_category]
        return covariance

    def variance(self, space: Space) -> float:
        """Prior variance of a residual."""
        effects = (self.layout, self.load, self.length, self.layout_with_load, self.all)
        pairs = space.categories * (space.categories + 1) / 2
        return sum(effect**2 for effect in effects) + self.category**2 * pairs


def _bell(space: Space, kind: str, rows: Rows, others: Rows, doublings: float) -> Floats:
    distinct, like = space.distinct(kind, rows)
    scaled = space.squared_distances(kind, distinct, others) * (-0.5 / doublings**2)
    return np.exp(scaled, out=scaled)[like]


class Scale(NamedTuple):
    """Factors on the kernel's amplitudes, on its noise and on its length of load."""

    amplitude: float
    noise: float
    load_length: float = 1.0


#: The last are of grids whose curves over load turn within a doubling, as where caches end.
SCALES = (
    *(Scale(*pair) for pair in ((0.6, 1), (1.2, 1), (2.5, 1), (5, 1), (2.5, 4), (5, 4))),
    *(Scale(*pair, load_length=0.5) for pair in ((5, 4), (5, 8))),
)
#: Scales that later fits still weigh, once so many cells are known.
_LIKELIEST, _ENOUGH = 2, 24
#: Steps to a mean's parameters, and their largest and last size in prior deviations.
_STEPS, _LONGEST_STEP, _CLOSE = 8, 1.5, 0.02
#: Cells that are looked at together: the cache holds their covariances.
_TOGETHER = 1024
#: Imaginary cells with errors as predicted, weighed with those measured.
_CALM = 12.0


class Belief(NamedTuple):
    """Mean and standard deviation of the log of a new measurement, shape (cells looked at,)."""

    mean: Floats
    deviation: Floats


class Surrogate:
    """Prediction of one metric of all cells from its measured values."""

    def __init__(self, space: Space, mean: Mean, kernel: Kernel | None = None) -> None:
        self._space, self._mean = space, mean
        self._kernel = kernel if kernel is not None else Kernel()
        self._scales = SCALES
        self._parameters = dict.fromkeys(SCALES, mean.start)
        self._fits: dict[Scale, _Fit] = {}
        self._learned: tuple[bytes, bytes] | None = None  # the data of the last fit
        self._beliefs: Belief | None = None  # about all cells, by the last fit
        #: Factor on deviations, from leave-one-out errors of the last fit.
        self.calibration = 1.0

    def prior(self, at: Rows) -> Belief:
        """The belief before any measurement."""
        values, slopes = self._mean.linear(self._mean.start, at)
        variance = np.square(slopes * self._mean.spread).sum(axis=1)
        variance += self._kernel.variance(self._space)
        return Belief(values, np.sqrt(variance))

    def fit(self, rows: Rows, logs: Floats, at: Rows) -> Belief:
        """The belief about the cells ``at``, given log values of ``rows``; both shape (n,)."""
        if not len(rows):
            return self.prior(at)
        rows, at = np.asarray(rows), np.asarray(at)
        data = rows.tobytes(), np.asarray(logs).tobytes()
        if data != self._learned:  # beliefs about other cells need no other fit
            self._learn(rows, logs)
            self._learned = data
            self._beliefs = None
        if self._beliefs is None:
            every = at if 2 * len(at) < self._space.size else np.arange(self._space.size)
            starts = range(0, max(1, len(every)), _TOGETHER)
            blocks = [self._believe(rows, every[start : start + _TOGETHER]) for start in starts]
            belief = Belief(*map(np.concatenate, zip(*blocks, strict=True)))
            if every is at:
                return belief
            self._beliefs = belief  # the next question asks for most cells, too
        return Belief(self._beliefs.mean[at], self._beliefs.deviation[at])

    def _believe(self, rows: Rows, at: Rows) -> Belief:
        across = self._covariances(self._fits, at, rows)
        beliefs = [
            self._predict(scale, fit, at, across[scale.load_length])
            for scale, fit in self._fits.items()
        ]
        weights = np.array([fit.weight for fit in self._fits.values()])
        means = np.stack([belief.mean for belief in beliefs])
        mean = weights @ means
        variance = weights @ (np.stack([b.deviation for b in beliefs]) + np.square(means - mean))
        return Belief(mean, np.sqrt(variance) * self.calibration)

    def _covariances(
        self, scales: Iterable[Scale], rows: Rows, others: Rows
    ) -> dict[float, Floats]:
        """Covariances by the factor on the length of load, each shape (rows, others)."""
        covariances = {}
        for factor in {scale.load_length for scale in scales}:
            doublings = self._kernel.load_doublings * factor
            kernel = replace(self._kernel, load_doublings=doublings)
            covariances[factor] = kernel.between(self._space, rows, others)
        return covariances

    def _learn(self, rows: Rows, logs: Floats) -> None:
        among = self._covariances(self._scales, rows, rows)
        fits = {
            scale: self._fit_scaled(scale, rows, logs, among[scale.load_length])
            for scale in self._scales
        }
        evidence = np.array([fit.evidence for fit in fits.values()])
        weights = np.exp(evidence - evidence.max())
        weights /= weights.sum()
        errors = np.abs(weights @ np.stack([fit.errors for fit in fits.values()]))
        self.calibration = _calibration(errors)
        self._fits = {
            scale: fit._replace(weight=float(weight))
            for (scale, fit), weight in zip(fits.items(), weights, strict=True)
        }
        if len(rows) >= _ENOUGH:
            likeliest = np.argsort(-weights, kind="stable")[:_LIKELIEST]
            self._scales = tuple(self._scales[at] for at in likeliest)

    def _fit_scaled(self, scale: Scale, rows: Rows, logs: Floats, among: Floats) -> _Fit:
        start, prior_variance = self._mean.start, np.square(self._mean.spread)
        noise = (self._kernel.noise * scale.noise) ** 2
        residual = among * scale.amplitude**2 + noise * np.eye(len(logs))
        # The covariance of what is left is that of the residuals and one of the few parameters,
        # which alone changes from step to step: its inverse follows by Woodbury's identity.
        residual_inverse = np.linalg.inv(residual)
        parameters = self._parameters[scale]
        for step in range(_STEPS):
            values, here = self._mean.linear(parameters, rows)
            residuals = logs - values + here @ (parameters - start)
            part = residual_inverse @ here
            inner = np.diag(1.0 / prior_variance) + here.T @ part
            inverse = residual_inverse - part @ np.linalg.solve(inner, part.T)
            solved = inverse @ residuals
            change = start + prior_variance * (here.T @ solved) - parameters
            size = np.abs(change / self._mean.spread).max()
            if size < _CLOSE or step == _STEPS - 1:
                break
            parameters = parameters + change * min(1.0, _LONGEST_STEP / size)
        self._parameters[scale] = parameters
        determinant = np.linalg.slogdet(residual)[1] + np.linalg.slogdet(inner)[1]
        determinant += np.log(prior_variance).sum()
        return _Fit(
            parameters=parameters,
            here=here,
            inverse=inverse,
            solved=solved,
            errors=solved / np.sqrt(np.diag(inverse)),  # leave one out, in standard errors
            evidence=-0.5 * (residuals @ solved + determinant),
        )

    def _predict(self, scale: Scale, fit: _Fit, at: Rows, across: Floats) -> Belief:
        """Means and, as deviations, variances."""
        prior_variance = np.square(self._mean.spread)
        values, there = self._mean.linear(fit.parameters, at)
        change = prior_variance * (fit.here.T @ fit.solved) - (fit.parameters - self._mean.start)
        mean = values + there @ change + scale.amplitude**2 * (across @ fit.solved)
        shared = (there * prior_variance) @ fit.here.T
        shared += across * scale.amplitude**2
        variance = (
            self._kernel.variance(self._space) * scale.amplitude**2
            + (np.square(there) @ prior_variance)
            - np.einsum("ij,ij->i", shared @ fit.inverse, shared)
            + (self._kernel.noise * scale.noise) ** 2
        )
        return Belief(mean, np.maximum(variance, 1e-10))


class _Fit(NamedTuple):
    parameters: Floats
    here: Floats  # derivatives of the mean at the cells known
    inverse: Floats  # of the covariance of their values
    solved: Floats
    errors: Floats
    evidence: float
    weight: float = 1.0  # among the factors


def _calibration(errors: Floats) -> float:
    """Factor on deviations, so that 95 % of leave-one-out errors lie within 1.96 of them; few
    errors count little."""
    if len(errors) < 4:
        return 1.0
    ordered = np.sort(errors)
    at = min(int(np.ceil(0.95 * (len(ordered) + 1))), len(ordered)) - 1
    factor = float(ordered[at]) / Z_95
    weight = len(ordered) / (len(ordered) + _CALM)
    return float(np.exp(weight * np.log(np.clip(factor, 0.5, 3.0))))
