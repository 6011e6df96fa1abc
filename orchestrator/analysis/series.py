"""Tests of whether a series is of one kind: a trend over time, and two humps. Pure.

The mean and its interval describe values that scatter around one. Two things spoil that and are
found here: speed that drifts over the night (a rack that heats up, a host that fills), and speed
that jumps between two values (two clock states, a neighbour that comes and goes). Whether a row's
own repeats are steady is decided in ``workloads/bench/warmup.py``.

The trend is tested by Mann and Kendall (H. B. Mann, Econometrica 13, 1945) and measured by Theil
and Sen's slope, neither of which an outlier moves. Two humps are tested by the cluster index of
SigClust (Y. Liu, D. N. Hayes, A. Nobel, J. S. Marron, JASA 103, 2008) in one dimension: the share
of the variance that is left within the best two groups, held against what a single normal
distribution gives. Logarithms are tested, since times are skewed to the right. Three in ten samples
at least are in each group, so that a few slow ones are no hump; and the groups lie apart by the
measure of K. M. Ashman, C. M. Bird and S. E. Zepf (Astron. J. 108, 1994), which the two halves of
one skewed hump do not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from workloads.bench.warmup import mann_kendall_score

#: Level of both tests. A night has hundreds of rows, so it is strict.
LEVEL = 0.01
#: Samples below which neither test says anything.
LEAST_SAMPLES = 10

_LEAST_SHARE = 0.3
_LEAST_APART = 4.0  # Ashman's D; the halves of one normal distribution have 2.6
_MOST_PAIRED = 200  # samples whose pairs are looked at; longer series are averaged in their order
#: The cluster index that one normal sample in a hundred is below, by size of the sample (simulated,
#: 40,000 samples each; ``tests/analysis/test_series.py`` holds the rate of false alarms).
_CRITICAL = (
    *((10, 0.092), (12, 0.118), (15, 0.143), (20, 0.169), (30, 0.206), (50, 0.243), (100, 0.279)),
    *((200, 0.305), (500, 0.328), (1000, 0.338), (3000, 0.349)),
)


def slope_of(values: Sequence[float]) -> float:
    """Theil and Sen's slope: the median change from a value to a later one, for each step."""
    some = _averaged(values)
    slopes = [
        (later - earlier) / (j - i)
        for i, earlier in enumerate(some)
        for j, later in enumerate(some[i + 1 :], i + 1)
    ]
    return statistics.median(slopes) * len(some) / len(values)


def _averaged(values: Sequence[float]) -> Sequence[float]:
    """The means of neighbours, so many together that few enough are left."""
    together = math.ceil(len(values) / _MOST_PAIRED)
    if together == 1:
        return values
    starts = range(0, len(values) - together + 1, together)
    return [statistics.fmean(values[start : start + together]) for start in starts]


def mann_kendall(values: Sequence[float]) -> float:
    """The two-sided p-value of a monotone trend (normal approximation, with ties)."""
    score, variance = mann_kendall_score(_averaged(values))
    if variance <= 0 or score == 0:
        return 1.0
    distance = (abs(score) - 1) / math.sqrt(variance)
    return math.erfc(distance / math.sqrt(2))


def hump_ratio_of(speeds: Sequence[float]) -> float | None:
    """The faster hump's speed over the slower's, 1 where one hump explains the samples; None for
    fewer than ``LEAST_SAMPLES``, or where a speed is not positive."""
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
    """The variance within the best two groups over the whole variance; the place of the split in
    the sorted values; and these."""
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
            # With means apart by so much, this is the variance between the two groups.
            between = below * below * count / (at * (count - at))
            if between > best:
                best, place = between, at
    return 1 - best / whole, place, ordered


def critical_index(count: int) -> float:
    """The cluster index below which a sample of this size has two humps at ``LEVEL``."""
    sizes = [size for size, _ in _CRITICAL]
    if count >= sizes[-1]:
        return _CRITICAL[-1][1]
    above = next(i for i, size in enumerate(sizes) if size > count)
    (small, low), (large, high) = _CRITICAL[above - 1], _CRITICAL[above]
    # Linear in one over the root of the size, as sampling errors are.
    share = (small**-0.5 - count**-0.5) / (small**-0.5 - large**-0.5)
    return low + share * (high - low)
