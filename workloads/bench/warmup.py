"""Warm-up: run every shape before timing starts, until steps stop getting faster.

Untimed repeats cover all batches; in training, shapes are *rehearsed*: the step's work is done and
undone, so that learning does not depend on the clock. The largest shape comes first, so that jobs
that do not fit fail at once and memory does not fragment. ``warmup_limit_s`` cuts warm-up short,
except on cards that compile each shape, since compilation would otherwise be timed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from workloads.base import Collective, JobContext, Request, Result, WarmupEnd

# Steadiness of a series of timed steps: a repeat of generation, or an optimizer step. Times of one
# shape are compared, or times per token where most shapes came only once. Warm-up is not over where
# the *beginning* is slower than all that follows, or one half slower than the other. Outliers and
# times that jump between two values are ignored: more warm-up would not end them.

LEAST_STEPS = 3  # fewest steps that can be judged
TOLERANCE = 0.05  # a slow beginning counts if it slows the series by more than this share
_AGREEMENT = 0.1  # a shape has settled if its next run is faster by no more than this share
_SIGNIFICANT = 2.5  # Mann-Kendall threshold in standard deviations; six steps can reach it
_MOST_TIMES = 128  # compared pairwise; longer series are averaged in stretches


@dataclass(frozen=True, slots=True)
class Step:
    """One timed step."""

    shape: Hashable
    seconds: float
    tokens: float  # positions that were worked on


def drift(steps: Sequence[Step]) -> float | None:
    """Share by which a slow beginning slows the series: 0 if steady, negative if steps get slower;
    None for too few steps, or times of 0 from a coarse clock."""
    times = _relative(steps) if len(steps) >= LEAST_STEPS else ()
    if len(times) < LEAST_STEPS or not all(0.0 < time < math.inf for time in times):
        return None
    return _late_start(times) or _trend(times)


def settled(seconds: Sequence[float]) -> bool:
    """Return whether runs of one shape, in order, have stopped getting faster."""
    return len(seconds) >= 2 and seconds[-1] >= (1 - _AGREEMENT) * seconds[-2]


def _relative(steps: Sequence[Step]) -> list[float]:
    """Times over the median for the same work; means of stretches for long series."""
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
    """Largest share that a slow beginning (at most half) costs, or 0. Its fastest step must exceed
    the rest, without their slowest fifth, by more than their spread and the tolerance."""
    largest = 0.0
    for count in range(1, len(times) // 2 + 1):
        rest = sorted(times[count:])
        upper = rest[-1 - len(rest) // 5]
        usual = median(rest)
        beyond = min(times[:count]) - upper
        if beyond <= max(upper - rest[0], TOLERANCE * usual):
            continue
        excess = sum(time - usual for time in times[:count]) / (len(times) * usual)
        largest = max(largest, excess)
    return largest if largest > TOLERANCE else 0.0


def _trend(times: Sequence[float]) -> float:
    """Signed share by which the first half slows the whole; 0 without a Mann-Kendall trend."""
    half = len(times) // 2
    rises, variance = mann_kendall_score(times)
    if abs(rises) <= _SIGNIFICANT * math.sqrt(variance):
        return 0.0
    share = (median(times[:half]) / median(times[-half:]) - 1) / 2
    return share if abs(share) > TOLERANCE and (share > 0) == (rises < 0) else 0.0


def mann_kendall_score(values: Sequence[float]) -> tuple[int, float]:
    """Rising pairs less falling ones, and the variance of that under random order, corrected for
    ties (H. B. Mann, Econometrica 13, 1945)."""
    count = len(values)
    score = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    variance = _pairs_weight(count) - sum(map(_pairs_weight, Counter(values).values()))
    return score, variance / 18


def _pairs_weight(count: int) -> int:
    return count * (count - 1) * (2 * count + 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupPlan:
    """The shapes that warm-up must run, and how."""

    shapes: Sequence[Hashable] = ()  # of the batches of a repeat, or of the rehearsed steps
    sizes: Sequence[int] = ()  # positions of each rehearsed step's largest part; largest goes first
    passes: int = 0  # untimed repeats that the engine needs at least
    first: int = 0  # number of the first repeat, after those of an earlier attempt
    #: Does and undoes the work of a timed step, by its position in ``shapes``.
    rehearse: Callable[[int], object] | None = None
    compiled: bool = False  # each new shape is compiled, so all run before timing
    restarts: bool = True  # timing may start again; not if a repeat changes the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmth:
    """Cost and outcome of a warm-up; the same names as in ``api.Result``."""

    warmup_s: float = 0.0
    warmup_steps: int | None = None
    warmup_end: WarmupEnd | None = None
    shapes: int | None = None
    shapes_unmet: int | None = None
    timed_parts: int = 1
    timed_compilations: int | None = None
    timed_cpu_fallbacks: int | None = None


def to_rehearse(
    shapes: Sequence[Sequence[Hashable]], sizes: Sequence[Sequence[int]] = ()
) -> list[int]:
    """Steps with a new shape on some rank, the largest step first; arguments are by rank."""
    met: list[set[Hashable]] = [set() for _ in shapes]
    numbers = []
    steps = [*enumerate(zip(*shapes, strict=True))]
    largest = [max(of_ranks) for of_ranks in zip(*sizes, strict=True)]
    if largest:
        steps.insert(0, steps[largest.index(max(largest))])
    for number, of_ranks in steps:
        if any(shape not in known for shape, known in zip(of_ranks, met, strict=True)):
            numbers.append(number)
            for shape, known in zip(of_ranks, met, strict=True):
                known.add(shape)
    return numbers


def rehearse(
    plan: WarmupPlan, clock: Callable[[], float], deadline: float, collective: Collective
) -> tuple[int, frozenset[Hashable], bool]:
    """Run every shape once and the last until it settles, the same steps on all ranks. Returns the
    number of steps, the shapes met, and whether time ran out."""
    assert plan.rehearse is not None
    met: set[Hashable] = set()
    steps = 0

    def once(number: int) -> tuple[float, bool]:
        """Seconds of the slowest rank, and whether any rank's time is up."""
        nonlocal steps
        began = clock()
        plan.rehearse(number)  # type: ignore[misc]
        steps += 1
        met.add(plan.shapes[number])
        seconds, late = zip(*collective.gather((clock() - began, clock() >= deadline)), strict=True)
        return max(seconds), any(late)

    ranks = collective.gather((tuple(plan.shapes), tuple(plan.sizes)))
    numbers = to_rehearse([shapes for shapes, _ in ranks], [sizes for _, sizes in ranks])
    late, seconds = False, [0.0]
    for number in numbers:
        if late and not plan.compiled:
            break
        took, late = once(number)
        seconds = [took]
    while numbers and not late and not settled(seconds):
        took, late = once(numbers[-1])
        seconds.append(took)
    whole = met >= {*plan.shapes} and settled(seconds)
    return steps, frozenset(met), late and not whole


def repeated_if_compiled(
    once: Callable[[], Result], request: Request, context: JobContext
) -> Result:
    """Run a training job; if its timed part compiled something, run it again from its beginning
    and count the first run as warm-up (timing more steps would be another job)."""
    began = context.clock()
    first = once()
    compiled = bool(first.timed_compilations and request.measure.warmup)
    if not any(context.collective.gather(compiled)):
        return first
    spent_s = context.clock() - began
    second = once()
    timed = sum(not sample.warmup for sample in first.samples)
    return dataclasses.replace(
        second,
        timed_parts=2,
        warmup_s=spent_s + second.warmup_s,
        warmup_steps=timed + (first.warmup_steps or 0) + (second.warmup_steps or 0),
    )
