"""Ratio of two speeds with its confidence interval, and significance.

Intervals are Welch's on the logarithm: positive, and mirrored for the inverse. Repeats of one
process do not show how processes, cards and nights differ; ``noise`` is that relative standard
deviation, added when runs are compared. Significance follows Benjamini and Hochberg.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.measurement import Measurement
from workloads.util.statistics import student_t_quantile, student_t_two_sided

#: Degrees of freedom of a spread taken as known.
KNOWN = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A throughput and its relative standard error, None for fewer than two repeats."""

    value: float
    error: float | None
    degrees: int  # of freedom: repeats - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Ratio of two rates; ``low`` and ``high`` are None if a rate has no error."""

    value: float
    low: float | None = None
    high: float | None = None
    log_error: float | None = None  # standard error of the logarithm
    degrees: float = 0.0
    at_least: bool = False  # the first rate is a lower bound: the ratio may be larger
    at_most: bool = False  # the second is one: the ratio may be smaller

    @property
    def decided(self) -> bool:
        """Return whether the interval excludes 1: the rates differ significantly."""
        if self.low is None or self.high is None:
            return False
        return (self.low > 1 and not self.at_most) or (self.high < 1 and not self.at_least)

    @property
    def side(self) -> str:
        """Return ``at least``, ``at most``, ``about`` if both rates are bounds, or ``""``."""
        if self.at_least and self.at_most:
            return "about"
        return "at least" if self.at_least else "at most" if self.at_most else ""

    @property
    def p_value(self) -> float | None:
        """Probability of a ratio at least this far from 1 if both rates were equal."""
        if self.log_error is None:
            return None
        distance = abs(math.log(self.value))
        if self.log_error == 0:
            return 0.0 if distance > 0 else 1.0
        return student_t_two_sided(distance / self.log_error, self.degrees)


def rate_of(row: Measurement) -> Rate | None:
    """Return a row's throughput; None if it is not positive."""
    metrics, value = row.metrics, row.metrics.throughput
    if value is None or not math.isfinite(value) or value <= 0:
        return None
    low, high = metrics.throughput_low, metrics.throughput_high
    degrees = (metrics.processes if metrics.processes > 1 else metrics.repeats) - 1
    if low is None or high is None or degrees < 1 or not math.isfinite(high - low):
        return Rate(value=value, error=None, degrees=0)
    quantile = student_t_quantile((1 + row.measure.confidence) / 2, degrees)
    return Rate(value=value, error=(high - low) / 2 / quantile / value, degrees=degrees)


def ratio_of(
    rate: Rate,
    base: Rate,
    *,
    confidence: float = 0.95,
    noise: float = 0.0,
    noise_degrees: float = KNOWN,
) -> Ratio:
    """Return ``rate`` over ``base`` with its interval. ``noise`` is the standard deviation, beyond
    repeats, of the log ratio of equals."""
    value = rate.value / base.value
    if rate.error is None or base.error is None:
        return Ratio(value=value)
    parts = ((rate.error, rate.degrees), (base.error, base.degrees), (noise, noise_degrees))
    return _with_interval(value, parts, confidence)


def ratio_of_rows(
    row: Measurement, base: Measurement, bounds: Collection[str] = ()
) -> Ratio | None:
    """Return the throughput of a row over the base's; None if either has none. ``bounds`` are job
    ids of rows whose throughput is a lower bound."""
    mine, other = rate_of(row), rate_of(base)
    if not mine or not other:
        return None
    sides = {"at_least": row.job_id in bounds, "at_most": base.job_id in bounds}
    return replace(ratio_of(mine, other), **sides)


def pooled(ratios: Sequence[Ratio]) -> Ratio:
    """Return the geometric mean with its measuring error; raise ValueError if empty."""
    if not ratios:
        raise ValueError("no ratios to pool")
    count = len(ratios)
    value = math.exp(math.fsum(math.log(ratio.value) for ratio in ratios) / count)
    errors = [(r.log_error / count, r.degrees) for r in ratios if r.log_error is not None]
    pool = Ratio(value=value) if len(errors) < count else _with_interval(value, errors, 0.95)
    return replace(
        pool,
        at_least=any(ratio.at_least for ratio in ratios),
        at_most=any(ratio.at_most for ratio in ratios),
    )


def _with_interval(value: float, parts: Sequence[tuple[float, float]], confidence: float) -> Ratio:
    """Return a ratio and its interval, from pairs of log error and degrees of freedom."""
    total = math.fsum(part**2 for part, _ in parts)
    error = math.sqrt(total)
    if total == 0:
        degrees = max(1.0, min(degrees for _, degrees in parts))
    else:  # Satterthwaite's degrees of freedom of a sum of variances
        shares = math.fsum((part**2 / total) ** 2 / degrees for part, degrees in parts)
        degrees = max(1.0, 1 / shares) if shares > 0 else KNOWN
    reach = student_t_quantile((1 + confidence) / 2, max(1, int(min(degrees, 10_000)))) * error
    return Ratio(
        value=value,
        low=value * math.exp(-reach),
        high=value * math.exp(min(reach, 700)),
        log_error=error,
        degrees=degrees,
    )


# ---------------------------------------------------------------- noise, significance

#: Relative standard deviation between runs on a quiet machine; a lower bound.
LEAST_NOISE = 0.005
ASSUMED_NOISE = 0.02
ENOUGH_JOBS = 8


def between_runs(pairs: Sequence[tuple[Rate, Rate]]) -> tuple[float, float]:
    """Return the jobs' noise between runs, and its degrees of freedom. The median absolute
    deviation of log ratios, which real or shared changes hardly move, less what repeats explain."""
    changes = [(math.log(b.value / a.value), a.error, b.error) for a, b in pairs]
    known = [(log, a, b) for log, a, b in changes if a is not None and b is not None]
    if len(known) < ENOUGH_JOBS:
        return ASSUMED_NOISE, KNOWN
    middle = statistics.median(log for log, _, _ in known)
    return excess_scatter([(log - middle, a**2 + b**2) for log, a, b in known])


def excess_scatter(deviations: Sequence[tuple[float, float]], rows: int = 1) -> tuple[float, float]:
    """Return the scatter of one of ``rows`` beyond its error, and its degrees of freedom.
    ``deviations`` are from their middle, each with its squared error."""
    spread = 1.4826 * statistics.median(abs(deviation) for deviation, _ in deviations)
    within = statistics.median(error for _, error in deviations)
    noise = math.sqrt(max(0.0, spread**2 - within) / rows)
    # The median absolute deviation has about 37 % of the efficiency of a normal estimate.
    return max(noise, LEAST_NOISE), max(1.0, 0.37 * (len(deviations) - 1))


def significant(p_values: Sequence[float | None], level: float) -> list[bool]:
    """Apply Benjamini and Hochberg's step-up rule; comparisons without a p-value never pass."""
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    last = max(
        (rank for rank, (p, _) in enumerate(order, 1) if p <= level * rank / len(order)), default=0
    )
    chosen = {index for _, index in order[:last]}
    return [index in chosen for index in range(len(p_values))]
