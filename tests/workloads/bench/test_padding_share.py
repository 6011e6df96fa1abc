"""The share of positions that were computed in vain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurements import sample

from workloads.base import Timed
from workloads.registry import METRICS

FIGURE = METRICS["padding_share"].figure
assert FIGURE is not None


@given(lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8))
def test_a_static_batch_pads_to_its_longest_prompt_and_text(lengths: list[tuple[int, int]]) -> None:
    """Prompts are padded to the longest, and ended texts go on with the others; the last token of
    a text is not fed back. Nothing is in vain where all are of one length."""
    prompts, texts = zip(*lengths, strict=True)
    computed = len(lengths) * (max(prompts) + max(texts) - 1)
    vain = sum(max(prompts) - length for length in prompts)
    vain += sum(max(texts) - length for length in texts)
    batch = sample(
        items=len(lengths),
        input_tokens=sum(prompts),
        output_tokens=sum(texts),
        computed_tokens=computed,
    )
    found = FIGURE(Timed(samples=[batch], items=[]))
    assert found == pytest.approx(vain / computed)
    # A rank that splits the same prompts counts none of them, and changes nothing.
    beside = sample(items=0, input_tokens=0, output_tokens=0, computed_tokens=computed)
    assert FIGURE(Timed(samples=[batch, beside], items=[])) == found


def test_a_training_step_pads_its_rows() -> None:
    """No token is generated: what is wanted are the real tokens that are read."""
    step = sample(input_tokens=75, output_tokens=0, computed_tokens=100)
    assert FIGURE(Timed(samples=[step, step], items=[])) == 0.25


def test_an_engine_that_counts_no_positions_has_no_such_figure() -> None:
    """Nor has one that counts fewer than are needed."""
    for computed in (0, 10):
        assert FIGURE(Timed(samples=[sample(computed_tokens=computed)], items=[])) is None
