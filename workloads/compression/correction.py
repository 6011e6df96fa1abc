"""Correction of a quantised model's outputs: the mean and variance of each linear layer are brought
back to those of the plain model on the same texts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workloads.models.precision import hidden_layers

if TYPE_CHECKING:
    import torch

    from workloads.devices.base import Device


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and standard deviation of a layer's outputs over all tokens, [outputs] each."""

    mean: torch.Tensor
    deviation: torch.Tensor


def _moments(outputs: torch.Tensor) -> Moments:
    rows = outputs.detach().reshape(-1, outputs.shape[-1]).float()
    return Moments(rows.mean(0), rows.std(0, correction=0))


def _pass(
    model: Any,
    texts: Sequence[Sequence[int]],
    device: Device,
    see: Callable[[str, Any, torch.Tensor], torch.Tensor | None],
) -> None:
    """Read all texts at once, without the output layer, and pass each linear layer's first output
    to ``see``; what that returns takes the output's place."""
    import torch

    seen: set[str] = set()

    def hook(name: str) -> Any:
        def once(layer: Any, _: Any, output: torch.Tensor) -> torch.Tensor | None:
            if name in seen:
                return None
            seen.add(name)
            return see(name, layer, output)

        return once

    hooks = [layer.register_forward_hook(hook(n)) for n, layer in hidden_layers(model).items()]
    inner = getattr(model, model.base_model_prefix or "model", model)
    try:
        with torch.no_grad():
            ids = torch.tensor([list(text) for text in texts], device=device.torch_device)
            inner(input_ids=ids, use_cache=False)
    finally:
        for one in hooks:
            one.remove()


def output_moments(
    model: Any, texts: Sequence[Sequence[int]], device: Device
) -> dict[str, Moments]:
    """Moments of the outputs of the linear layers that the texts reach, by name; the texts are of
    one length."""
    moments: dict[str, Moments] = {}

    def see(name: str, _: Any, output: torch.Tensor) -> None:
        moments[name] = _moments(output)

    _pass(model, texts, device, see)
    return moments


def mean_error(moments: Mapping[str, Moments], wanted: Mapping[str, Moments]) -> float:
    """Mean absolute difference of all channels' mean outputs from those wanted."""
    import torch

    names = [name for name in wanted if name in moments]
    return float(
        torch.cat([(moments[n].mean - wanted[n].mean).abs().flatten() for n in names]).mean()
    )


def add_biases(model: Any) -> int:
    """Give layers a bias of zeros where the model's configuration has a switch for it
    (``attention_bias``, ``mlp_bias``), which is switched on; return their number."""
    import torch

    config = copy.deepcopy(model.config)
    switches = [n for n in ("attention_bias", "mlp_bias") if getattr(config, n, None) is False]
    for name in switches:
        setattr(config, name, True)
    if not switches:
        return 0
    with torch.device("meta"):
        named = dict(type(model)(config).named_modules())
    count = 0
    for name, layer in hidden_layers(model).items():
        if layer.bias is None and getattr(named.get(name), "bias", None) is not None:
            zeros = torch.zeros(layer.out_features, device=layer.weight.device, dtype=model.dtype)
            layer.bias = torch.nn.Parameter(zeros, requires_grad=False)
            count += 1
    for name in switches if count else ():
        setattr(model.config, name, True)
    return count


#: A row's scale changes by at most this factor: channels that hardly vary are noise.
_MOST_SCALED = 2.0


def correct_outputs(
    model: Any,
    wanted: Mapping[str, Moments],
    texts: Sequence[Sequence[int]],
    device: Device,
    *,
    mean: bool = True,
    variance: bool = False,
) -> tuple[int, int]:
    """Bring each layer's outputs back to the moments that the plain model's have.

    Layers are corrected in the order in which they run, by what they compute on the texts as they
    are quantised, after the corrections before them. Returns how many biases and how many layers'
    scales were corrected.
    """
    import torch

    biases = scales = 0

    def see(name: str, layer: Any, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal biases, scales
        if name not in wanted:
            return None
        made, goal = _moments(output), wanted[name]
        bias = torch.zeros_like(made.mean) if layer.bias is None else layer.bias.float()
        whole, centre = output.float(), made.mean
        if variance:
            known = (made.deviation > 0) & (goal.deviation > 0)
            factors = torch.where(known, goal.deviation / made.deviation, 1.0)
            factors = factors.clamp(1 / _MOST_SCALED, _MOST_SCALED)
            scale = getattr(layer.weight, "scale", None)  # not in every layout one a row
            if scale is not None and scale.dim() == 2 and len(scale) == len(factors):
                scale.mul_(factors[:, None].to(scale.dtype))
                scales += 1
                whole, centre = (whole - bias) * factors + bias, (centre - bias) * factors + bias
        if mean and layer.bias is not None:
            lost = goal.mean - centre
            layer.bias.data += lost.to(layer.bias.dtype)
            whole = whole + lost
            biases += 1
        return whole.to(output.dtype)

    _pass(model, texts, device, see)
    return biases, scales
