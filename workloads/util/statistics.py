"""Confidence intervals and percentiles of few timings, hence with Student's t."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

_Point = TypeVar("_Point")


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
    """Student-t interval of the mean; None for fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = student_t_quantile((1 + confidence) / 2, count - 1) * math.sqrt(variance / count)
    return Interval(mean=mean, low=mean - half, high=mean + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedInterval(Interval):
    """Interval of a mean over processes, and the two parts of their means' variance."""

    between: float  # standard deviation between processes, beyond what repeats explain
    within: float | None  # standard error of one process's mean; None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Standard deviation as a share of the mean, and the number of values behind it."""

    deviation: float = 0.0
    values: int = 0

    def half_width(self, confidence: float) -> float:
        """Half width of the interval of one more value, as a share; 0 if unknown."""
        if self.values < 2:
            return 0.0
        return student_t_quantile((1 + confidence) / 2, self.values - 1) * self.deviation


#: Runs that do not differ, or whose spread is unknown.
ALIKE = Spread()


def nested_interval(
    means: Sequence[float],
    errors: Sequence[float | None],
    confidence: float = 0.95,
    *,
    runs: Spread = ALIKE,
) -> NestedInterval | None:
    """Interval of the mean over processes, all weighted alike; None for fewer than two.

    Two-level random effects: repeat j of process i is m + a_i + e_ij. Process means vary by var(a)
    + var(e) / repeats, so Student's t on them (processes - 1 degrees of freedom) is exact for
    normal effects and equal numbers of repeats (T. Kalibera and R. Jones, Rigorous Benchmarking in
    Reasonable Time, ISMM 2013). The spread of ``runs``, of speed from run to run, does not show in
    one run; half widths add in squares (MOVER: G. Zou and A. Donner, Statistics in Medicine 2008).
    ``errors`` are the standard errors of the ``means`` from their own repeats, None for too few.
    """
    whole = mean_interval(means, confidence)
    if whole is None:
        return None
    half = math.hypot((whole.high - whole.low) / 2, runs.half_width(confidence) * whole.mean)
    known = [error**2 for error in errors if error is not None]
    within = math.fsum(known) / len(known) if known else None
    variance = math.fsum((mean - whole.mean) ** 2 for mean in means) / (len(means) - 1)
    return NestedInterval(
        mean=whole.mean,
        low=whole.mean - half,
        high=whole.mean + half,
        between=math.sqrt(max(0.0, variance - (within or 0.0))),
        within=None if within is None else math.sqrt(within),
    )


def ratio_interval(
    amounts: Sequence[float], times: Sequence[float], confidence: float = 0.95
) -> Interval | None:
    """Ratio of the sums and its linearised interval, for parts of unequal size, where the mean of
    rates would favour short ones; None for fewer than two parts."""
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


def pareto(
    points: Iterable[_Point], figures: Callable[[_Point], tuple[float, float]]
) -> list[_Point]:
    """Points that no other exceeds in both figures, by falling first figure, of equals one."""
    front: list[_Point] = []
    for point in sorted(points, key=figures, reverse=True):
        if not front or figures(point)[1] > figures(front[-1])[1]:
            front.append(point)
    return front


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile by linear interpolation between order statistics (numpy's default)."""
    if not values:
        return None
    ordered = sorted(values)
    position = percent / 100 * (len(ordered) - 1)
    below = min(math.floor(position), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # Clamp: rounding may leave the two neighbours.
    return min(max(low + (high - low) * (position - below), low), high)


def samples_needed(percent: float, confidence: float = 0.95) -> int:
    """Fewest samples whose largest exceeds the percentile with this confidence, e.g. 59 for a 95th
    percentile at 95 % (S. S. Wilks, Ann. Math. Statist. 12, 1941); ValueError out of range."""
    if not (0 < percent < 100 and 0 < confidence < 1):
        raise ValueError(f"no number of samples for percentile {percent} at level {confidence}")
    return math.ceil(math.log(1 - confidence) / math.log(percent / 100) - 1e-9)


def tail_percentile(
    values: Sequence[float], percent: float, confidence: float = 0.95
) -> float | None:
    """The percentile; None if there are too few samples to support it."""
    if not values or len(values) < samples_needed(percent, confidence):
        return None
    return percentile(values, percent)


@lru_cache(maxsize=1024)
def student_t_quantile(probability: float, degrees: int) -> float:
    """The t with P(T <= t) = ``probability``, by bisection; ValueError for a probability not
    between 0 and 1, or less than one degree of freedom."""
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
    """P(|T| >= t) for t >= 0, else ValueError; fractional or infinite (normal) ``degrees``, too."""
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
    """I_x(a, b) by its continued fraction, from the side that converges fast."""
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
