"""Fused norms and gradient clipping."""

from typing import Any

import torch


class FusedRMSNorm:
    @staticmethod
    def apply(hidden: torch.Tensor, weight: torch.Tensor, eps: float, *_: Any) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(hidden.dtype)


class FusedClipNorm:
    def __init__(self, parameters: Any, max_norm: float) -> None:
        self._max_norm = max_norm

    def clip_norm(self, parameters: Any) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)
