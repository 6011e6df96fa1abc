"""Length distributions and the sample at equal distance: by hand, and by laws."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workloads.data.lengths import (
    Lengths,
    distribution,
    equal_distance,
    token_lengths,
)
from workloads.data.shapes import Example


class CharacterTokenizer:
    """A tokenizer whose tokens are characters; it takes batches, as fast ones do."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, texts: list[str], *, add_special_tokens: bool, **_: Any) -> dict:
        assert not add_special_tokens
        self.batches.append(len(texts))
        return {"input_ids": [list(text.encode("utf-32-le")[::4]) for text in texts]}


def example(number: int, tokens: int) -> tuple[Example, Lengths]:
    return Example(content=str(number)), Lengths(input=tokens // 3, output=tokens - tokens // 3)


def test_tokens_are_counted_in_batches_and_in_order() -> None:
    tokenizer = CharacterTokenizer()
    examples = [Example(content="裤" * (i % 7 + 1), summary="x" * (i % 5)) for i in range(5000)]
    lengths = token_lengths(examples, tokenizer)
    assert lengths == [Lengths(input=i % 7 + 1, output=i % 5) for i in range(5000)]
    assert tokenizer.batches == [2000, 2000, 1000] * 2


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200))
def test_a_histogram_counts_every_length_once(lengths: list[int]) -> None:
    found = distribution(lengths)
    assert sum(b.count for b in found.bins) == len(lengths)
    for b in found.bins:
        assert b.count == sum(b.low <= length < b.high for length in lengths)
    assert all(a.high == b.low for a, b in zip(found.bins, found.bins[1:], strict=False))
    assert len({b.high - b.low for b in found.bins}) == 1
    assert len(found.bins) <= 12
    values = list(found.percentiles.values())
    assert values == sorted(values)


def test_bins_are_no_more_than_wanted_where_the_first_begins_below_the_shortest() -> None:
    """120 lengths from 9 on would need 13 bins of 10, since the first begins at 0."""
    found = distribution(range(9, 129))
    assert [b.low for b in found.bins] == [0, 20, 40, 60, 80, 100, 120]
    assert len(distribution(range(10, 130)).bins) == 12


@given(st.integers(1, 5000), st.integers(1, 300))
def test_positions_are_evenly_spread(size: int, count: int) -> None:
    places = equal_distance(size, count)
    assert len(places) == min(size, count) == len(set(places))
    assert places == sorted(places) and places[0] >= 0 and places[-1] < size
    if count >= 2 and size >= 2:
        assert (places[0], places[-1]) == (0, size - 1)
        steps = [b - a for a, b in itertools.pairwise(places)]
        assert max(steps) - min(steps) <= 1
