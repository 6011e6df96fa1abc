"""The kernels of the engine graph beside the products they stand for, in Triton's interpreter.

Triton comes with torch for NVIDIA cards; elsewhere it is installed by itself (``pip install
triton``), or these tests are left out. On a card the same tests run the compiled kernels.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
_CARD = "cuda" if torch.accelerator.is_available() else "cpu"
if _CARD == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402

from workloads.engines.graph import few_rows, kernels, layers  # noqa: E402
from workloads.engines.graph.kernels import KINDS  # noqa: E402


@pytest.mark.parametrize("kind", ["", "int8", "fp8", "int4"])
@pytest.mark.parametrize(
    ("rows", "norm", "gated", "bias", "residual"),
    [
        (40, True, False, True, False),
        (37, True, True, False, False),
        (24, False, False, False, True),
    ],
)
def test_one_row(kind, rows, norm, gated, bias, residual) -> None:
    torch.manual_seed(0)
    columns = 192
    weight = torch.randn(rows * (2 if gated else 1), columns, device=_CARD) / columns**0.5
    shift = torch.randn(len(weight), device=_CARD) if bias else None
    rest = torch.randn(rows, device=_CARD) if residual else None
    gain = torch.rand(columns, device=_CARD) if norm else None
    x = torch.randn(columns, device=_CARD)
    matrix = layers.pack(weight, shift, kind)
    normed = torch.nn.functional.rms_norm(x, (columns,), gain, 1e-5) if norm else x
    right = torch.nn.functional.linear(normed, matrix.plain(torch.float32), shift)
    if gated:
        right = torch.nn.functional.silu(right[:rows]) * right[rows:]
    if residual:
        right = right + rest
    out = torch.full((rows,), torch.nan, device=_CARD)
    words = kind in ("fp8", "int4")
    kernels.multiply[(triton.cdiv(rows, 8),)](
        x,
        matrix.values.view(torch.int32) if words else matrix.values,
        matrix.scales,
        shift,
        rest,
        gain,
        out,
        1e-5,
        ROWS=rows,
        COLUMNS=columns,
        KIND=KINDS[kind],
        NORM=norm,
        GATED=gated,
        BIAS=bias,
        RESIDUAL=residual,
        EARLY=False,
        BLOCK_N=8,
        BLOCK_K=128,
    )
    assert float((out - right).norm() / right.norm()) < 1e-4


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("x_rows", [2, 20])
def test_many_rows(kind, x_rows) -> None:
    torch.manual_seed(0)
    columns = 640 if kind == "int4" else 320
    weight, bias = torch.randn(70, columns, device=_CARD), torch.ones(70, device=_CARD)
    matrix = layers.pack(weight, bias, kind)
    assert few_rows.block_for(kind, columns) is not None
    x = torch.randn(x_rows, columns, device=_CARD)
    right = torch.nn.functional.linear(x, matrix.plain(torch.float32), matrix.bias)
    found = few_rows.product(x, matrix)
    assert float((found - right).norm() / right.norm()) < 1e-5


def test_every_block_fills_a_product_of_the_tensor_cores() -> None:
    """A card refuses products of fewer than 16 columns, which the interpreter takes."""
    in_words = {"int8": 1, "fp8": 1, "int4": 8}
    for kind, blocks in few_rows.BLOCKS.items():
        assert all(block[1] // in_words[kind] >= 16 for block in blocks)


def test_four_bits_written_out() -> None:
    torch.manual_seed(0)
    matrix = layers.pack(torch.randn(70, 320, device=_CARD), None, "int4")
    out = torch.empty(70, 320, device=_CARD)
    words = matrix.values.numel()
    few_rows.expand4[(triton.cdiv(words, 256),)](
        matrix.values, matrix.scales, out, words, BLOCK=256
    )
    assert torch.equal(out, matrix.plain(torch.float32))
