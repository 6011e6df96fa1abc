"""Bias correction: what quantization takes from a layer's mean output goes into its bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workloads.static_activations import watch

if TYPE_CHECKING:
    import torch

    from workloads.devices.base import Device

#: A layer's mean input, all dimensions but the last of size 1, and what the plain layer makes of it
#: without its bias.
MeanOutput = tuple["torch.Tensor", "torch.Tensor"]


def mean_outputs(
    model: Any, texts: Sequence[Sequence[int]], device: Device
) -> dict[str, MeanOutput]:
    """The mean input of each linear layer with a bias over texts, and its output, by name; of
    layers that the texts reach (a mixture's experts may see none)."""
    import torch

    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.bias is not None
    }
    sums: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = {}

    def add(name: str, given: torch.Tensor) -> None:
        outer = tuple(range(given.dim() - 1))
        total = given.double().sum(outer, keepdim=True)
        sums[name] = sums.get(name, 0) + total  # type: ignore[operator]
        rows[name] = rows.get(name, 0) + given[..., 0].numel()

    watch(model, layers, texts, device, add)
    found = {}
    for name, total in sums.items():
        layer = layers[name]
        mean = (total / rows[name]).to(layer.weight.dtype)
        with torch.no_grad():
            found[name] = (mean, torch.nn.functional.linear(mean, layer.weight))
    return found


def correct_biases(model: Any, outputs: dict[str, MeanOutput]) -> int:
    """Add to each layer's bias what its mean output lost; the number of layers."""
    import torch

    for name, (mean, wanted) in outputs.items():
        layer = model.get_submodule(name)
        with torch.no_grad():
            lost = wanted - (layer(mean) - layer.bias)
            layer.bias += lost.flatten().to(layer.bias.dtype)
    return len(outputs)
