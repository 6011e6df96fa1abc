"""Fused kernels (liger-kernel, Triton) in one model: norms, gated layers and rotary embeddings.

liger-kernel's own patches replace functions and classes of transformers and would affect later jobs
of the process; here the modules of one model get another ``forward`` and lose it again. A kernel is
used only where it computes the same as the model's code on sample numbers (``sample``, ``near``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch.nn.functional import linear, silu

from workloads.training.data import NOT_LEARNED
from workloads.training.losses import summed

Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Differentiable kernels of a package."""

    title: str  # of the package, with its version
    #: States [..., width], weight [width] of the same type, epsilon -> as ``rms_normed``. Must not
    #: change given gradients in place: both terms of a sum share one tensor.
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    #: Gate and up, [..., width] each -> SiLU(gate) * up. The backward pass may overwrite both.
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
    """States [..., width] over their root mean square (in float32), times a weight [width]."""
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(states.dtype)


def turned_halves(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate element i of the first half with i of the second (Llama).

    ``x`` is [rows, heads, positions, width]; angles [rows or 1, positions, width], halves equal.
    """
    first, second = x.chunk(2, -1)
    return x * cosines[:, None] + torch.cat((-second, first), -1) * sines[:, None]


def turned_pairs(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate even elements with the next ones as far as angles go (GLM); see ``turned_halves``."""
    turned = cosines.shape[-1]
    cos, sin = (angles[:, None, :, : turned // 2] for angles in (cosines, sines))
    even, odd = x[..., :turned:2], x[..., 1:turned:2]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return torch.cat((pairs.flatten(-2), x[..., turned:]), -1)


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


#: Function by which attention layers rotate queries and keys.
_TURN = "apply_rotary_pos_emb"


def turned_width(model: torch.nn.Module) -> int | None:
    """Elements of a head that a model rotates; None: none, or not equal everywhere."""
    tables = (getattr(module, "inv_freq", None) for module in model.modules())
    widths = {2 * table.numel() for table in tables if isinstance(table, torch.Tensor)}
    return widths.pop() if len(widths) == 1 else None


def forward_by(
    module: torch.nn.Module, turned: int, kernel: Callable[..., Pair]
) -> FunctionType | None:
    """An attention layer's ``forward`` with ``turned`` elements of heads rotated by a kernel.

    ``kernel`` is as ``Kernels.turn``. None if the layer rotates nothing, or by another formula.
    """
    forward, head = type(module).forward, getattr(module, "head_dim", None)
    if not isinstance(forward, FunctionType) or _TURN not in forward.__code__.co_names:
        return None
    plain: Any = forward.__globals__.get(_TURN)
    if not isinstance(head, int):
        return None
    # A function that rejects whole heads is given the rotated part only.
    halves = head == turned or _tried(plain, head, turned) is None
    turn: Callable[..., Pair]
    if _is(plain, turned_pairs, head, turned):
        turn = _Pairs(kernel)
    elif halves and _is(plain, turned_halves, turned, turned):
        turn = kernel
    else:
        return None

    def ours(*tensors: torch.Tensor, **more: Any) -> Any:
        if len(tensors) != 4 or more:
            return plain(*tensors, **more)
        return turn(*tensors)

    copy = FunctionType(
        forward.__code__,
        {**forward.__globals__, _TURN: ours},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _is(plain: Any, formula: Any, width: int, turned: int) -> bool:
    results = _tried(plain, width, turned)
    expected = _tried(lambda q, k, *by: (formula(q, *by), formula(k, *by)), width, turned)
    if results is None or expected is None:
        return False
    return all(map(near, results, expected))


def _tried(plain: Any, width: int, turned: int) -> Pair | None:
    """A query and a key of a width, rotated by a function; None if it fails."""
    angles = torch.arange(3.0)[None, :, None] * torch.linspace(0.1, 1, turned // 2)
    cos, sin = (torch.cat((half, half), -1) for half in (angles.cos(), angles.sin()))
    query, key = (sample((1, heads, 3, width), cos.device) for heads in (4, 2))
    try:
        query, key = plain(query, key, cos, sin)
    except Exception:  # of any kind: a function that takes others
        return None
    return query, key


class _Pairs:
    """Rotates pairs of neighbours by a kernel for halves.

    Even elements move to the first half and odd ones to the second, and stay there, since scores
    sum over all elements in any order. The rest is rotated by 0.
    """

    def __init__(self, kernel: Callable[..., Pair]) -> None:
        self._kernel = kernel
        self._cosines: torch.Tensor | None = None  # as given, the same for all layers of a pass
        self._widened: Pair | None = None  # for the whole head

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> Pair:
        if self._cosines is not cosines or self._widened is None:
            rest = (query.shape[-1] - cosines.shape[-1]) // 2
            self._widened = _widened(cosines, 1.0, rest), _widened(sines, 0.0, rest)
            self._cosines = cosines
        return self._kernel(_evens_first(query), _evens_first(key), *self._widened)


def _widened(angles: torch.Tensor, fill: float, rest: int) -> torch.Tensor:
    """Widen [rows, positions, turned] to [rows, positions, turned + 2 * rest], halves equal."""
    half = angles[..., : angles.shape[-1] // 2]
    half = torch.cat((half, half.new_full((*half.shape[:-1], rest), fill)), -1)
    return torch.cat((half, half), -1)


def _evens_first(x: torch.Tensor) -> torch.Tensor:
    """Copy [rows, heads, positions, width] evens first, positions before heads in memory."""
    pairs = x.transpose(1, 2).unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).flatten(-2).transpose(1, 2)


#: The parts that are replaced, as the row names them.
NORMS, GATES, TURNS = "norms", "gated layers", "rotary embeddings"

#: Names under which gated layers keep their activation.
_ACTIVATIONS = ("act_fn", "activation_fn", "act")


def fuse(model: torch.nn.Module, kernels: Kernels) -> tuple[Counter[str], Callable[[], None]]:
    """Make modules compute by kernels; return counts by part and an undo function."""
    kind = next(p.dtype for p in model.parameters() if p.is_floating_point())
    turned = turned_width(model)
    attentions: dict[type, Any] = {}  # their forward by a kernel, or None
    chosen: list[tuple[torch.nn.Module, str, Callable[..., Any]]] = []
    with torch.no_grad():
        for module in model.modules():
            part, forward = TURNS, None
            if (epsilon := _epsilon(module)) is not None:
                part, forward = NORMS, _norm(module, epsilon, kernels)
            elif _is_gate(module, kind):
                part, forward = GATES, _gate(module, kernels)
            elif turned is not None:
                if type(module) not in attentions:
                    attentions[type(module)] = forward_by(module, turned, kernels.turn)
                if (own := attentions[type(module)]) is not None:
                    forward = MethodType(own, module)
            if forward is not None:
                chosen.append((module, part, forward))
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


def _gate_and_up(module: Any, states: torch.Tensor) -> Pair:
    both = module._modules.get("gate_up_proj")
    if both is None:
        return module.gate_proj(states), module.up_proj(states)
    if not _is_frozen_product(both):
        gate, up = both(states).chunk(2, -1)
        return gate, up
    # Two products, since kernels need contiguous inputs and would copy halves.
    weights = both.weight.chunk(2)
    biases = (None, None) if both.bias is None else both.bias.chunk(2)
    gate, up = (linear(states, w, b) for w, b in zip(weights, biases, strict=True))
    return gate, up


def _is_frozen_product(layer: Any) -> bool:
    """Tell if a layer is a plain, frozen product without hooks."""
    return bool(
        type(layer) is torch.nn.Linear
        and type(layer.weight) is torch.nn.Parameter
        and not any(parameter.requires_grad for parameter in layer.parameters())
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )


def liger() -> Kernels:
    """Kernels of liger-kernel."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def rms_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        in_place = False
        options = (epsilon, 0.0, "llama", in_place)
        return LigerRMSNormFunction.apply(states, weight, *options)  # type: ignore[no-any-return]

    def turn(
        query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> Pair:
        query, key = LigerRopeFunction.apply(query, key, cosines, sines)
        return query, key

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
        turn=turn,
        cross_entropy=cross_entropy,
    )
