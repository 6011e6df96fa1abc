"""Fused kernels in one model: norms, gated layers and rotary embeddings.

Between its products a layer reads and writes its activations a dozen times; a fused kernel does all
of a norm, a gate or a rotation in one pass. The patches that packages bring for that replace
functions and classes of transformers, which every later job of the process would meet. Here the
modules of one model get another ``forward`` each, and lose it again. A kernel takes the place of a
model's own code only where that code is seen to compute the kernel's formula: both are tried on the
same numbers (``sample``, ``near``). The kernels are those of the package liger-kernel, in Triton.
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
    """Turn each element of the first half with the one at its place in the second (Llama): x
    [rows, heads, positions, width] by angles [rows or 1, positions, width] of two equal halves."""
    first, second = x.chunk(2, -1)
    return x * cosines[:, None] + torch.cat((-second, first), -1) * sines[:, None]


def turned_pairs(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn each element of an even place with the next, as far as cosines go; the rest stays (GLM).
    Shapes are those of ``turned_halves``, with fewer angles."""
    turned = cosines.shape[-1]
    cos, sin = (angles[:, None, :, : turned // 2] for angles in (cosines, sines))
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


#: The function by which attention layers turn queries and keys.
_TURN = "apply_rotary_pos_emb"


def turned_width(model: torch.nn.Module) -> int | None:
    """Elements of a head that a model turns; None: none, or not the same number everywhere."""
    tables = (getattr(module, "inv_freq", None) for module in model.modules())
    widths = {2 * table.numel() for table in tables if isinstance(table, torch.Tensor)}
    return widths.pop() if len(widths) == 1 else None


def forward_by(
    module: torch.nn.Module, turned: int, kernel: Callable[..., Pair]
) -> FunctionType | None:
    """The ``forward`` of an attention layer's class with queries and keys turned by a kernel (as
    ``Kernels.turn``), of whose heads ``turned`` elements are turned; None where the module turns
    nothing, or does so in a way of its own."""
    forward, head = type(module).forward, getattr(module, "head_dim", None)
    if not isinstance(forward, FunctionType) or _TURN not in forward.__code__.co_names:
        return None
    plain: Any = forward.__globals__.get(_TURN)
    if not isinstance(head, int):
        return None
    # A function that takes no whole heads is given what is turned alone.
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
    """Tell if a function turns queries and keys of a width by a formula."""
    results = _tried(plain, width, turned)
    expected = _tried(lambda q, k, *by: (formula(q, *by), formula(k, *by)), width, turned)
    if results is None or expected is None:
        return False
    return all(map(near, results, expected))


def _tried(plain: Any, width: int, turned: int) -> Pair | None:
    """A query and a key of a width, turned by a function; None: it does not take them."""
    angles = torch.arange(3.0)[None, :, None] * torch.linspace(0.1, 1, turned // 2)
    cos, sin = (torch.cat((half, half), -1) for half in (angles.cos(), angles.sin()))
    query, key = (sample((1, heads, 3, width), cos.device) for heads in (4, 2))
    try:
        query, key = plain(query, key, cos, sin)
    except Exception:  # of any kind: a function that takes others
        return None
    return query, key


class _Pairs:
    """Turns pairs of neighbours by a kernel that turns halves.

    Even places go to the first half and odd ones to the second, and stay there: a score is a sum
    over all places of query and key, in whatever order. What is not to be turned is turned by 0.
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
    """[rows, positions, turned] as [rows, positions, turned + 2 * rest], halves alike again."""
    half = angles[..., : angles.shape[-1] // 2]
    half = torch.cat((half, half.new_full((*half.shape[:-1], rest), fill)), -1)
    return torch.cat((half, half), -1)


def _evens_first(x: torch.Tensor) -> torch.Tensor:
    """A copy of [rows, heads, positions, width] with even places before odd ones. In memory its
    positions come before its heads, where kernels want them."""
    pairs = x.transpose(1, 2).unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).flatten(-2).transpose(1, 2)


#: The parts that are replaced, as the row names them.
NORMS, GATES, TURNS = "norms", "gated layers", "rotary embeddings"

#: Names under which gated layers keep their activation.
_ACTIVATIONS = ("act_fn", "activation_fn", "act")


def fuse(model: torch.nn.Module, kernels: Kernels) -> tuple[Counter[str], Callable[[], None]]:
    """Let the modules of a model compute by kernels; how many of each part do so now, and a
    function that makes the model as it was."""
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


def _is_gate(module: Any, kind: torch.dtype) -> bool:
    """Tell if a module is a product of SiLU(gate) * up, which are products of its input, states of
    this type."""
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


def liger() -> Kernels:
    """The kernels."""
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
