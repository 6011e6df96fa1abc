"""Attention of packed samples, each by itself.

A row of packed samples under one mask computes every pair of positions and throws away those of
different samples. Here each sample is a call of its own, causal and without a mask: as many
products as the samples alone would need. That is many small calls, which suit a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from workloads.attention_words import refuse_unknown
from workloads.errors import Unsupported

#: Of the attention function, for transformers.
NAME = "nightgrid_apart"


def register() -> None:
    """Make the function known to transformers under its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Called by the model's layers; samples begin where ``position_ids`` [rows, positions] is 0.

    Args:
        module: the layer.
        query: [rows, heads, positions, width].
        key: as ``query``, with as many heads as the model keeps.
        value: as ``key``.
        attention_mask: none; positions say which sample a token is of.
        scaling: of the scores.
        dropout: of the weights.
        position_ids: handed through by the model.
        others: what else a model says, refused where it would change the result.

    Returns:
        [rows, positions, heads, width], and None for the weights.
    """
    if position_ids is None or attention_mask is not None:
        raise Unsupported("packed_attention apart: this model tells its attention no positions")
    refuse_unknown("packed_attention apart", others)
    rows, heads, positions, _ = query.shape
    lengths = _lengths(position_ids.expand(rows, -1))
    # One row of all samples, cut in one go: the way back is then one concatenation as well.
    parts = (_in_one_row(tensor).split(lengths, dim=2) for tensor in (query, key, value))
    found = [
        scaled_dot_product_attention(
            own_query,
            own_key,
            own_value,
            is_causal=True,
            scale=scaling,
            dropout_p=dropout,
            enable_gqa=heads != key.shape[1],
        )
        for own_query, own_key, own_value in zip(*parts, strict=True)
    ]
    whole = torch.cat(found, dim=2).transpose(1, 2)
    return whole.reshape(rows, positions, heads, value.shape[3]), None


def _lengths(position_ids: torch.Tensor) -> list[int]:
    """Tokens of each sample, row after row."""
    starts: list[int] = (position_ids.flatten() == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], position_ids.numel()]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def _in_one_row(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, heads, positions, width] as [1, heads, rows * positions, width]."""
    return tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0)
