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


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedInterval(Interval):
    """The interval of a mean over processes, and the two parts of their means' variance."""

    between: float  # standard deviation from process to process, above what repeats explain
    within: float | None  # standard error of one process's mean; None where it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A standard deviation as a share of the mean, and how many values it is known from."""

    deviation: float = 0.0
    values: int = 0

    def half_width(self, confidence: float) -> float:
        """Half of the interval that one more value lies in, as a share; 0 if nothing is known."""
        if self.values < 2:
            return 0.0
        return student_t_quantile((1 + confidence) / 2, self.values - 1) * self.deviation


#: Of runs that do not differ, or of which nothing is known.
ALIKE = Spread()


def nested_interval(
    means: Sequence[float],
    errors: Sequence[float | None],
    confidence: float = 0.95,
    *,
    runs: Spread = ALIKE,
) -> NestedInterval | None:
    """The interval of the mean over processes; None for fewer than two.

    A random-effects model with two levels: repeat j of process i is m + a_i + e_ij. The means of
    processes vary by both parts, var(a) + var(e) / repeats, so Student's t on these means, with one
    degree of freedom less than there are processes, is exact for normal effects and equal numbers
    of repeats, whatever the two parts are (T. Kalibera and R. Jones, Rigorous Benchmarking in
    Reasonable Time, ISMM 2013). More repeats within a process cannot narrow it below what processes
    differ by. Every process counts alike, however many repeats it had.

    What all processes of a run have in common shows in none of them. Where it is known by how much
    runs differ, the two half widths, each with its own t, are added by their squares (MOVER: G. Zou
    and A. Donner, Statistics in Medicine 2008).

    Args:
        means: one for each process.
        errors: the standard error of each mean, from its own repeats; None where it has too few.
        confidence: level of the interval.
        runs: of the speed from run to run.
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


def samples_needed(percent: float, confidence: float = 0.95) -> int:
    """The fewest samples of which the largest exceeds the percentile with this confidence (S. S.
    Wilks, Ann. Math. Statist. 12, 1941): 59 for a 95th percentile at 95 %, 299 for a 99th, 459 for
    a 99th at 99 %.

    Raises:
        ValueError: one of the two is not strictly between nothing and all.
    """
    if not (0 < percent < 100 and 0 < confidence < 1):
        raise ValueError(f"no number of samples for percentile {percent} at level {confidence}")
    return math.ceil(math.log(1 - confidence) / math.log(percent / 100) - 1e-9)


def tail_percentile(
    values: Sequence[float], percent: float, confidence: float = 0.95
) -> float | None:
    """The percentile, or None where the samples are too few to support it."""
    if not values or len(values) < samples_needed(percent, confidence):
        return None
    return percentile(values, percent)


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
