"""Attention functions of ours compute by every word that changes the result, or refuse it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from workloads.base import Unsupported
from workloads.training import sample_attention


def test_a_word_that_would_change_the_result_is_refused() -> None:
    attend, own = sample_attention.SampleAttention(), {"position_ids": torch.tensor([[0]])}
    module = torch.nn.Module()
    module.layer_idx = 0
    one = torch.ones(1, 1, 1, 2)
    found, _ = attend(module, one, one, one, None, softcap=None, is_causal=True, **own)
    assert torch.equal(found, one)
    for word in ("softcap", "sliding_window", "position_bias", "s_aux"):
        with pytest.raises(Unsupported, match=word):
            attend(module, one, one, one, None, **{word: 4.0}, **own)


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    groups=st.sampled_from((1, 2)),
    width=st.sampled_from((8, 20)),
)
@settings(max_examples=20, deadline=None)
def test_apart_is_causal_attention_of_each_sample(lengths, groups, width) -> None:
    whole = sum(lengths)
    generator = torch.Generator().manual_seed(whole)
    heads = [
        torch.randn(1, whole, count, width, generator=generator).transpose(1, 2).requires_grad_()
        for count in (2 * groups, groups, groups)
    ]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    weights = torch.randn(1, whole, 2 * groups, width, generator=generator)
    attend = sample_attention.SampleAttention()
    found, _ = attend(torch.nn.Module(), *heads, None, position_ids=places)
    gradients = torch.autograd.grad((found * weights).sum(), heads)
    alone = [
        scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
        for own in zip(*(each.split(lengths, dim=2) for each in heads), strict=True)
    ]
    expected = torch.cat(alone, dim=2).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), heads)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)
    assert attend.method == "apart, one call a sample"


def test_varlen_attention_is_called_as_torch_has_it() -> None:
    from torch.nn.attention.varlen import varlen_attn

    calls: list[Any] = []

    def varlen(*given: Any, **named: Any) -> torch.Tensor:
        calls.append(inspect.signature(varlen_attn).bind(*given, **named).arguments)
        return torch.empty_like(given[0])

    heads = [torch.randn(1, 2, 7, 8) for _ in range(3)]
    found = sample_attention.by_varlen(varlen, *heads, [4, 3], 0.5)
    (call,) = calls
    assert found.shape == (7, 2, 8) and torch.equal(call["query"], heads[0][0].transpose(0, 1))
    assert call["cu_seq_q"].tolist() == call["cu_seq_k"].tolist() == [0, 4, 7]
    assert call["cu_seq_q"].dtype is torch.int32 and call["max_q"] == call["max_k"] == 4
    assert call["window_size"] == (-1, 0) and call["scale"] == 0.5


@pytest.mark.parametrize("places", [[1, 2, 0, 1], [2, 3, 4]])
def test_positions_within_a_sample_are_refused(places: list[int]) -> None:
    heads = [torch.randn(1, 2, len(places), 8) for _ in range(3)]
    with pytest.raises(Unsupported, match="do not begin with 0"):
        sample_attention.SampleAttention()(
            torch.nn.Module(), *heads, None, position_ids=torch.tensor([places])
        )


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_apart_under_autocast_is_that_of_the_rounded_heads(kind: torch.dtype) -> None:
    """Rotary embeddings leave query and key in fp32, beside a value from a product in 16 bits."""
    rounded = [each.to(kind) for each in torch.randn(3, 1, 2, 9, 8).unbind()]
    query, key, value = rounded[0].float(), rounded[1].float(), rounded[2]
    query.requires_grad_()
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    attend = sample_attention.SampleAttention()
    with torch.autocast("cpu", dtype=kind):
        found, _ = attend(torch.nn.Module(), query, key, value, None, position_ids=places)
    expected, _ = attend(torch.nn.Module(), *rounded, None, position_ids=places)
    assert found.dtype is kind and torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(found.float().sum(), query)
    assert gradient.dtype is torch.float32 and gradient.isfinite().all()
