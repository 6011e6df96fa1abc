"""Tensor parallelism: each matrix split over cards, by transformers' plan for the model.

*Column* layers split outputs, *row* layers inputs, with summed results; a pair (attention, MLP)
costs one sum forward and one backward. Unlike the plan, a fused ``gate_up_proj`` is split in both
halves, which saves a gather.

Weights stay plain tensors, so adapters, optimizers and DDP see a narrower model. Unsplit parts
(norms, embeddings) are computed in full, with equal gradients on all cards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from workloads.base import Unsupported
from workloads.training.parallel.exchange import Stamped
from workloads.training.parallel.layout import Groups, Layout, split_problem

if TYPE_CHECKING:
    from workloads.training.parallel.pipeline import Pipeline

#: Styles of transformers 4.5x and 5 -> column or row, and if the split side is whole outside.
_STYLES = {
    "colwise": ("column", False),
    "local_colwise": ("column", False),
    "colwise_rep": ("column", True),
    "colwise_gather_output": ("column", True),
    "rowwise": ("row", False),
    "local_rowwise": ("row", False),
    "rowwise_rep": ("row", True),
    "rowwise_split_input": ("row", True),
}
#: Unsplit layers that work on this rank's heads only, so their gradients are partial.
_SHARED = "replicated_with_grad_allreduce"
#: Layers of two fused ones, stacked, and the layer that takes both.
_FUSED = {"gate_up_proj": "down_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """This rank's part of every split matrix."""

    group: Any
    rank: int
    size: int
    exchange: Stamped | None = None  # gets the time of every collective in the group

    def timed(self) -> AbstractContextManager[None]:
        """Time a collective."""
        return self.exchange.timed() if self.exchange else nullcontext()

    def rows(self, total: int, fused: int = 1) -> torch.Tensor:
        """This rank's rows of ``total`` rows of ``fused`` layers in one."""
        share = total // fused // self.size
        first = torch.arange(share) + self.rank * share
        return torch.cat([first + layer * (total // fused) for layer in range(fused)])


def _summed(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    tensor = tensor.contiguous().clone()
    with part.timed():
        dist.all_reduce(tensor, group=part.group)
    return tensor


def _gathered(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    tensor = tensor.contiguous()
    pieces = [torch.empty_like(tensor) for _ in range(part.size)]
    with part.timed():
        dist.all_gather(pieces, tensor, group=part.group)
    return torch.cat(pieces, dim=-1)


def _sliced(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    return tensor.chunk(part.size, dim=-1)[part.rank].contiguous()


def _unchanged(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    return tensor.view_as(tensor)


class _Exchange(torch.autograd.Function):
    """Applies one function to a tensor and part, and another to the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, part: Part, there: Any, back: Any) -> Any:
        ctx.part, ctx.back = part, back
        return there(tensor, part)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.back(gradients[0], ctx.part), None, None, None


class ColumnLinear(nn.Linear):
    """A linear layer with some of the outputs; ``whole`` gathers those of all ranks."""

    part: Part
    whole: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(_Exchange.apply(input, self.part, _unchanged, _summed))
        return _Exchange.apply(output, self.part, _gathered, _sliced) if self.whole else output


class RowLinear(nn.Linear):
    """A linear layer over some of the inputs; ``whole`` takes its own from all of them."""

    part: Part
    whole: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        mine = _Exchange.apply(input, self.part, _sliced, _gathered) if self.whole else input
        product = nn.functional.linear(mine, self.weight)
        output = _Exchange.apply(product, self.part, _summed, _unchanged)
        return output if self.bias is None else output + self.bias  # once, not once a rank


def split(model: Any, layout: Layout, groups: Groups, exchange: Stamped | None = None) -> str:
    """Split a whole model in place and describe it for the row; Unsupported if impossible."""
    if problem := split_problem(vars(model.config), layout.tensor):
        raise Unsupported(problem)
    part = Part(group=groups.tensor, rank=layout.tensor_rank, size=layout.tensor, exchange=exchange)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    done = 0
    for name, (kind, whole, fused) in _plan(base).items():
        if kind == "shared":
            for parameter in base.get_submodule(name).parameters():
                if parameter.requires_grad:
                    parameter.register_hook(partial(_summed, part=part))
        else:
            done += _split_layer(base, name, kind, whole, fused, part)
    if not done:
        raise Unsupported(f"transformers has no tensor-parallel plan for {type(base).__name__}")
    return f"{done} layers split over {layout.tensor} cards by the plan of {type(base).__name__}"


def _plan(model: Any) -> dict[str, tuple[str, bool, int]]:
    """Every layer that the library's plan names: (column or row, whole outside, fused layers)."""
    inner = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = f"{model.base_model_prefix}."
    patterns = {prefix + pattern: style for pattern, style in inner.items()}
    patterns |= dict(getattr(type(model), "_tp_plan", None) or {})
    layers: dict[str, tuple[str, bool, int]] = {}
    names = [name for name, _ in model.named_modules()]
    for pattern, style in patterns.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name in filter(expression.fullmatch, names):
            if isinstance(model.get_submodule(name), nn.Embedding):
                continue  # stays whole, with the same result
            if style == _SHARED:
                layers[name] = ("shared", True, 1)
                continue
            if style not in _STYLES:
                raise Unsupported(
                    f"the tensor-parallel plan of {type(model).__name__} wants {name} to be "
                    f"{style!r}, which this version cannot do"
                )
            layers[name] = (*_STYLES[style], 1)
    for name in list(layers):
        stem, _, last = name.rpartition(".")
        taker = f"{stem}.{_FUSED.get(last)}"
        if layers.get(taker) == ("row", True, 1) and layers[name] == ("column", True, 1):
            layers[name], layers[taker] = ("column", False, 2), ("row", False, 1)
    return layers


def _split_layer(model: Any, name: str, kind: str, whole: bool, fused: int, part: Part) -> int:
    """Split one layer of the plan with its adapter; return the number split (0 or 1)."""
    layer = model.get_submodule(name)
    if layer is model.get_output_embeddings() and (
        layer.weight is model.get_input_embeddings().weight or layer.weight.shape[0] % part.size
    ):
        return 0  # tied to the embedding, or not divisible
    inside = getattr(layer, "base_layer", None)  # peft's wrapping
    plain = inside if inside is not None else layer
    if type(plain) is not nn.Linear:
        raise Unsupported(f"{name} is a {type(plain).__name__}; only plain weights can be split")
    stem, _, last = name.rpartition(".")
    if inside is None:
        setattr(model.get_submodule(stem), last, _narrow(plain, kind, whole, fused, part))
        return 1
    layer.base_layer = _narrow(plain, kind, whole, fused, part)
    if any(layer.use_dora.values()) or not hasattr(layer, "lora_A"):
        raise Unsupported(f"the adapter on {name} is not plain LoRA, which alone can be split")
    if whole:  # inputs and outputs are whole outside of the layer, and so is its adapter
        return 1
    # The rank stays whole: B of a column layer is split by outputs, A of a row layer by inputs.
    split_side = layer.lora_B if kind == "column" else layer.lora_A
    for adapter in list(split_side):
        split_side[adapter] = _narrow(split_side[adapter], kind, False, fused, part)
    return 1


def _narrow(layer: Any, kind: str, whole: bool, fused: int, part: Part) -> nn.Linear:
    weight, bias = layer.weight.data, layer.bias.data if layer.bias is not None else None
    if kind == "column":
        rows = part.rows(weight.shape[0], fused).to(weight.device)
        weight, bias = weight[rows], bias[rows] if bias is not None else None
    else:
        weight = weight[:, part.rows(weight.shape[1]).to(weight.device)].contiguous()
    made: Any = (ColumnLinear if kind == "column" else RowLinear)(
        weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype
    )
    made.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    made.weight.tensor_model_parallel = True  # DeepSpeed sums such parts in norms
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=layer.bias.requires_grad)
        made.bias.tensor_model_parallel = kind == "column"
    made.part, made.whole = part, whole
    return made.train(layer.training)  # type: ignore[no-any-return]


def total_norm(
    model: Any, parameters: Sequence[torch.nn.Parameter], pipeline: Pipeline | None = None
) -> torch.Tensor:
    """Norm of all gradients; called together by the ranks of one copy of the model."""
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
    pipeline: Pipeline | None = None,
) -> None:
    """Clip gradients by their total norm, as torch does."""
    scale = (limit / (total_norm(model, parameters, pipeline) + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
