"""Parts of a decoder as a step meets them: matrices, gains and constants."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workloads.decoding.packing import Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer. Queries, keys and values are one matrix, gates and what they gate another."""

    before: torch.Tensor  # gain of the norm before attention
    qkv: Matrix
    q_gain: torch.Tensor | None  # of the norms of single heads
    k_gain: torch.Tensor | None
    out: Matrix
    between: torch.Tensor
    gate_up: Matrix
    down: Matrix
    after_out: torch.Tensor | None = None  # gains of norms before each sum, where there are such
    after_down: torch.Tensor | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Those of linear layers."""
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """All that a step needs to know."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Matrix
    eps: float
    heads: int
    kv_heads: int
    width: int  # of a head
    scaling: float  # of scores
    rotary: int  # numbers of a head that are turned
    pairs: bool  # neighbours are turned together, not halves
    cos: torch.Tensor  # [positions, rotary / 2], float32
    sin: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        return self.embedding.dtype

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads
