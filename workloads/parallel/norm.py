"""The norm of gradients of which each card holds a part, and clipping to it.

A split matrix adds the squares of all its parts, one that is whole on every card adds its own once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from workloads.parallel.tensor import ColumnLinear, RowLinear


def total_norm(model: Any, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Root of the sum of squares of all gradients; the ranks that split matrices ask together."""
    parts: set[torch.Tensor] = set()
    group = None  # which is also the name of the group of all ranks
    for module in model.modules():
        if isinstance(module, (ColumnLinear, RowLinear)):
            group = module.part.group
            parts.add(module.weight)
            if isinstance(module, ColumnLinear) and module.bias is not None:
                parts.add(module.bias)
    squares = [torch.zeros((), device=parameters[0].device) for _ in range(2)]
    for parameter in parameters:
        if parameter.grad is not None:
            squares[parameter in parts] += parameter.grad.float().square().sum()
    whole, split = squares
    if parts:
        dist.all_reduce(split, group=group)
    return (whole + split).sqrt()


def clip(model: Any, parameters: Sequence[torch.nn.Parameter], limit: float) -> None:
    """Scale gradients down together where their norm is above the limit, as torch does."""
    scale = (limit / (total_norm(model, parameters) + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
