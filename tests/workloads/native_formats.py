"""Models in the formats that machine code multiplies."""

from __future__ import annotations

from typing import Any


def in_format(model: Any, name: str) -> Any:
    """The model in fp32, bf16, or bf16 with layers in int8."""
    if name == "fp32":
        return model
    model = model.bfloat16()
    if name == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model.model, Int8WeightOnlyConfig())
    return model
