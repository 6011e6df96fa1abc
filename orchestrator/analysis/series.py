"""Tests of a series for a trend over time and for two humps, both of which spoil a mean.

The trend is tested by Mann and Kendall (H. B. Mann, Econometrica 13, 1945) and measured by Theil
and Sen's slope; both resist outliers. Two humps are tested on logarithms by SigClust's cluster
index (Y. Liu, D. N. Hayes, A. Nobel, J. S. Marron, JASA 103, 2008). Each group needs three in ten
samples, so that a few slow ones are no hump, and the groups must be apart by the measure of K. M.
Ashman, C. M. Bird and S. E. Zepf (Astron. J. 108, 1994), unlike the halves of one skewed hump.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from workloads.bench.warmup import mann_kendall_score

#: Level of both tests; strict, as a night has hundreds of rows.
LEVEL = 0.01
#: Fewest samples for either test.
LEAST_SAMPLES = 10

_LEAST_SHARE = 0.3
_LEAST_APART = 4.0  # Ashman's D; the halves of one normal distribution have 2.6
_MOST_PAIRED = 200  # longer series are averaged down to this many before pairs are compared
#: Critical cluster index at 1 % by sample size (simulated, 40,000 samples each;
#: ``tests/analysis/test_series.py`` checks the rate of false alarms).
_CRITICAL = (
    *((10, 0.092), (12, 0.118), (15, 0.143), (20, 0.169), (30, 0.206), (50, 0.243), (100, 0.279)),
    *((200, 0.305), (500, 0.328), (1000, 0.338), (3000, 0.349)),
)


def slope_of(values: Sequence[float]) -> float:
    """Return Theil and Sen's slope: the median change per step over all pairs of values."""
    some = _averaged(values)
    slopes = [
        (later - earlier) / (j - i)
        for i, earlier in enumerate(some)
        for j, later in enumerate(some[i + 1 :], i + 1)
    ]
    return statistics.median(slopes) * len(some) / len(values)


def _averaged(values: Sequence[float]) -> Sequence[float]:
    """Return means of neighbours, at most ``_MOST_PAIRED``."""
    together = math.ceil(len(values) / _MOST_PAIRED)
    if together == 1:
        return values
    starts = range(0, len(values) - together + 1, together)
    return [statistics.fmean(values[start : start + together]) for start in starts]


def mann_kendall(values: Sequence[float]) -> float:
    """Return the two-sided p-value of a monotone trend (normal approximation, with ties)."""
    score, variance = mann_kendall_score(_averaged(values))
    if variance <= 0 or score == 0:
        return 1.0
    distance = (abs(score) - 1) / math.sqrt(variance)
    return math.erfc(distance / math.sqrt(2))


def hump_ratio_of(speeds: Sequence[float]) -> float | None:
    """Return the faster hump's speed over the slower's; 1 for one hump, None if not testable."""
    count = len(speeds)
    if count < LEAST_SAMPLES or min(speeds) <= 0:
        return None
    index, at, ordered = cluster_index([math.log(speed) for speed in speeds])
    if index >= critical_index(count):
        return 1.0
    slow, fast = ordered[:at], ordered[at:]
    apart = statistics.fmean(fast) - statistics.fmean(slow)
    spread = math.sqrt(statistics.variance(slow) + statistics.variance(fast))
    return math.exp(apart) if math.sqrt(2) * apart > _LEAST_APART * spread else 1.0


def cluster_index(values: Sequence[float]) -> tuple[float, int, list[float]]:
    """Return the least share of variance within two groups, the split, and the sorted values."""
    ordered = sorted(values)
    count = len(ordered)
    middle = statistics.fmean(ordered)
    centred = [value - middle for value in ordered]
    whole = math.fsum(value * value for value in centred)
    least = max(3, math.ceil(_LEAST_SHARE * count))
    if whole <= 1e-18 * count * max(1.0, middle * middle) or 2 * least > count:
        return 1.0, count // 2, ordered
    best, place, below = 0.0, count // 2, 0.0
    for at, value in enumerate(centred, 1):
        below += value
        if least <= at <= count - least:
            # The variance between two groups whose means are this far apart.
            between = below * below * count / (at * (count - at))
            if between > best:
                best, place = between, at
    return 1 - best / whole, place, ordered


def critical_index(count: int) -> float:
    """Return the cluster index below which a sample of this size has two humps at ``LEVEL``."""
    sizes = [size for size, _ in _CRITICAL]
    if count >= sizes[-1]:
        return _CRITICAL[-1][1]
    above = next(i for i, size in enumerate(sizes) if size > count)
    (small, low), (large, high) = _CRITICAL[above - 1], _CRITICAL[above]
    # Linear in 1/sqrt(size), like sampling errors.
    share = (small**-0.5 - count**-0.5) / (small**-0.5 - large**-0.5)
    return low + share * (high - low)
