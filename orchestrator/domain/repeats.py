"""Repeats of an attempt: raw samples grouped by repeat, and what each adds up to. Pure.

The sums of a repeat are those of all ranks together; its time is that of the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from workloads.api import Sample

#: A sample with the rank that measured it.
Ranked = tuple[int, Sample]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over some samples, such as those of one repeat, all ranks together."""

    wall_s: float  # of the slowest rank
    items: int
    input_tokens: int
    output_tokens: int
    computed_tokens: int


def repeats_of(timed: Iterable[Ranked]) -> dict[int, list[Ranked]]:
    """The samples of each repeat, by repeat in order."""
    repeats: dict[int, list[Ranked]] = {}
    for pair in timed:
        repeats.setdefault(pair[1].repeat, []).append(pair)
    return dict(sorted(repeats.items())) if len(repeats) > 1 else repeats


def complete_of(repeats: Mapping[int, Sequence[Ranked]]) -> dict[int, Sequence[Ranked]]:
    """Those of an attempt's repeats that every rank finished."""
    ranks = {rank for pairs in repeats.values() for rank, _ in pairs}
    return {
        number: pairs
        for number, pairs in repeats.items()
        if all(sample.complete for _, sample in pairs) and {rank for rank, _ in pairs} == ranks
    }


def timed_repeats(samples: Iterable[Ranked]) -> dict[int, Sequence[Ranked]]:
    """The timed repeats that every rank finished."""
    return complete_of(repeats_of([pair for pair in samples if not pair[1].warmup]))


def totals_of(pairs: Iterable[Ranked]) -> Totals:
    """Add samples up."""
    walls: dict[int, list[float]] = {}
    items = input_tokens = output_tokens = computed_tokens = 0
    for rank, sample in pairs:
        walls.setdefault(rank, []).append(sample.wall_s)
        items += sample.items
        input_tokens += sample.input_tokens
        output_tokens += sample.output_tokens
        computed_tokens += sample.computed_tokens
    return Totals(
        wall_s=max((math.fsum(values) for values in walls.values()), default=0.0),
        items=items,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        computed_tokens=computed_tokens,
    )


def sum_of(totals: Iterable[Totals]) -> Totals:
    """Several repeats one after the other."""
    each = list(totals)
    return Totals(
        wall_s=math.fsum(total.wall_s for total in each),
        items=sum(total.items for total in each),
        input_tokens=sum(total.input_tokens for total in each),
        output_tokens=sum(total.output_tokens for total in each),
        computed_tokens=sum(total.computed_tokens for total in each),
    )
