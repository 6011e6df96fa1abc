"""Products with weights in the layout that a CPU's kernels read, for inference.

PyTorch's fp32 product goes to MKL with the matrix as it lies in memory; for the few rows of a
decoding step that is far from what the processor can do, the more so on processors that MKL was not
written for. oneDNN keeps a matrix in blocks of the width of its vector registers. The same sums
in the same format, in another order: texts stay the same up to rounding.

A matrix that cannot be given up stays plain and becomes the left operand of the product, whose
layout oneDNN takes as it is: the texts, small, are then what is brought into blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

#: For so many rows at a time the layout is chosen; others run too.
_ROWS = 32
_ZERO = 128  # of activations in 8 bits
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

    def plus(self, inputs: torch.Tensor, summands: torch.Tensor) -> torch.Tensor:
        """The product, each number of it plus one of ``summands``."""
        return torch.ops.mkldnn._linear_pointwise.binary(  # type: ignore[no-any-return]
            inputs, summands, self._packed, self._bias, "add"
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
    """Activations in 8 bits with a scale for each row. Layers that read the same tensor (query, key
    and value; gate and up) have one of these together, so that it is converted once.

    They are unsigned, with 128 for zero: for signed ones oneDNN has its kernels on processors with
    AMX only, and elsewhere a reference kernel that takes a thousand times as long."""

    def __init__(self) -> None:
        self._of: torch.Tensor | None = None
        self._made: tuple[torch.Tensor, torch.Tensor]

    def __call__(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers [rows, in], 128 more than the quotients, and their scales [rows, 1]."""
        if inputs is not self._of:
            rows = inputs.reshape(-1, inputs.shape[-1])
            # In the activations' own format, since torch multiplies unlike formats one by one;
            # a little greater, so that none is beyond 127 although the scale is rounded.
            scales = rows.abs().amax(-1, keepdim=True).mul_(1.01 / 127).clamp_min_(1e-30)
            quotients = rows.float().div_(scales.float()).round_()
            self._made = quotients.add_(_ZERO).to(torch.uint8), scales
            self._of = inputs
        return self._made


