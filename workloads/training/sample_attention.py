"""Attention of packed samples, sample by sample (``packed_attention: apart``).

Unlike attention under a mask, no pairs across samples are computed. On CUDA in bf16 or fp16 one
call of varlen (flash) attention takes all samples; elsewhere each sample is one causal call of
``scaled_dot_product_attention``, slower for many short samples.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from workloads.base import Unsupported
from workloads.models.attention import refuse_unknown

#: Name of the attention function in transformers.
NAME = "nightgrid_apart"


def register() -> SampleAttention:
    """Register a new attention function with transformers."""
    from transformers import AttentionInterface

    attention = SampleAttention()
    AttentionInterface.register(NAME, attention)
    return attention


class SampleAttention:
    """Attention function of a model's layers; samples begin where ``position_ids`` is 0."""

    def __init__(self) -> None:
        self.method = "apart"  # for the row: how the samples were computed
        self._varlen: Callable[..., Any] | None = None  # PyTorch's, if this version has it
        with contextlib.suppress(ImportError):
            from torch.nn.attention.varlen import varlen_attn

            if {"window_size", "scale"} <= inspect.signature(varlen_attn).parameters.keys():
                self._varlen = varlen_attn

    @torch.compiler.disable
    def __call__(
        self,
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
        """Return outputs [rows, positions, heads, width], and None for the weights.

        ``query`` is [rows, heads, positions, width]; ``key`` and ``value`` have the model's KV
        heads; ``position_ids`` is [rows, positions]. Arguments that change the result are refused.
        """
        if position_ids is None or attention_mask is not None:
            raise Unsupported("packed_attention apart: this model tells its attention no positions")
        refuse_unknown("packed_attention apart", others)
        rows, heads, positions, _ = query.shape
        places = position_ids.expand(rows, -1).flatten()
        starts = (places == 0).nonzero().flatten().tolist()
        if starts[:1] != [0]:
            raise Unsupported("packed_attention apart: positions do not begin with 0")
        lengths = [end - start for start, end in pairwise([*starts, places.numel()])]
        query, key, value = (  # [1, heads, rows * positions, width]
            tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0) for tensor in (query, key, value)
        )
        if torch.is_autocast_enabled(query.device.type):  # rotary embeddings come in fp32
            kind = torch.get_autocast_dtype(query.device.type)
            query, key, value = (tensor.to(kind) for tensor in (query, key, value))
        key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
        in_half = query.dtype in (torch.float16, torch.bfloat16)
        if self._varlen is not None and query.is_cuda and in_half and not dropout:
            self.method = "apart, by varlen attention"
            attended = by_varlen(self._varlen, query, key, value, lengths, scaling)
        else:
            self.method = "apart, one call a sample"
            samples = zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)
            options: dict[str, Any] = {"dropout_p": dropout, "is_causal": True, "scale": scaling}
            parts = [scaled_dot_product_attention(*sample, **options) for sample in samples]
            attended = torch.cat(parts, dim=2)[0].transpose(0, 1).contiguous()
        return attended.view(rows, positions, heads, -1), None


def by_varlen(
    varlen: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scaling: float | None,
) -> torch.Tensor:
    """All samples in one call; [positions, heads, width]."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=query.device).cumsum(0).int()
    longest = max(lengths)
    flat = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attended: torch.Tensor = varlen(
        *flat, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0)
    )
    return attended
