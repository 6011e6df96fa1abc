"""AdvertiseGen: Chinese advertisements written from product attributes; 114,599 + 1,070 examples.

Its directory has ``train.json`` and ``dev.json``, JSON lines of ``content`` and ``summary``. For
benchmarks it is described by its lengths and reduced to a ``tiny.json`` of a hundred examples
that cover them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.base import DataMissing
from workloads.data.catalog import ADVERTISEGEN_FILES, load_examples
from workloads.data.examples import Example, write_json_lines
from workloads.data.lengths import Distribution, Lengths, distribution, sample_by_length
from workloads.data.lengths import token_lengths as token_lengths_of
from workloads.data.synthetic import synthetic_examples

#: One example in this many goes to ``dev.json`` of a synthetic set, about as in the real one.
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
    """The examples of ``train.json`` and ``dev.json``, by file name.

    Raises:
        DataMissing: a file is not there, or has a malformed line (file and line are named).
    """
    missing = [name for name in ADVERTISEGEN_FILES if not os.path.isfile(directory / name)]
    if missing:
        raise DataMissing(
            f"{directory} has no {' and no '.join(missing)}; an AdvertiseGen directory holds "
            f"{' and '.join(ADVERTISEGEN_FILES)}. To try one: nightgrid dataset synthetic DIR"
        )
    return {name: load_examples(str(directory / name)) for name in ADVERTISEGEN_FILES}


def describe(files: dict[str, list[Example]], lengths: Sequence[Lengths]) -> Description:
    """Counts and length distributions; ``lengths`` are those of the files' examples in order."""
    return Description(
        counts={name: len(examples) for name, examples in files.items()},
        synthetic=any(example.synthetic for examples in files.values() for example in examples),
        input=distribution([length.input for length in lengths]),
        output=distribution([length.output for length in lengths]),
        total=distribution([length.total for length in lengths]),
    )


def measure_lengths(files: dict[str, list[Example]], tokenizer: Any) -> list[Lengths]:
    """Tokens of all examples, the files in order."""
    return token_lengths_of(merged(files), tokenizer)


def merged(files: dict[str, list[Example]]) -> list[Example]:
    """All examples, the files in order."""
    return [example for examples in files.values() for example in examples]


def write_tiny(
    out: Path, files: dict[str, list[Example]], lengths: Sequence[Lengths], count: int
) -> int:
    """Write the sample that covers the lengths; returns how many examples it has."""
    sample = sample_by_length(merged(files), lengths, count)
    write_json_lines(out, sample)
    return len(sample)


def write_synthetic(directory: Path, count: int) -> dict[str, int]:
    """Write a synthetic ``train.json`` and ``dev.json``; returns the examples in each."""
    examples = synthetic_examples(count)
    dev = max(1, count // _DEV_SHARE)
    parts = {"train.json": examples[: count - dev], "dev.json": examples[count - dev :]}
    for name, part in parts.items():
        write_json_lines(directory / name, part)
    return {name: len(part) for name, part in parts.items()}
