"""Fused attention. There are no fused rotary embeddings here: models fall back to their own."""

from typing import Any

import torch

from .fp8 import fp8_fused_sdpa

__all__ = ["FusedSDPA", "fp8_fused_sdpa"]

softmax_modes: set[str] = set()  # that it was called with, for tests


class FusedSDPA:
    """scaled_dot_product_attention under the name and argument order of the bridge's kernel."""

    @staticmethod
    def apply(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        softmax_modes.add(softmax_mode)
        return torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=query.shape[-3] != key.shape[-3],
        )
