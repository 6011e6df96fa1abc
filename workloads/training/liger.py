"""Kernels of the package liger-kernel, written in Triton.

They save memory by overwriting. The way back through SiLU(gate) * up overwrites gate and up, which
products made and no one else has kept; a second way back through one pass would be wrong. Turning
overwrites query and key. A norm would overwrite the gradient that it is given, which may be another
term's as well: it is told not to.
"""

from __future__ import annotations

from importlib import metadata

import torch

from workloads.training.chunked_loss import summed
from workloads.training.kernels import Kernels, Pair
from workloads.training.samples import NOT_LEARNED


def liger() -> Kernels:
    """The kernels."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def rms_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        in_place = False
        found: torch.Tensor = LigerRMSNormFunction.apply(
            states, weight, epsilon, 0.0, "llama", in_place
        )
        return found

    def turn(
        query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> Pair:
        found = LigerRopeFunction.apply(query, key, cosines, sines)
        return found[0], found[1]

    def cross_entropy(
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        if not len(targets):
            return summed(states, weight, bias, targets)
        # No class weights, squared logarithms of sums, smoothing, soft caps or second results.
        options = (None, NOT_LEARNED, 0.0, 0.0, "sum", None, False)
        sum_in = torch.float32  # of the last layer's gradients
        found: tuple[torch.Tensor, ...] = LigerFusedLinearCrossEntropyFunction.apply(
            states, weight, targets, bias, *options, sum_in
        )
        return found[0]

    return Kernels(
        title=f"liger-kernel {metadata.version('liger-kernel')}",
        rms_norm=rms_norm,
        silu_mul=LigerSiLUMulFunction.apply,
        turn=turn,
        cross_entropy=cross_entropy,
    )
