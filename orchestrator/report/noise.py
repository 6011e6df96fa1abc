"""Two guards that keep a comparison from crying at noise. Pure.

Repeats do not show what differs from one process to the next, so the scatter of all jobs' ratios
around their median, beyond what repeats explain, is taken for the noise between runs (at least
``LEAST_NOISE``; ``ASSUMED_NOISE`` with fewer than ``ENOUGH_JOBS``). And many jobs are many chances
of an accident, so significance is Benjamini and Hochberg's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from orchestrator.report.ratio import KNOWN, Rate

#: Relative standard deviation between two runs of a quiet machine; never assumed to be less.
LEAST_NOISE = 0.005
#: With fewer jobs their scatter says little, and this is assumed.
ASSUMED_NOISE = 0.02
ENOUGH_JOBS = 8


def between_runs(pairs: Sequence[tuple[Rate, Rate]]) -> tuple[float, float]:
    """The noise between runs that the jobs' own ratios show, and its degrees of freedom.

    The spread of the logarithms around their median (by the median of absolute deviations, which
    a few real changes do not move), less what repeats explain. A change that all jobs share moves
    the median and is not taken for noise.
    """
    told = [(math.log(b.value / a.value), a.error, b.error) for a, b in pairs]
    known = [(log, a, b) for log, a, b in told if a is not None and b is not None]
    if len(known) < ENOUGH_JOBS:
        return ASSUMED_NOISE, KNOWN
    middle = statistics.median(log for log, _, _ in known)
    spread = 1.4826 * statistics.median(abs(log - middle) for log, _, _ in known)
    within = statistics.median(a**2 + b**2 for _, a, b in known)
    noise = math.sqrt(max(0.0, spread**2 - within))
    # The median of absolute deviations has about 37 % of the normal's efficiency.
    return max(noise, LEAST_NOISE), max(1.0, 0.37 * (len(known) - 1))


def significant(p_values: Sequence[float | None], level: float) -> list[bool]:
    """Benjamini and Hochberg's step-up rule; a comparison without a p-value never is."""
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    last = max(
        (rank for rank, (p, _) in enumerate(order, 1) if p <= level * rank / len(order)), default=0
    )
    chosen = {index for _, index in order[:last]}
    return [index in chosen for index in range(len(p_values))]
