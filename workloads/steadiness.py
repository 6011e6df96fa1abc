"""Steadiness of a series of timed steps: a pure decision on their times, shapes and tokens.

A *step* is what is timed as one: a repeat of generation, an optimizer step of training. Steps of
one shape do equal work, so their times compare; where most shapes came only once, times per token
do. Noise is no drift: warm-up is not over where the *beginning* of a series is slower than all
that follows, and a series drifts where one half is slower than the other. A single outlier later
on, or times that jump between two values, are neither: more warm-up would not end them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

#: Steps that a verdict needs at least.
LEAST_STEPS = 3
#: A beginning matters where it makes the whole series slower by more than this share.
TOLERANCE = 0.05
#: Two meetings of one shape agree where the later is faster by no more than this share.
_AGREEMENT = 0.1
#: Standard deviations of Mann and Kendall's statistic beyond which times fall or rise; six steps
#: can reach it.
_SIGNIFICANT = 2.5
#: Times that are compared, each with each; a longer series is one of stretches.
_MOST_TIMES = 128


@dataclass(frozen=True, slots=True)
class Step:
    """One timed step."""

    shape: Hashable
    seconds: float
    tokens: float  # positions that were worked on


def drift(steps: Sequence[Step]) -> float | None:
    """The share by which a slow beginning makes the whole series slower; 0 where it is steady,
    negative where steps become slower; None where there are too few to tell, or where a clock
    that is too coarse has given some no time."""
    times = _relative(steps) if len(steps) >= LEAST_STEPS else ()
    if len(times) < LEAST_STEPS or not all(0.0 < time < math.inf for time in times):
        return None
    return _late_start(times) or _trend(times)


def settled(seconds: Sequence[float]) -> bool:
    """Return whether the meetings of one shape, in order, have stopped becoming faster."""
    return len(seconds) >= 2 and seconds[-1] >= (1 - _AGREEMENT) * seconds[-2]


def _relative(steps: Sequence[Step]) -> list[float]:
    """Each step's time over the time that is usual for its work, 1 being usual; of long series
    the means of stretches."""
    of_shape: dict[Hashable, list[float]] = {}
    for step in steps:
        of_shape.setdefault(step.shape, []).append(step.seconds)
    usually = {shape: median(times) for shape, times in of_shape.items() if len(times) > 1}
    if 2 * sum(len(of_shape[shape]) for shape in usually) <= len(steps):
        rates = [step.seconds / max(step.tokens, 1.0) for step in steps]
        usual = median(rates) if rates else 0.0
        times = [_ratio(rate, usual) for rate in rates]
    else:
        times = [_ratio(s.seconds, usually[s.shape]) for s in steps if s.shape in usually]
    stretch = -(-len(times) // _MOST_TIMES)
    return [fmean(times[at : at + stretch]) for at in range(0, len(times), max(stretch, 1))]


def _ratio(time: float, usual: float) -> float:
    return time / usual if usual else math.inf


def _late_start(times: Sequence[float]) -> float:
    """The largest share of the whole that some beginning, of at most half of the steps, costs
    beyond what the rest takes; 0 where none stands out.

    A beginning stands out where even its fastest step is slower than the rest, by more than the
    rest spreads and by more than the tolerance; the slowest fifth of the rest may be outliers.
    """
    found = 0.0
    for count in range(1, len(times) // 2 + 1):
        rest = sorted(times[count:])
        upper = rest[-1 - len(rest) // 5]
        usual = median(rest)
        beyond = min(times[:count]) - upper
        if beyond <= max(upper - rest[0], TOLERANCE * usual):
            continue
        excess = sum(time - usual for time in times[:count]) / (len(times) * usual)
        found = max(found, excess)
    return found if found > TOLERANCE else 0.0


def _trend(times: Sequence[float]) -> float:
    """The share by which the first half makes the whole slower than the second, signed; 0 where
    times neither fall nor rise (Mann-Kendall)."""
    half = len(times) // 2
    rises, variance = mann_kendall_score(times)
    if abs(rises) <= _SIGNIFICANT * math.sqrt(variance):
        return 0.0
    share = (median(times[:half]) / median(times[-half:]) - 1) / 2
    return share if abs(share) > TOLERANCE and (share > 0) == (rises < 0) else 0.0


def mann_kendall_score(values: Sequence[float]) -> tuple[int, float]:
    """The rising pairs of a series less the falling ones, and the variance that this has where the
    order is by chance (H. B. Mann, Econometrica 13, 1945); equal values narrow it."""
    count = len(values)
    score = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    variance = _pairs_weight(count) - sum(map(_pairs_weight, Counter(values).values()))
    return score, variance / 18


def _pairs_weight(count: int) -> int:
    return count * (count - 1) * (2 * count + 5)
