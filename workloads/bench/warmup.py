"""Warm-up: what must be paid before timing starts, and ends when it is paid, not after a time.

The first meeting of a shape may cost seconds: kernels are chosen, graphs compiled and captured,
memory is taken. So every shape of the timed part is met before it. Where a repeat is a pass over
all batches, the untimed repeats do that. Where each repeat is an optimizer step on another batch,
every shape is *rehearsed*: the step's work, of which nothing remains, so that what is learned hangs
on no clock; then one shape is rehearsed until it has stopped becoming faster. The largest comes
first: a job that does not fit fails at once, and in the blocks of memory that were taken for it all
later steps find room, where blocks that grow from step to step leave holes.

Only ``warmup_limit_s`` cuts a warm-up short, and then the row says so. On a card that compiles each
new shape not even that leaves one out: its compilation would stand in the timed part.
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

# Steadiness of a series of timed steps: a pure decision on their times, shapes and tokens.
#
# A *step* is what is timed as one: a repeat of generation, an optimizer step of training. Steps of
# one shape do equal work, so their times compare; where most shapes came only once, times per token
# do. Noise is no drift: warm-up is not over where the *beginning* of a series is slower than all
# that follows, and a series drifts where one half is slower than the other. A single outlier later
# on, or times that jump between two values, are neither: more warm-up would not end them.

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
    negative where steps become slower; None where there are too few, or where a clock
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupPlan:
    """The shapes that a job's warm-up has to meet, and the way to meet them."""

    #: Of the batches of a repeat; where there is a rehearsal, of the timed steps.
    shapes: Sequence[Hashable] = ()
    #: Positions of the largest part of each, where there is a rehearsal: the largest is met first.
    sizes: Sequence[int] = ()
    passes: int = 0  # untimed repeats that the engine needs at least
    first: int = 0  # number of the first repeat, where others went before in another attempt
    #: Does the work of a timed step, by its position in ``shapes``; nothing of it remains.
    rehearse: Callable[[int], object] | None = None
    #: Whether a new shape is compiled: then each is met before timing, whatever the limit.
    compiled: bool = False
    #: Whether timing may begin anew; not where a repeat changes what the next one does.
    restarts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmth:
    """The cost of a warm-up, and what it left; the same names as in ``api.Result``."""

    warmup_s: float = 0.0
    warmup_steps: int | None = None
    warmup_end: WarmupEnd | None = None
    shapes: int | None = None
    shapes_unmet: int | None = None
    timed_parts: int = 1
    timed_compilations: int | None = None
    timed_cpu_fallbacks: int | None = None


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """The rehearsals of one rank."""

    steps: int
    met: frozenset[Hashable]
    cut: bool  # the time ran out


def to_rehearse(
    shapes: Sequence[Sequence[Hashable]], sizes: Sequence[Sequence[int]] = ()
) -> list[int]:
    """The steps at which some rank meets a new shape, from the shapes of each rank and their sizes:
    the largest step of any rank, then the others as they come."""
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
) -> Rehearsed:
    """Meet every shape once, and the last of them until it settles.

    All ranks rehearse the same steps, since parts of a step may be done together.
    """
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
    return Rehearsed(steps, frozenset(met), late and not whole)


def repeated_if_compiled(
    once: Callable[[], Result], request: Request, context: JobContext
) -> Result:
    """The result of a job that runs ``once``, and a second time from its beginning where its timed
    part compiled something: what was compiled is there then. The first time counts as warm-up.

    For what learns, since timing more steps would be another job.
    """
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
