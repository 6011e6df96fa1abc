"""Fused kernels of a package, behind one record, and the formulas that they compute.

A kernel takes the place of a model's own code only where that code is seen to compute the kernel's
formula: both are tried on the same numbers (``sample``, ``near``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Kernels of a package, through which autograd finds gradients."""

    title: str  # of the package, with its version
    #: States [..., width], weight [width] of the same type, epsilon -> as ``rms_normed``. Gradients
    #: that it is given stay as they are: a sum gives both its terms the same tensor.
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    #: Gate and up, [..., width] each -> SiLU(gate) * up. The way back may overwrite both.
    silu_mul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    #: Query and key, [rows, heads, positions, width] each, cosines and sines, [rows or 1,
    #: positions, width] each -> both as ``turned_halves``. May overwrite query and key.
    turn: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Pair]
    #: States [positions, width], the last layer's weight [vocabulary, width] and bias, targets
    #: [positions] -> summed cross entropy.
    cross_entropy: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor
    ]


def rms_normed(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """States [..., width] over their root mean square, found in float32, times a weight [width]."""
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(states.dtype)


def turned_halves(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn each element of the first half with the one at its place in the second (Llama).

    Args:
        x: [rows, heads, positions, width].
        cosines: [rows or 1, positions, width], the second half as the first.
        sines: as ``cosines``.
    """
    first, second = x.chunk(2, -1)
    return x * cosines[:, None] + torch.cat((-second, first), -1) * sines[:, None]


def turned_pairs(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn each element of an even place with the next, as far as cosines go; the rest stays (GLM).

    Args:
        x: [rows, heads, positions, width].
        cosines: [rows or 1, positions, turned], the second half as the first.
        sines: as ``cosines``.
    """
    turned = cosines.shape[-1]
    cos, sin = (each[:, None, :, : turned // 2] for each in (cosines, sines))
    even, odd = x[..., :turned:2], x[..., 1:turned:2]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return torch.cat((pairs.flatten(-2), x[..., turned:]), -1)


def sample(
    shape: tuple[int, ...], device: torch.device, kind: torch.dtype = torch.float32
) -> torch.Tensor:
    """Numbers to try code on; not random, since random ones belong to the training."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul(0.7).sin().add(1)
    return numbers.reshape(shape).to(device, kind)


def near(one: Any, other: torch.Tensor) -> bool:
    """Tell if two results are the same but for rounding."""
    if not isinstance(one, torch.Tensor) or one.shape != other.shape:
        return False
    bound = max(8 * torch.finfo(other.dtype).eps, 1e-5)
    distance = (one.float() - other.float()).abs().max()
    return bool(distance <= bound * other.float().abs().max())
