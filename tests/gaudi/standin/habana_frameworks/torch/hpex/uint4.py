"""The operation by which layers with 4-bit weights expand them, written out in torch."""

from typing import Any

import torch

_LIBRARY = torch.library.Library("hpu", "FRAGMENT")
_NIBBLES = torch.arange(0, 32, 4, dtype=torch.int32)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """[rows, columns / 8] of int32 as [rows, columns] of numbers from 0 to 15."""
    return ((packed.unsqueeze(-1) >> _NIBBLES) & 15).reshape(packed.shape[0], -1)


def _convert_from_uint4(
    packed: torch.Tensor, scale: torch.Tensor, zero_point: Any, out_dtype: torch.dtype
) -> torch.Tensor:
    weight = _unpacked(packed).float()  # [inputs, outputs]
    group = weight.shape[0] // scale.shape[0]  # inputs that share a scale
    zeros = 8.0 if zero_point is None else _unpacked(zero_point).float().repeat_interleave(group, 0)
    return ((weight - zeros) * scale.float().repeat_interleave(group, 0)).to(out_dtype)


_LIBRARY.define(
    "convert_from_uint4(Tensor input, Tensor scale, Tensor? zero_point, ScalarType out_dtype) "
    "-> Tensor"
)
_LIBRARY.impl("convert_from_uint4", _convert_from_uint4, "CompositeExplicitAutograd")
