"""Lengths of a dataset in tokens: their distribution, and a small sample that covers them.

Length determines a benchmark's cost: the prompt's the time to first token, the answer's the number
of decoding steps. So samples are drawn at equal distance in the order of total length. Lengths are
those of the texts alone, without the prompt layout.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.base import DataMissing
from workloads.data.datasets import load_examples
from workloads.data.embedded import synthetic_examples
from workloads.data.records import ADVERTISEGEN_FILES
from workloads.data.shapes import Example, write_json_lines
from workloads.util.statistics import percentile

_BATCH = 2000  # texts per tokenizer call, which fast ones spread over cores
_PERCENTS = {"min": 0, "p5": 5, "p25": 25, "median": 50, "p75": 75, "p95": 95, "max": 100}
_MOST_BINS = 12


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
    """Count tokens of every example's input and output, in order."""
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
    """Return the distribution in at most 12 equal bins of round width; empty input: ValueError."""
    if not lengths:
        raise ValueError("no lengths")
    ordered = sorted(lengths)
    low, high = ordered[0], ordered[-1]
    # The first bin starts at a multiple of the width, possibly below the shortest.
    widths = (step * 10**power for power in itertools.count() for step in (1, 2, 5))
    width = next(w for w in widths if high // w - low // w < _MOST_BINS)
    counts = Counter(length // width for length in ordered)
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        percentiles={name: percentile(ordered, p) or 0.0 for name, p in _PERCENTS.items()},
        bins=tuple(
            Bin(low=number * width, high=(number + 1) * width, count=counts[number])
            for number in range(low // width, high // width + 1)
        ),
    )


def sample_by_length(
    examples: Sequence[Example], lengths: Sequence[Lengths], count: int
) -> list[Example]:
    """Return ``count`` examples (or all) at equal distance in the order of total length.

    Both ends are included, a ``count`` of 1 takes the middle one. Ties: by input length, position.
    """
    order = sorted(range(len(examples)), key=lambda i: (lengths[i].total, lengths[i].input, i))
    return [examples[order[position]] for position in equal_distance(len(order), count)]


def equal_distance(size: int, count: int) -> list[int]:
    """Return ``count`` different positions in ``range(size)`` at equal distance, ends included."""
    if count >= size:
        return list(range(size))
    if count == 1:
        return [(size - 1) // 2]
    # Integer rounding of i * (size - 1) / (count - 1).
    return [(2 * i * (size - 1) + count - 1) // (2 * (count - 1)) for i in range(count)]


# AdvertiseGen: Chinese advertisements from product attributes; 114,599 + 1,070 examples, as JSON
# lines of ``content`` and ``summary`` in ``train.json`` and ``dev.json``.

#: One example in this many goes to a synthetic ``dev.json``, about as in the real set.
_DEV_SHARE = 108


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Contents of a directory: examples per file, and their lengths in tokens."""

    counts: dict[str, int]  # by file name
    synthetic: bool
    input: Distribution
    output: Distribution
    total: Distribution


def read_directory(directory: Path) -> dict[str, list[Example]]:
    """Return examples of ``train.json`` and ``dev.json`` by file name; raises DataMissing."""
    missing = [name for name in ADVERTISEGEN_FILES if not (directory / name).is_file()]
    if missing:
        raise DataMissing(
            f"{directory} has no {' and no '.join(missing)}; an AdvertiseGen directory holds "
            f"{' and '.join(ADVERTISEGEN_FILES)}. To try one: nightgrid dataset synthetic DIR"
        )
    return {name: load_examples(str(directory / name)) for name in ADVERTISEGEN_FILES}


def describe(files: dict[str, list[Example]], lengths: Sequence[Lengths]) -> Description:
    """Return counts and length distributions; ``lengths`` are in the files' order."""
    return Description(
        counts={name: len(examples) for name, examples in files.items()},
        synthetic=any(example.synthetic for examples in files.values() for example in examples),
        input=distribution([length.input for length in lengths]),
        output=distribution([length.output for length in lengths]),
        total=distribution([length.total for length in lengths]),
    )


def write_synthetic(directory: Path, count: int) -> dict[str, int]:
    """Write a synthetic ``train.json`` and ``dev.json``; return the examples in each."""
    examples = synthetic_examples(count)
    dev = max(1, count // _DEV_SHARE)
    parts = {"train.json": examples[: count - dev], "dev.json": examples[count - dev :]}
    for name, part in parts.items():
        write_json_lines(directory / name, part)
    return {name: len(part) for name, part in parts.items()}
