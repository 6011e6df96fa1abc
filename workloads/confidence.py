"""Means with confidence intervals, and percentiles, of small sets of timings.

Repeats of a benchmark are few (3 to 20), so the interval of their mean uses Student's t and not
the normal distribution: with three repeats the 95 % interval is 4.3 standard errors wide on each
side, not 2. Used both by the loop that decides when to stop and by the tables, so that they agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and the confidence interval around it."""

    mean: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float | None:
        """Half the interval over the mean; None when the mean is not positive."""
        return (self.high - self.low) / 2 / self.mean if self.mean > 0 else None


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Student-t interval of the mean; None for fewer than two values, which say nothing of it."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = student_t_quantile((1 + confidence) / 2, count - 1) * math.sqrt(variance / count)
    return Interval(mean=mean, low=mean - half, high=mean + half)


def ratio_interval(
    amounts: Sequence[float], times: Sequence[float], confidence: float = 0.95
) -> Interval | None:
    """All amounts over all times, with the interval of that ratio (linearised); for parts that
    are of unlike size, where the mean of the parts' own rates would favour the short ones.

    None for fewer than two parts.
    """
    count = len(amounts)
    total = math.fsum(times)
    if count < 2 or total <= 0:
        return None
    ratio = math.fsum(amounts) / total
    residuals = (amount - ratio * time for amount, time in zip(amounts, times, strict=True))
    variance = math.fsum(residual**2 for residual in residuals) / (count - 1)
    quantile = student_t_quantile((1 + confidence) / 2, count - 1)
    half = quantile * math.sqrt(variance / count) / (total / count)
    return Interval(mean=ratio, low=ratio - half, high=ratio + half)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile by linear interpolation between order statistics (numpy's default)."""
    if not values:
        return None
    ordered = sorted(values)
    position = percent / 100 * (len(ordered) - 1)
    below = min(math.floor(position), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # The clamp keeps rounding from leaving the two neighbours.
    return min(max(low + (high - low) * (position - below), low), high)


@lru_cache(maxsize=1024)
def student_t_quantile(probability: float, degrees: int) -> float:
    """The t with P(T <= t) = ``probability``, by bisection of the distribution function.

    Raises:
        ValueError: ``probability`` is not between 0 and 1, or ``degrees`` is below 1.
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"no quantile {probability} of t with {degrees} degrees of freedom")
    if probability < 0.5:
        return -student_t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while _student_t_cdf(high, degrees) < probability and high < 1e12:
        high *= 2
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        if _student_t_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle


def student_t_two_sided(t: float, degrees: float) -> float:
    """P(|T| >= t) for t >= 0; ``degrees`` of freedom need not be whole, infinity is the normal.

    Raises:
        ValueError: ``degrees`` is not positive, or ``t`` is negative.
    """
    if t < 0 or degrees <= 0:
        raise ValueError(f"no tail beyond {t} of t with {degrees} degrees of freedom")
    if degrees > 1e7:
        return math.erfc(t / math.sqrt(2))
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) if t else 1.0


def _student_t_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0, through the regularized incomplete beta function."""
    tail = _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))
    return 1 - tail / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b) by its continued fraction, from the side on which it converges fast."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Lentz's evaluation of the continued fraction of the incomplete beta function."""
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    result = d
    for m in range(1, 500):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + numerator * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + numerator / c
            c = c if abs(c) > tiny else tiny
            result *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return result
