"""Weights of linear layers in the layout that a CPU's kernels read, made when a model is loaded.

PyTorch's fp32 product goes to MKL with the matrix as it lies in memory; for the few rows of a
decoding step that is far from what the processor can do, the more so on processors that MKL was not
written for. oneDNN keeps a matrix in blocks of the width of its vector registers. The same sums
in the same format, in another order: texts stay the same up to rounding.

The plain matrix is given up for the packed one, so that memory stays. The last layer's matrix that
is also the embeddings' cannot be given up; it stays plain and becomes the left operand of the
product, whose layout oneDNN takes as it is: the texts, small, are then what is brought into blocks.

A model in int8 multiplies in int8: activations are brought to 8 bits, with a scale for each row,
just before. A gated feed-forward layer (SwiGLU) is three products; the first two also compute the
activation and the gate, where they would have gone through memory twice more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from workloads.errors import Unsupported

#: For so many rows at a time the layout is chosen; others run too.
_ROWS = 32
#: How far results that are alike may be apart, as a share of their size.
_ALIKE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class PackedLinear(torch.nn.Module):
    """Stands in for a ``torch.nn.Linear`` in inference; input [..., in], output [..., out]."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)

    def forward(self, inputs: torch.Tensor, then: str = "none") -> torch.Tensor:
        """The product, and what oneDNN calls ``then`` of it."""
        return torch.ops.mkldnn._linear_pointwise(  # type: ignore[no-any-return]
            inputs, self._packed, self._bias, then, [], ""
        )

    def times(self, inputs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The product, each number of it times one of ``factors``."""
        return torch.ops.mkldnn._linear_pointwise.binary(  # type: ignore[no-any-return]
            inputs, factors, self._packed, self._bias, "mul"
        )


class LeftLinear(torch.nn.Module):
    """As ``PackedLinear``, with the plain matrix: weight times inputs, seen the other way round."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        product = torch.ops.mkldnn._linear_pointwise(self.weight, rows, None, "none", [], "").t()
        if self.bias is not None:
            product = product + self.bias
        return product.reshape(*inputs.shape[:-1], -1)  # type: ignore[no-any-return]


class Rows8:
    """Activations in int8 with a scale for each row. Layers that read the same tensor (query, key
    and value; gate and up) have one of these together, so that it is converted once."""

    def __init__(self) -> None:
        self._of: torch.Tensor | None = None
        self._made: tuple[torch.Tensor, torch.Tensor]

    def __call__(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers [rows, in], and their scales [rows, 1]."""
        if inputs is not self._of:
            rows = inputs.reshape(-1, inputs.shape[-1])
            # In the activations' own format, since torch multiplies unlike formats one by one;
            # a little greater, so that none is beyond 127 although the scale is rounded.
            scales = rows.abs().amax(-1, keepdim=True).mul_(1.01 / 127).clamp_min_(1e-30)
            self._made = rows.float().div_(scales.float()).round_().to(torch.int8), scales
            self._of = inputs
        return self._made


class Int8Linear(torch.nn.Module):
    """Stands in for a linear layer whose weights torchao keeps in int8, a scale for each output."""

    def __init__(self, linear: torch.nn.Linear, rows: Rows8) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()
        weight: Any = linear.weight
        self._packed = torch.ops.onednn.qlinear_prepack(weight.qdata, [_ROWS, linear.in_features])
        self._scales = weight.scale.detach().flatten().float()
        self._zeros = torch.zeros(linear.out_features, dtype=torch.int64)
        self._rows = rows

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows, scales = self._rows(inputs)
        weights = self._packed, self._scales, self._zeros
        product = torch.ops.onednn.qlinear_pointwise(
            *(rows, 1.0, 0, *weights, None, 1.0, 0, inputs.dtype, "none", [], "")
        ).mul_(scales)
        if self._bias is not None:
            product += self._bias
        return product.view(*inputs.shape[:-1], -1)  # type: ignore[no-any-return]


class GatedProduct(torch.nn.Module):
    """Stands in for a gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear) -> None:
        super().__init__()
        self.gate, self.up, self.down = PackedLinear(gate), PackedLinear(up), PackedLinear(down)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        gate = self.gate(inputs, "swish")
        return self.down(self.up.times(inputs, gate))  # type: ignore[no-any-return]


def pack(model: torch.nn.Module) -> str:
    """Replace a model's linear layers, one after the other; what was done, for the row.

    Those whose matrix the model needs elsewhere as well keep it.

    Raises:
        Unsupported: this torch has no oneDNN, or the model no linear layer that can be packed.
    """
    if not torch.backends.mkldnn.is_available():
        raise Unsupported("packed_weights: this build of PyTorch comes without oneDNN")
    holders = Counter(
        id(matrix) for module in model.modules() for matrix in module.parameters(recurse=False)
    )
    with torch.no_grad():
        done = _pack_children(model, holders)
    layers = done[PackedLinear] + done[LeftLinear] + done[Int8Linear]
    if not done.total():
        raise Unsupported("packed_weights: the model has no plain linear layer on a CPU")
    parts = [f"{layers + 3 * done[GatedProduct]} layers"]
    if done[Int8Linear]:
        parts.append(f"{done[Int8Linear]} with activations in int8, a scale for each row")
    if done[GatedProduct]:
        parts.append(f"{done[GatedProduct]} gated feed-forward layers in one piece")
    return ", ".join(parts)


def _pack_children(module: torch.nn.Module, holders: Mapping[int, int]) -> Counter[type]:
    """Replace what can be packed within a module; how many of each kind.

    Goes by names and keeps no list of modules, so that each matrix is freed when it is packed.

    Args:
        module: whose children are replaced, and theirs.
        holders: of each matrix, by id, how many modules have it.
    """
    done, rows = Counter[type](), Rows8()
    for name in [name for name, _ in module.named_children()]:
        child = module.get_submodule(name)
        layer: torch.nn.Module | None
        if type(child) is not torch.nn.Linear:
            layer = _fused(child)
        elif child.weight.device.type != "cpu":
            layer = None
        elif _plain(child):
            layer = (LeftLinear if holders[id(child.weight)] > 1 else PackedLinear)(child)
        else:
            layer = Int8Linear(child, rows) if _int8_weight_only(child) else None
        if layer is None:
            done += _pack_children(child, holders)
        else:
            setattr(module, name, layer)
            done[type(layer)] += 1
    return done


def _plain(linear: torch.nn.Linear) -> bool:
    """Tell if the matrix is a tensor of torch's own."""
    return type(linear.weight) is torch.nn.Parameter and type(linear.weight.data) is torch.Tensor


def _int8_weight_only(linear: torch.nn.Linear) -> bool:
    """Tell if torchao keeps the matrix in int8 with a scale for each output, no offsets, and has
    nothing else to do at a product."""
    weight: Any = linear.weight
    numbers, offsets = getattr(weight, "qdata", None), getattr(weight, "zero_point", None)
    return (
        isinstance(numbers, torch.Tensor)
        and numbers.dtype is torch.int8
        and weight.scale.numel() == linear.out_features
        and getattr(weight, "act_quant_kwargs", None) is None
        and (offsets is None or not bool(offsets.any()))
    )


def _fused(module: torch.nn.Module) -> GatedProduct | None:
    """A layer in one piece that computes the same as a gated feed-forward module, if it is one.

    Its layers have the names that most models give them, and what comes out must be
    alike: a model may compute something else with layers of these names, from other inputs too.
    """
    layers = _gate_up_down(module)
    if layers is None or any(each.weight.device.type != "cpu" for each in layers):
        return None
    width = layers[0].in_features
    inputs = torch.arange(4 * width).sin().view(4, width).to(layers[0].weight.dtype)
    try:
        expected, fused = module(inputs), GatedProduct(*layers)
        got = fused(inputs)
    except Exception:  # whatever a forward of another kind makes of these inputs
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape != got.shape:
        return None
    off = torch.linalg.vector_norm((got - expected).float())
    if off > _ALIKE[inputs.dtype] * torch.linalg.vector_norm(expected.float()):
        return None
    return fused


def _gate_up_down(module: torch.nn.Module) -> tuple[torch.nn.Linear, ...] | None:
    """A feed-forward layer's three plain linear layers; the first two may lie in one matrix."""
    children = dict(module.named_children())
    linear = {name: child for name, child in children.items() if type(child) is torch.nn.Linear}
    if any(not _plain(each) or each.weight.dtype not in _ALIKE for each in linear.values()):
        return None
    if linear.keys() == {"gate_proj", "up_proj", "down_proj"}:
        return linear["gate_proj"], linear["up_proj"], linear["down_proj"]
    if linear.keys() == {"gate_up_proj", "down_proj"}:
        both = linear["gate_up_proj"]
        return (*_halves(both), linear["down_proj"])
    return None


def _halves(linear: torch.nn.Linear) -> Iterator[torch.nn.Linear]:
    """Two linear layers that together compute what one does, first outputs first."""
    half = linear.out_features // 2
    for at in (slice(half), slice(half, None)):
        part = torch.nn.Linear(linear.in_features, half, bias=False, device="meta")
        part.weight = torch.nn.Parameter(linear.weight[at], requires_grad=False)
        if linear.bias is not None:
            part.bias = torch.nn.Parameter(linear.bias[at], requires_grad=False)
        yield part