class Int8Linear(torch.nn.Module):
    """Stands in for linear layers whose weights torchao keeps in int8, a scale for each output; for
    several that read the same inputs, one after the other."""

    def __init__(self, linear: Sequence[torch.nn.Linear], rows: Rows8) -> None:
        super().__init__()
        weights: list[Any] = [each.weight for each in linear]
        self.in_features = linear[0].in_features
        self.out_features = sum(each.out_features for each in linear)
        self._bias = joined_biases(linear)
        numbers = torch.cat([each.qdata for each in weights])
        self._packed = torch.ops.onednn.qlinear_prepack(numbers, [_ROWS, self.in_features])
        self._scales = torch.cat([each.scale.detach().flatten().float() for each in weights])
        self._zeros = torch.zeros(self.out_features, dtype=torch.int64)
        self._rows = rows

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product, scales = self._product(inputs)
        product.mul_(scales)
        if self._bias is not None:
            product += self._bias
        return product.view(*inputs.shape[:-1], -1)

    def plus(self, inputs: torch.Tensor, summands: torch.Tensor) -> torch.Tensor:
        """The product, each number of it plus one of ``summands``."""
        product, scales = self._product(inputs)
        found = torch.addcmul(summands.reshape(product.shape), product, scales)
        if self._bias is not None:
            found += self._bias
        return found.view(summands.shape)

    def _product(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the product, and the scale of each."""
        rows, scales = self._rows(inputs)
        weights = self._packed, self._scales, self._zeros
        product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rows, 1.0, _ZERO, *weights, None, 1.0, 0, inputs.dtype, "none", [], "")
        )
        return product, scales


class Int8Gated:
    """A gated feed-forward layer in int8, its first two matrices as one."""

    def __init__(self, gates: Sequence[torch.nn.Linear], down: torch.nn.Linear) -> None:
        self._gates, self._down = Int8Linear(gates, Rows8()), Int8Linear([down], Rows8())

    def plus(self, inputs: torch.Tensor, summands: torch.Tensor) -> torch.Tensor:
        """The layer's output plus ``summands``."""
        gate, up = self._gates(inputs).chunk(2, dim=-1)
        return self._down.plus(torch.nn.functional.silu(gate) * up, summands)


class GatedProduct(torch.nn.Module):
    """Stands in for a gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear) -> None:
        super().__init__()
        self.gate, self.up, self.down = PackedLinear(gate), PackedLinear(up), PackedLinear(down)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(self._gated(inputs))  # type: ignore[no-any-return]

    def plus(self, inputs: torch.Tensor, summands: torch.Tensor) -> torch.Tensor:
        """The layer's output plus ``summands``."""
        return self.down.plus(self._gated(inputs), summands)

    def _gated(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.up.times(inputs, self.gate(inputs, "swish"))


def alike(got: Any, expected: Any) -> bool:
    """Tell if two results are the same up to rounding."""
    if not isinstance(expected, torch.Tensor) or expected.shape != got.shape:
        return False
    off = torch.linalg.vector_norm((got - expected).float())
    return bool(off <= _ALIKE[got.dtype] * torch.linalg.vector_norm(expected.float()))


def is_plain(linear: torch.nn.Linear) -> bool:
    """Tell if the matrix is a tensor of torch's own."""
    return type(linear.weight) is torch.nn.Parameter and type(linear.weight.data) is torch.Tensor


def gate_up_down(module: torch.nn.Module) -> tuple[torch.nn.Linear, ...] | None:
    """A feed-forward layer's three plain linear layers; the first two may lie in one matrix."""
    children = dict(module.named_children())
    linear = {name: child for name, child in children.items() if type(child) is torch.nn.Linear}
    if any(not is_plain(each) or each.weight.dtype not in _ALIKE for each in linear.values()):
        return None
    if linear.keys() == {"gate_proj", "up_proj", "down_proj"}:
        return linear["gate_proj"], linear["up_proj"], linear["down_proj"]
    if linear.keys() == {"gate_up_proj", "down_proj"}:
        both = linear["gate_up_proj"]
        return (*_halves(both), linear["down_proj"])
    return None


def is_int8(linear: torch.nn.Linear) -> bool:
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


def joined(parts: Sequence[torch.nn.Linear]) -> torch.nn.Linear:
    """A linear layer that computes what several compute of the same inputs, in this order."""
    out = sum(part.out_features for part in parts)
    whole = torch.nn.Linear(parts[0].in_features, out, bias=False, device="meta")
    weight = torch.cat([part.weight for part in parts])
    whole.weight = torch.nn.Parameter(weight, requires_grad=False)
    if (bias := joined_biases(parts)) is not None:
        whole.bias = torch.nn.Parameter(bias, requires_grad=False)
    return whole


def joined_biases(parts: Sequence[torch.nn.Linear]) -> torch.Tensor | None:
    """Biases one behind the other; None where no layer has one."""
    held = next((part.bias for part in parts if part.bias is not None), None)
    if held is None:
        return None
    zeros = held.new_zeros
    return torch.cat([zeros(p.out_features) if p.bias is None else p.bias.detach() for p in parts])


def _halves(linear: torch.nn.Linear) -> Iterator[torch.nn.Linear]:
    """Two linear layers that together compute what one does, first outputs first."""
    half = linear.out_features // 2
    for at in (slice(half), slice(half, None)):
        part = torch.nn.Linear(linear.in_features, half, bias=False, device="meta")
        part.weight = torch.nn.Parameter(linear.weight[at], requires_grad=False)
        if linear.bias is not None:
            part.bias = torch.nn.Parameter(linear.bias[at], requires_grad=False)
        yield part
