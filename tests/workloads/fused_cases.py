"""Small models whose parts fused kernels take over, and kernels with the habits of Liger's."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear, sigmoid, silu

from workloads.training.fused_kernels import Kernels, rms_normed, turned_halves


def passed(model: Any, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Loss, logits and all gradients of a pass over two rows, whose positions begin apart."""
    ids = torch.arange(24, device=device).reshape(2, 12) * 7 % 90 + 3
    places = torch.stack((torch.arange(12), torch.arange(5, 17))).to(device)
    model.zero_grad()
    found = model(input_ids=ids, position_ids=places, labels=ids, use_cache=False)
    found.loss.backward()
    learned = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": found.loss.detach(), "logits": found.logits.detach(), **learned}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of a tensor of two passes, as a share of its largest element."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp_min(1e-9))
        for name in other
    )


class _SiluMul(torch.autograd.Function):
    """Overwrites gate and up on the way back."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        share = sigmoid(gate)
        of_up = outer[0] * gate * share
        gate.data.copy_(outer[0] * up * share * (1 + gate * (1 - share)))
        up.data.copy_(of_up)
        return gate, up


class _Turn(torch.autograd.Function):
    """Overwrites query and key, where their positions come before their heads in memory."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return tuple(_overwritten(x, cos, sin) for x in (query, key))

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return (*(_overwritten(x, cos, -sin) for x in outer), None, None)


def _overwritten(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned = turned_halves(x, cos, sin)
    flat = x.transpose(1, 2).contiguous()
    flat.data.copy_(turned.transpose(1, 2))
    return flat.transpose(1, 2)


def _cross_entropy(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    return cross_entropy(linear(states, weight, bias).float(), targets, reduction="sum")


def in_place_of_liger() -> Kernels:
    """Return the computations of Liger's kernels, with their signatures and habits, by torch."""
    return Kernels(
        title="in place of liger-kernel",
        rms_norm=rms_normed,
        silu_mul=_SiluMul.apply,
        turn=_Turn.apply,
        cross_entropy=_cross_entropy,
    )
