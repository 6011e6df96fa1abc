"""The norm of gradients of which each card holds a part, and clipping to it.

A split matrix adds the squares of all its parts, one that is whole on every card adds its own once;
the stages of a pipeline add up theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from workloads.parallel.tensor import ColumnLinear, RowLinear
from workloads.techniques.base import Passes


def total_norm(
    model: Any, parameters: Sequence[torch.nn.Parameter], pipeline: Passes | None = None
) -> torch.Tensor:
    """Root of the sum of squares of all gradients; the ranks that share a copy of the model ask
    together."""
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
    of_stage = whole + split
    return (of_stage if pipeline is None else pipeline.over_stages(of_stage)).sqrt()


def clip(
    model: Any,
    parameters: Sequence[torch.nn.Parameter],
    limit: float,
    pipeline: Passes | None = None,
) -> None:
    """Scale gradients down together where their norm is above the limit, as torch does."""
    scale = (limit / (total_norm(model, parameters, pipeline) + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
