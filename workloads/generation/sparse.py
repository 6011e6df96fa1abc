"""Linear layers on a card's kernels for 2:4 sparsity, which skip two of every four inputs.

The weights must be such already: nothing is pruned here. torch keeps the two values that are
there and two bits for the place of each, 9/16 of the bytes in 16 bits. Matrices whose sizes the
kernels do not take stay dense.
"""

from __future__ import annotations

from typing import Any

from workloads.base import BadConfiguration
from workloads.compression import pruning

#: Sizes that the kernels want to divide a matrix's rows and columns, in 16 bits.
_ROWS, _COLUMNS = 32, 64


def use_kernels(model: Any) -> str:
    """Compress a model's linear layers in place; what was done.

    Raises:
        BadConfiguration: a layer has more than two values in a group of four, or none fits.
    """
    import torch
    from torch.sparse import to_sparse_semi_structured

    layers = pruning.prunable_layers(model)
    for name, layer in layers.items():
        if not is_two_of_four(layer.weight):
            raise BadConfiguration(
                f"sparse_kernels: {name} has more than two values in a group of four inputs; train "
                "the model with sparsity: 2:4"
            )
    fitting = [
        layer
        for layer in layers.values()
        if not (layer.out_features % _ROWS or layer.in_features % _COLUMNS)
    ]
    if not fitting:
        raise BadConfiguration(
            f"sparse_kernels: no layer has rows in multiples of {_ROWS} and inputs in multiples of "
            f"{_COLUMNS}"
        )
    for layer in fitting:
        sparse = to_sparse_semi_structured(layer.weight.detach())
        layer.weight = torch.nn.Parameter(sparse, requires_grad=False)
    return f"2:4 on the card's sparse kernels in {len(fitting)} of {len(layers)} layers"


def is_two_of_four(weight: Any) -> bool:
    """Tell if at most two of every four inputs have a value."""
    if weight.shape[1] % pruning.GROUP:
        return False
    values = (weight != 0).view(weight.shape[0], -1, pruning.GROUP).sum(2)
    return bool((values <= pruning.KEPT).all())
