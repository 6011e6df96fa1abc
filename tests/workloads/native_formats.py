"""Models in the formats that machine code multiplies, and its kernels for them."""

from __future__ import annotations

from typing import Any

import pytest

from workloads.generation.native import products

#: Of machine code: bf16 widened to fp32, and by pairs.
KERNELS = ("fp32", "bf16", "bf16_pairs", "int8")


def format_for(kernel: str, patch: pytest.MonkeyPatch) -> str:
    """The format of a kernel, which is taken from now on, be it the faster here or not; the test
    is skipped where there is no such kernel."""
    name = kernel.removesuffix("_pairs")
    if not products.computes(name):
        pytest.skip(f"{name} is left to oneDNN here")
    library: Any = products.code().library
    if name != kernel and not library.has_pairs():
        pytest.skip("this processor has no products of pairs in bf16")
    patch.setattr(products, "by_pairs", lambda _: name != kernel)
    return name


def in_format(model: Any, name: str) -> Any:
    """The model in fp32, bf16, or bf16 with layers in int8."""
    if name == "fp32":
        return model
    model = model.bfloat16()
    if name == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model.model, Int8WeightOnlyConfig())
    return model
