"""Weight-only matrices in 8 and 4 bits; a value is a stored number times a scale.

    int8   [N, K] int8, one scale for each row
    fp8    [N, K] float8_e4m3fn in the order below, one scale for each row
    int4   [N, K / 8] int32 words of eight values, one scale for ``GROUP`` values of a row

A thread reads ``WORDS`` 32-bit words at once. In int4 and fp8, part s (nibble or byte) of word j is
column s × ``WORDS`` + j, so each part covers neighbouring columns and threads exchange nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workloads.base import Unsupported

GROUP = 64
WORDS = 4

#: Largest stored number of each format.
_LARGEST = {"int8": 127.0, "fp8": 448.0}
#: Range ends tried for 4 bits, as shares of the largest value.
_RANGES = tuple(share / 20 for share in range(14, 21))


@dataclass(frozen=True, slots=True)
class Matrix:
    """Stored matrix [rows, columns] of a linear layer."""

    values: torch.Tensor
    rows: int
    columns: int
    kind: str = ""  # "" for plain values, else int8, fp8 or int4
    scales: torch.Tensor | None = None  # [rows], or [rows, columns / GROUP] in 4 bits; float32
    bias: torch.Tensor | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of values, scales and bias."""
        return sum(t.nbytes for t in (self.values, self.scales, self.bias) if t is not None)

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Unpacked values [rows, columns]."""
        if not self.kind:
            return self.values.to(dtype)
        assert self.scales is not None
        if self.kind == "fp8":
            bytes_ = self.values.view(torch.uint8).unflatten(1, (-1, WORDS, 4)).transpose(2, 3)
            values = bytes_.reshape(self.rows, -1).view(torch.float8_e4m3fn).to(torch.float32)
            return (values * self.scales[:, None]).to(dtype)
        if self.kind != "int4":
            return (self.values.to(torch.float32) * self.scales[:, None]).to(dtype)
        shifts = torch.arange(0, 32, 4, device=self.values.device, dtype=torch.int32)
        words = self.values.view(self.rows, -1, 1, WORDS)
        numbers = ((words >> shifts[:, None]) & 15) - 8
        grouped = numbers.view(self.rows, -1, GROUP).to(torch.float32)
        return (grouped * self.scales[:, :, None]).view(self.rows, self.columns).to(dtype)


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    """An unpacked matrix."""
    return Matrix(weight, weight.shape[0], weight.shape[1], bias=bias)


def pack(weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> Matrix:
    """Pack a matrix as ``kind`` ("": plain).

    Raises:
        Unsupported: the columns are not a multiple of those stored together.
    """
    if not kind:
        return plain(weight, bias)
    rows, columns = weight.shape
    full = weight.to(torch.float32)
    together = {"int4": GROUP, "fp8": 4 * WORDS}.get(kind, 1)
    if columns % together:
        raise Unsupported(
            f"{kind} with the engine graph stores {together} columns together; this model has a "
            f"matrix of {columns}"
        )
    if kind == "int4":
        numbers, scales = _four_bits(full.view(rows, -1, GROUP))
        words = numbers.view(rows, -1, 8, WORDS).to(torch.int32) + 8
        shifts = torch.arange(0, 32, 4, device=weight.device, dtype=torch.int32)
        # Nibbles do not overlap, so the wrapping sum is their union.
        packed = (words << shifts[:, None]).sum(dim=2, dtype=torch.int32)
        return Matrix(packed.view(rows, -1).contiguous(), rows, columns, kind, scales, bias)
    scales = full.abs().amax(dim=1).clamp_(min=1e-12) / _LARGEST[kind]
    stored = full / scales[:, None]
    if kind == "int8":
        return Matrix(stored.round_().to(torch.int8), rows, columns, kind, scales, bias)
    bytes_ = stored.to(torch.float8_e4m3fn).view(torch.uint8)
    bytes_ = bytes_.unflatten(1, (-1, 4, WORDS)).transpose(2, 3).reshape(rows, columns)
    values = bytes_.view(torch.float8_e4m3fn)
    return Matrix(values, rows, columns, kind, scales, bias)


def _four_bits(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers from -8 to 7, and scales of least squared error, for [rows, groups, GROUP]."""
    largest = groups.abs().amax(dim=-1).clamp_(min=1e-12)
    scales = largest / 7
    least = torch.full_like(largest, torch.inf)
    for share in _RANGES:
        tried = largest * (share / 7)
        stored = (groups / tried[..., None]).round_().clamp_(-8, 7)
        error = (stored * tried[..., None] - groups).square_().sum(dim=-1)
        better = error < least
        least = torch.where(better, error, least)
        scales = torch.where(better, tried, scales)
    return (groups / scales[..., None]).round_().clamp_(-8, 7).to(torch.int8), scales
