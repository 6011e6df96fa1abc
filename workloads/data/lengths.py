"""Lengths of a dataset in tokens: their distribution, and a small sample that covers them.

Length is what a benchmark's cost depends on: the prompt's for the time to first token, the
answer's for the number of decoding steps. So a small set that stands for a big one is drawn by
length: sort by total length, then take examples at equal distance, from the shortest to the
longest. Lengths are those of the texts alone, without the prompt layout a model wraps them in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workloads.confidence import percentile
from workloads.data.examples import Example

_BATCH = 2000  # texts handed to the tokenizer at once; a fast one spreads them over cores
_PERCENTS = {"min": 0, "p5": 5, "p25": 25, "median": 50, "p75": 75, "p95": 95, "max": 100}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of one example."""

    input: int
    output: int

    @property
    def total(self) -> int:
        """Input and output together."""
        return self.input + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Number of lengths in ``[low, high)``; the last bin includes ``high``."""

    low: int
    high: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Length in tokens over a dataset. ``percentiles`` has the keys min, p5, …, p95, max."""

    count: int
    mean: float
    percentiles: dict[str, float]
    bins: tuple[Bin, ...]


def token_lengths(examples: Sequence[Example], tokenizer: Any) -> list[Lengths]:
    """Tokens of every example's input and output, in order."""
    given = ["".join([*(t.text for t in e.earlier), e.content]) for e in examples]
    inputs = _count(tokenizer, given)
    outputs = _count(tokenizer, [example.summary for example in examples])
    return [Lengths(input=i, output=o) for i, o in zip(inputs, outputs, strict=True)]


def _count(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    counts: list[int] = []
    for start in range(0, len(texts), _BATCH):
        encoded = tokenizer(
            list(texts[start : start + _BATCH]),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        counts += [len(ids) for ids in encoded["input_ids"]]
    return counts


def distribution(lengths: Sequence[int]) -> Distribution:
    """The distribution of these lengths, in at most 12 equal bins of round width.

    Raises:
        ValueError: there are no lengths.
    """
    if not lengths:
        raise ValueError("no lengths")
    ordered = sorted(lengths)
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        percentiles={name: percentile(ordered, p) or 0.0 for name, p in _PERCENTS.items()},
        bins=_bins(ordered, 12),
    )


def _bins(ordered: Sequence[int], wanted: int) -> tuple[Bin, ...]:
    low, high = ordered[0], ordered[-1]
    width = _round_up(max(1, math.ceil((high - low + 1) / wanted)))
    if high // width - low // width >= wanted:  # the first begins below the shortest
        width = _round_up(width + 1)
    start = low - low % width
    counts = [0] * ((high - start) // width + 1)
    for length in ordered:
        counts[(length - start) // width] += 1
    return tuple(
        Bin(low=start + i * width, high=start + (i + 1) * width, count=count)
        for i, count in enumerate(counts)
    )


def _round_up(width: int) -> int:
    """The next of 1, 2, 5, 10, 20, 50, …"""
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale >= width:
                return step * scale
        scale *= 10


def sample_by_length(
    examples: Sequence[Example], lengths: Sequence[Lengths], count: int
) -> list[Example]:
    """``count`` examples at equal distance in the order of total length, first and last included.

    Equal totals are ordered by input length, then by position, so the sample is the same each
    time. All examples, sorted, when there are no more than ``count``; the middle one for 1.
    """
    order = sorted(
        range(len(examples)), key=lambda index: (lengths[index].total, lengths[index].input, index)
    )
    return [examples[order[position]] for position in equal_distance(len(order), count)]


def equal_distance(size: int, count: int) -> list[int]:
    """``count`` different positions in ``range(size)`` at equal distance, both ends included."""
    if count >= size:
        return list(range(size))
    if count < 1:
        return []
    if count == 1:
        return [(size - 1) // 2]
    # Rounded in integers: position i lies at i * (size - 1) / (count - 1).
    return [(2 * i * (size - 1) + count - 1) // (2 * (count - 1)) for i in range(count)]
