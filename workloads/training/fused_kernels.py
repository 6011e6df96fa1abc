"""Fused kernels (liger-kernel, Triton) in one model: norms and gated layers.

liger-kernel's own patches replace functions and classes of transformers and would affect later jobs
of the process; here the modules of one model get another ``forward`` and lose it again. A kernel is
used only where it computes the same as the model's code on sample numbers (``sample``, ``near``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch.nn.functional import silu

from workloads.training.data import NOT_LEARNED
from workloads.training.losses import summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Differentiable kernels of a package."""

    title: str  # of the package, with its version
    #: States [..., width], weight [width] of the same type, epsilon -> as ``rms_normed``. Must not
    #: change given gradients in place: both terms of a sum share one tensor.
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    #: Gate and up, [..., width] each -> SiLU(gate) * up. The backward pass may overwrite both.
    silu_mul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    #: States [positions, width], the last layer's weight [vocabulary, width] and bias, targets
    #: [positions] -> summed cross entropy.
    cross_entropy: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor
    ]


def rms_normed(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """States [..., width] over their root mean square (in float32), times a weight [width]."""
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(states.dtype)


def sample(
    shape: tuple[int, ...], device: torch.device, kind: torch.dtype = torch.float32
) -> torch.Tensor:
    """Numbers to try code on, without touching the training's random state."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul(0.7).sin().add(1)
    return numbers.reshape(shape).to(device, kind)


def near(one: Any, other: torch.Tensor) -> bool:
    """Tell if two results are equal up to rounding."""
    if not isinstance(one, torch.Tensor) or one.shape != other.shape:
        return False
    bound = max(8 * torch.finfo(other.dtype).eps, 1e-5)
    distance = (one.float() - other.float()).abs().max()
    return bool(distance <= bound * other.float().abs().max())


#: The parts that are replaced, as the row names them.
NORMS, GATES = "norms", "gated layers"

#: Names under which gated layers keep their activation.
_ACTIVATIONS = ("act_fn", "activation_fn", "act")


def fuse(model: torch.nn.Module, kernels: Kernels) -> tuple[Counter[str], Callable[[], None]]:
    """Make modules compute by kernels; return counts by part and an undo function."""
    kind = next(p.dtype for p in model.parameters() if p.is_floating_point())
    chosen: list[tuple[torch.nn.Module, str, Callable[..., Any]]] = []
    with torch.no_grad():
        for module in model.modules():
            if (epsilon := _epsilon(module)) is not None:
                chosen.append((module, NORMS, _norm(module, epsilon, kernels)))
            elif _is_gate(module, kind):
                chosen.append((module, GATES, _gate(module, kernels)))
    # Only after all trials: a failure leaves the model unchanged.
    before = [(module, module.__dict__.get("forward")) for module, _, _ in chosen]
    for module, _, forward in chosen:
        module.forward = forward

    def undo() -> None:
        while before:
            module, own = before.pop()
            del module.forward
            if own is not None:  # a hook's, as accelerate puts there
                module.forward = own

    return Counter(part for _, part, _ in chosen), undo


def _epsilon(module: torch.nn.Module) -> float | None:
    """Epsilon of an RMS norm; None for other modules."""
    weight = module._parameters.get("weight")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if type(weight) is not torch.nn.Parameter or not isinstance(epsilon, float):
        return None
    if weight.dim() != 1 or len([*module.parameters()]) != 1:
        return None
    states = sample((3, len(weight)), weight.device, weight.dtype)
    try:
        return epsilon if near(module(states), rms_normed(states, weight, epsilon)) else None
    except Exception:  # of any kind: a module that wants other arguments
        return None


def _norm(module: torch.nn.Module, epsilon: float, kernels: Kernels) -> Callable[..., Any]:
    own: Callable[..., Any] = module.forward

    def forward(states: torch.Tensor, *more: Any, **named: Any) -> Any:
        weight: Any = module.weight
        if more or named or states.dtype != weight.dtype:  # of two types, the wider comes out
            return own(states, *more, **named)
        return kernels.rms_norm(states, weight, epsilon)

    return forward


def _is_gate(module: Any, kind: torch.dtype) -> bool:
    """Tell if a module computes down(SiLU(gate(x)) * up(x)) for states of this type."""
    layers = module._modules.keys()
    sources = {"gate_up_proj"} if "gate_up_proj" in layers else {"gate_proj", "up_proj"}
    activation = next(filter(None, (getattr(module, name, None) for name in _ACTIVATIONS)), None)
    if not layers >= {*sources, "down_proj"} or activation is None:
        return False
    width = getattr(module._modules[min(sources)], "in_features", None)
    if not isinstance(width, int):
        return False
    device = next(module.parameters()).device
    line, states = torch.linspace(-5, 5, 64, device=device), sample((1, 3, width), device, kind)
    try:
        gate, up = _gate_and_up(module, states)
        product = module.down_proj(silu(gate) * up)
        return near(activation(line), silu(line)) and near(module(states), product)
    except Exception:  # of any kind: a module that wants other arguments
        return False


def _gate(module: Any, kernels: Kernels) -> Callable[..., Any]:
    own: Callable[..., Any] = module.forward

    def forward(states: torch.Tensor, *more: Any, **named: Any) -> Any:
        if more or named or not states.numel():
            return own(states, *more, **named)
        return module.down_proj(kernels.silu_mul(*_gate_and_up(module, states)))

    return forward


def _gate_and_up(module: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = module._modules.get("gate_up_proj")
    if both is None:
        return module.gate_proj(states), module.up_proj(states)
    gate, up = both(states).chunk(2, -1)
    return gate, up


def liger() -> Kernels:
    """Kernels of liger-kernel."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def rms_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        in_place = False
        options = (epsilon, 0.0, "llama", in_place)
        return LigerRMSNormFunction.apply(states, weight, *options)  # type: ignore[no-any-return]

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
        loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(
            states, weight, targets, bias, *options, sum_in
        )
        return loss  # type: ignore[no-any-return]

    return Kernels(
        title=f"liger-kernel {metadata.version('liger-kernel')}",
        rms_norm=rms_norm,
        silu_mul=LigerSiLUMulFunction.apply,
        cross_entropy=cross_entropy,
    )
