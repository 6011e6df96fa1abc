"""Weights of linear layers in the layout that a CPU's kernels read, made when a model is loaded.

PyTorch's fp32 product goes to MKL with the matrix as it lies in memory; for the few rows of a
decoding step that is far from what the processor can do, the more so on processors that MKL was not
written for. oneDNN keeps a matrix in blocks of the width of its vector registers. The same sums
in the same format, in another order: texts stay the same up to rounding.

The plain matrix is given up for the packed one, so that memory stays. The last layer's matrix that
is also the embeddings' cannot be given up; it stays plain and becomes the left operand of the
product, whose layout oneDNN takes as it is: the texts, small, are then what is brought into blocks.
"""

from __future__ import annotations

from collections import Counter

import torch

from workloads.errors import Unsupported

#: For so many rows at a time the layout is chosen; others run too.
_ROWS = 32


class PackedLinear(torch.nn.Module):
    """Stands in for a ``torch.nn.Linear`` in inference; input [..., in], output [..., out]."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(  # type: ignore[no-any-return]
            inputs, self._packed, self._bias, "none", [], ""
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


def pack(model: torch.nn.Module) -> int:
    """Replace a model's plain linear layers, one after the other; how many.

    Those whose matrix the model needs elsewhere as well keep it.

    Raises:
        Unsupported: this torch has no oneDNN, or the model no plain linear layer.
    """
    if not torch.backends.mkldnn.is_available():
        raise Unsupported("packed_weights: this build of PyTorch comes without oneDNN")
    found = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is torch.nn.Linear and child.weight.device.type == "cpu"
    ]
    if not found:
        raise Unsupported("packed_weights: the model has no plain linear layer on a CPU")
    holders = Counter(
        id(matrix) for module in model.modules() for matrix in module.parameters(recurse=False)
    )
    with torch.no_grad():
        for module, name, child in found:
            layer = LeftLinear if holders[id(child.weight)] > 1 else PackedLinear
            setattr(module, name, layer(child))
            del child
    return len(found)
