"""Attention functions of ours compute by every word that changes the result, or refuse it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from workloads.errors import Unsupported
from workloads.generation import kv_cache
from workloads.training import apart

WORK = kv_cache.Decode(kv_cache.KVCache(1, 4), [(0, [0])], torch.float32, torch.device("cpu"))
OURS: dict[str, tuple[Any, dict[str, Any]]] = {
    "KV cache": (kv_cache.attend, {"cache_pass": WORK}),
    "apart": (apart.attend, {"position_ids": torch.tensor([[0]])}),
}


@pytest.mark.parametrize("name", OURS)
def test_a_word_that_would_change_the_result_is_refused(name: str) -> None:
    """Words that are not set pass, and so do those that change nothing."""
    attend, own = OURS[name]
    module = torch.nn.Module()
    module.layer_idx = 0
    one = torch.ones(1, 1, 1, 2)
    found, _ = attend(module, one, one, one, None, softcap=None, is_causal=True, **own)
    assert torch.equal(found, one)
    for word in ("softcap", "sliding_window", "position_bias", "s_aux"):
        with pytest.raises(Unsupported, match=word):
            attend(module, one, one, one, None, **{word: 4.0}, **own)


@given(
    native=st.booleans(),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    groups=st.sampled_from((1, 2)),
    width=st.sampled_from((8, 20)),
)
@settings(max_examples=20, deadline=None)
def test_apart_is_causal_attention_of_each_sample(
    native: bool, lengths: list[int], groups: int, width: int
) -> None:
    """Output and gradients are those of the samples alone, in fp32 whatever the products' bits, by
    machine code and by torch."""
    apart.register(native=native)
    whole = sum(lengths)
    generator = torch.Generator().manual_seed(whole)
    heads = [
        torch.randn(1, whole, count, width, generator=generator).transpose(1, 2).requires_grad_()
        for count in (2 * groups, groups, groups)
    ]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    weights = torch.randn(1, whole, 2 * groups, width, generator=generator)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found, _ = apart.attend(torch.nn.Module(), *heads, None, position_ids=places)
        gradients = torch.autograd.grad((found * weights).sum(), heads)
    finally:
        torch.set_float32_matmul_precision(before)
    alone = [
        scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
        for own in zip(*(each.split(lengths, dim=2) for each in heads), strict=True)
    ]
    expected = torch.cat(alone, dim=2).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), heads)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_apart_under_autocast_is_that_of_the_rounded_heads(kind: torch.dtype) -> None:
    """Rotary embeddings leave query and key in fp32, beside a value from a product in 16 bits."""
    rounded = [each.to(kind) for each in torch.randn(3, 1, 2, 9, 8).unbind()]
    query, key, value = rounded[0].float(), rounded[1].float(), rounded[2]
    query.requires_grad_()
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.autocast("cpu", dtype=kind):
        found, _ = apart.attend(torch.nn.Module(), query, key, value, None, position_ids=places)
    expected, _ = apart.attend(torch.nn.Module(), *rounded, None, position_ids=places)
    assert found.dtype is kind and torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(found.float().sum(), query)
    assert gradient.dtype is torch.float32 and gradient.isfinite().all()
