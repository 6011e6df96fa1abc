"""Fused kernels in one model: norms, gated layers and rotary embeddings.

Between its products a layer reads and writes its activations a dozen times; a fused kernel does all
of a norm, a gate or a rotation in one pass. The patches that packages bring for that replace
functions and classes of transformers, which every later job of the process would meet. Here the
modules of one model get another ``forward`` each, and lose it again. A module that computes in
another way than the kernel keeps its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear, silu

from workloads.training import turning
from workloads.training.kernels import Kernels, Pair, near, rms_normed, sample

#: The parts that are replaced, as the row names them.
NORMS, GATES, TURNS = "norms", "gated layers", "rotary embeddings"

#: Names under which gated layers keep their activation.
_ACTIVATIONS = ("act_fn", "activation_fn", "act")


def fuse(model: torch.nn.Module, kernels: Kernels) -> tuple[Counter[str], Callable[[], None]]:
    """Let the modules of a model compute by kernels.

    Returns:
        How many modules of each part do so now, and a function that makes the model as it was.
    """
    kind = next(p.dtype for p in model.parameters() if p.is_floating_point())
    turned = turning.turned_width(model)
    attentions: dict[type, Any] = {}  # their forward by a kernel, or None
    chosen: list[tuple[torch.nn.Module, str, Callable[..., Any]]] = []
    with torch.no_grad():
        for module in list(model.modules()):
            part, forward = TURNS, None
            if (epsilon := _epsilon(module)) is not None:
                part, forward = NORMS, _norm(module, epsilon, kernels)
            elif _is_gate(module, kind):
                part, forward = GATES, _gate(module, kernels)
            elif turned is not None:
                if type(module) not in attentions:
                    made = turning.forward_by(module, turned, kernels.turn)
                    attentions[type(module)] = made
                if attentions[type(module)] is not None:
                    forward = MethodType(attentions[type(module)], module)
            if forward is not None:
                chosen.append((module, part, forward))
    # Only now: a trial that is cut short leaves the model as it was.
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


# ------------------------------------------------------------------ norms


def _epsilon(module: torch.nn.Module) -> float | None:
    """The epsilon of a norm by root mean square; None: the module is none."""
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


# ------------------------------------------------------------------ gated layers


def _is_gate(module: Any, kind: torch.dtype) -> bool:
    """Tell if a module is a product of SiLU(gate) * up, which are products of its input.

    Args:
        module: any.
        kind: of a model's states.
    """
    layers = module._modules.keys()
    sources = {"gate_up_proj"} if "gate_up_proj" in layers else {"gate_proj", "up_proj"}
    activation = next((found for n in _ACTIVATIONS if (found := getattr(module, n, None))), None)
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


def _gate_and_up(module: Any, states: torch.Tensor) -> Pair:
    """Gate and up of a gated layer, [..., width] each, for an input."""
    both = module._modules.get("gate_up_proj")
    if both is None:
        return module.gate_proj(states), module.up_proj(states)
    if not _is_frozen_product(both):
        gate, up = both(states).chunk(2, -1)
        return gate, up
    # Two products: kernels want their inputs each in one piece, and would copy the halves of one.
    weights = both.weight.chunk(2)
    biases = (None, None) if both.bias is None else both.bias.chunk(2)
    gate, up = (linear(states, w, b) for w, b in zip(weights, biases, strict=True))
    return gate, up


def _is_frozen_product(layer: Any) -> bool:
    """Tell if a layer is a plain product that learns nothing, and to which nothing listens."""
    return bool(
        type(layer) is torch.nn.Linear
        and type(layer.weight) is torch.nn.Parameter
        and not any(parameter.requires_grad for parameter in layer.parameters())
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )
