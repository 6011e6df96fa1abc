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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from workloads.base import Collective, JobContext, Request, Result, WarmupEnd
from workloads.steadiness import settled


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
    found = []
    steps = [*enumerate(zip(*shapes, strict=True))]
    largest = [max(of_ranks) for of_ranks in zip(*sizes, strict=True)]
    if largest:
        steps.insert(0, steps[largest.index(max(largest))])
    for number, of_ranks in steps:
        if any(shape not in known for shape, known in zip(of_ranks, met, strict=True)):
            found.append(number)
            for shape, known in zip(of_ranks, met, strict=True):
                known.add(shape)
    return found


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
