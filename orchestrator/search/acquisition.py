"""Scores of unmeasured cells: what a measurement of each is expected to gain. Pure.

One answer: constrained expected improvement (Gardner et al., ICML 2014) over the best measured cell
that keeps all limits; before there is one, the expected value of a cell that keeps them. A front:
the expected gain of the area that it dominates. Both in closed form or over fixed quantiles, so
scores are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from orchestrator.search.space import Floats
from orchestrator.search.surrogate import Belief

#: Deviation (natural log) beyond which ignorance alone does not raise a score any more.
_WIDEST = 1.0
_QUANTILES = np.array([NormalDist().inv_cdf((at + 0.5) / 6) for at in range(6)])


def normal_cdf(z: Floats) -> Floats:
    """Cumulative standard normal distribution, to 2e-4."""
    return 0.5 * (1.0 + np.tanh(0.7978845608 * (z + 0.044715 * z**3)))


def probability_below(belief: Belief, log_bound: float) -> Floats:
    """Probability that a value is at most the bound."""
    return normal_cdf((log_bound - belief.mean) / belief.deviation)


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


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other exceeds in both coordinates, by falling first coordinate."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points), reverse=True):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best


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
    steps = [(x, y) for x, y in front(points) if x > corner[0] and y > corner[1]]
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
