"""Decoder layers computed in few calls: the same logits, with and without a cache."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from workloads.errors import Unsupported
from workloads.generation import continuous_batching
from workloads.generation.packed import multiplies_int8, pack

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


_NEEDS_VNNI = pytest.mark.skipif(
    not multiplies_int8(torch.cpu.get_capabilities()), reason="this processor has no VNNI"
)


def small(kind: str, **changes: Any) -> Any:
    """A model of a few numbers with random weights, alike for the same arguments."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(_SIZES | changes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for each in model.parameters():  # gains and biases that tell
            each.add_(torch.randn_like(each), alpha=0.1)
    return model


def continued(model: Any) -> list[list[int]]:
    """Texts of three prompts in two slots."""
    with continuous_batching.attention_over_kv_cache(model):
        return continuous_batching.generate(
            model,
            [[1, 2, 3, 4, 5], [6], [7, 8, 9]],
            slot_count=2,
            output_tokens=4,
            end_token_ids=frozenset(),
            on_admit=lambda _: None,
            on_step=lambda _: None,
        ).tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Glm"])
@torch.inference_mode()
def test_a_layer_in_few_calls_computes_the_same(kind: str) -> None:
    """Halves turned and neighbours turned, all of a head or a part of it, biases or none; read
    whole, continued with transformers' cache, and in continuous batches."""
    plain, packed = small(kind), small(kind)
    assert "2 decoder layers in few calls" in pack(packed)
    ids = torch.tensor([[1, 5, 3, 2, 9, 4, 7]])
    torch.testing.assert_close(packed(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    texts = [
        each.generate(ids, max_new_tokens=3, do_sample=False).tolist() for each in (plain, packed)
    ]
    assert texts[0] == texts[1]
    assert continued(packed) == continued(plain)


#: Positions from 64 on scale the queries.
_SCALED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Granite", {"residual_multiplier": 0.5}),
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": 4}),
        ("Olmo", {}),
        ("Ministral3", {"rope_parameters": _SCALED, "max_position_embeddings": 256}),
    ],
)
@torch.inference_mode()
def test_another_layer_stays_as_it_is(kind: str, changes: dict[str, Any]) -> None:
    """Sums of another kind, norms of single heads, attention to a part of the text, norms without
    gains, a scale that only far positions show."""
    plain, packed = small(kind, **changes), small(kind, **changes)
    assert "few calls" not in pack(packed)
    ids = torch.tensor([[1, 5, 3, 2, 9, 4, 7]])
    torch.testing.assert_close(packed(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


@_NEEDS_VNNI
@pytest.mark.parametrize("kind", ["Llama", "Glm"])
@torch.inference_mode()
def test_int8_layers_in_few_calls_compute_the_same(kind: str) -> None:
    """As near to the weight-only product as activations in 8 bits are."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    plain, packed = small(kind).bfloat16(), small(kind).bfloat16()
    for model in (plain, packed):
        quantize_(model.model, Int8WeightOnlyConfig())
    told = pack(packed)
    assert "2 decoder layers in few calls" in told and "14 with activations in int8" in told
    ids = torch.tensor([[1, 5, 3, 2, 9, 4, 7]])
    got, expected = packed(ids).logits.float(), plain(ids).logits.float()
    assert (got - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Ministral3", {"rope_parameters": _SCALED}),
        ("Granite", {"residual_multiplier": 0.95}),
        ("Llama", {"hidden_act": "gelu"}),
    ],
)
@_NEEDS_VNNI
def test_another_layer_in_int8_stays_as_it_is(kind: str, changes: dict[str, Any]) -> None:
    """However little it does otherwise beside the rounding to 8 bits."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = small(kind, **changes).bfloat16()
    quantize_(model.model, Int8WeightOnlyConfig())
    assert "few calls" not in pack(model)


_PRODUCT_IN_INT8 = """
from types import SimpleNamespace
import torch
from workloads.generation.packed_products import Int8Linear, Rows8
weight = SimpleNamespace(qdata=torch.ones(48, 64, dtype=torch.int8), scale=torch.ones(48))
linear = SimpleNamespace(weight=weight, bias=None, in_features=64, out_features=48)
Int8Linear([linear], Rows8())(torch.ones(4, 64, dtype=torch.bfloat16))
"""


@pytest.mark.slow
@_NEEDS_VNNI
def test_products_in_int8_are_computed_by_a_fast_kernel() -> None:
    """oneDNN's reference kernel is right, but takes a thousand times as long."""
    told = subprocess.run(
        [sys.executable, "-c", _PRODUCT_IN_INT8],
        env=os.environ | {"ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    products = [line for line in told.stdout.splitlines() if ",exec,cpu,matmul," in line]
    assert products
    assert not [line for line in products if ",ref" in line]


@pytest.mark.parametrize(
    ("capabilities", "exact"),
    [
        ({"architecture": "x86_64", "avx2": True}, False),
        ({"architecture": "x86_64", "avx2": True, "avx_vnni": True}, True),
        ({"architecture": "x86_64", "avx512_vnni": True}, True),
        ({"architecture": "aarch64"}, True),
    ],
)
def test_8_bit_products_are_exact_where_their_sums_cannot_overflow(
    capabilities: dict[str, Any], exact: bool
) -> None:
    """An x86 sums pairs of them in 16 bits unless it has VNNI."""
    assert multiplies_int8(capabilities) is exact


def test_int8_is_refused_where_its_products_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says what to take instead; the other precisions are packed there."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    old = {"architecture": "x86_64", "avx2": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: old)
    model = small("Llama").bfloat16()
    assert "layers" in pack(small("Llama"))
    quantize_(model.model, Int8WeightOnlyConfig())
    with pytest.raises(Unsupported, match=r"no VNNI.*another precision"):
        pack(model)
