"""Joint computation of LoRA adapters whose layers read the same input (query, key, value).

peft computes a frozen product, two thin ones, a scaling and a sum per layer, and launching thin
products dominates. Here all layers of one input share one frozen product, one with their stacked A
matrices and one with a block diagonal of their scaled B matrices. Parameters stay in place, so
training, saving and merging are unchanged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch.nn.functional import linear

from workloads.base import Unsupported


class Group:
    """Layers that read one input, in call order."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        bases = [layer.base_layer for layer in layers]
        self.sizes = [base.out_features for base in bases]
        self.weight = torch.cat([base.weight.detach() for base in bases])
        self.bias = _stacked(bases)
        for base, rows in zip(bases, self.weight.split(self.sizes), strict=True):
            base.weight.data = rows  # no second copy of what is frozen
        self.given: torch.Tensor | None = None  # input of the pending outputs
        self.made: tuple[torch.Tensor, ...] = ()

    def output(self, layer: Any, given: torch.Tensor) -> torch.Tensor:
        """Return one layer's output; the first call computes those of all layers."""
        if self.given is not given:
            self.given, self.made = given, self.outputs(given)
        output = self.made[layer.place]
        if layer.place == len(self.sizes) - 1:
            self.given, self.made = None, ()
        return output

    def outputs(self, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All layers' outputs for an input [..., width]."""
        named = [(layer, layer.active_adapters[0]) for layer in self.layers]
        down = torch.cat([layer.lora_A[name].weight for layer, name in named])
        ups = (layer.lora_B[name].weight * layer.scaling[name] for layer, name in named)
        up = torch.block_diag(*ups)
        frozen = linear(given, self.weight, self.bias)
        thin = linear(given.to(down.dtype), down)
        if frozen.dtype == thin.dtype == up.dtype:
            flat = torch.addmm(frozen.flatten(0, -2), thin.flatten(0, -2), up.t())
            whole = flat.view(frozen.shape)
        else:  # an adapter in 32 bits over weights in 16
            whole = (frozen + linear(thin, up)).to(frozen.dtype)
        # Unlike `split`, parts may be changed in place; the whole is not read again.
        return torch.unsafe_split_with_sizes(whole, self.sizes, -1)


class Together(Linear):
    """A layer with an adapter that is computed with its group."""

    group: Group
    place: int

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the same as peft's layer."""
        return self.group.output(self, x)


def put_together(model: Any, look: Callable[[], object]) -> tuple[int, Callable[[], None]]:
    """Group a peft model's LoRA layers by input; return the number of groups and an undo function.

    ``look`` runs the model once, to record inputs. Unsupported if no layer has a plain LoRA.
    """
    layers = [layer for layer in model.modules() if type(layer) is Linear and _plain(layer)]
    calls: list[tuple[Any, torch.Tensor]] = []  # inputs too, so that no id is reused
    hooks = [
        layer.register_forward_pre_hook(lambda layer, given: calls.append((layer, given[0])))
        for layer in layers
    ]
    try:
        with torch.no_grad():
            look()
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(layer for layer, _ in calls)
    met: dict[Any, list[Any]] = defaultdict(list)
    for layer, given in calls:
        if times[layer] == 1:
            weight = layer.base_layer.weight
            met[id(given), weight.dtype, weight.device].append(layer)
    groups = [Group(readers) for readers in met.values()]
    if not groups:
        raise Unsupported("adapter_products together: no layer has a plain LoRA over a plain layer")
    for group in groups:
        for place, layer in enumerate(group.layers):
            layer.__class__, layer.group, layer.place = Together, group, place

    def undo() -> None:
        while groups:  # one by one, freeing each tensor before the next copy
            group = groups.pop()
            for layer in group.layers:
                layer.__class__ = Linear
                del layer.group, layer.place
                layer.base_layer.weight.data = layer.base_layer.weight.data.clone()

    return len(groups), undo


def _plain(layer: Any) -> bool:
    """Tell if a layer adds one LoRA, and nothing else, to a frozen product."""
    base, active = layer.base_layer, list(layer.active_adapters)
    return bool(
        len(active) == 1
        and active[0] in layer.lora_A
        and active[0] not in layer.lora_variant
        and isinstance(layer.lora_dropout[active[0]], torch.nn.Identity)
        and layer.lora_B[active[0]].bias is None
        and not layer.merged
        and not layer.disable_adapters
        and not layer.fan_in_fan_out
        and type(base) is torch.nn.Linear
        and type(base.weight) is torch.nn.Parameter
        and not any(parameter.requires_grad for parameter in base.parameters())
    )


def _stacked(bases: list[Any]) -> torch.Tensor | None:
    """Concatenated biases, zeros for layers without; None if no layer has one."""
    if all(base.bias is None for base in bases):
        return None
    return torch.cat(
        [
            base.weight.new_zeros(base.out_features) if base.bias is None else base.bias.detach()
            for base in bases
        ]
    )
