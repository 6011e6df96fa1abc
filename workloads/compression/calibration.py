"""Calibration of quantised models on texts: ranges of activations, and correction of outputs.

int8 has 127 steps on either side of zero. A range up to the largest value wastes them on outliers;
a narrower one cuts those off and is finer elsewhere. *percentile* cuts one of 10,000 values; *mse*
takes the range whose rounding and cutting have the least squared error; *divergence* the one after
which the distribution of values differs least (Kullback and Leibler, as TensorRT chooses). The last
two are searched among parts of a histogram of absolute values.

Correction brings the mean and variance of each linear layer's outputs back to those of the plain
model on the same texts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from workloads.models.precision import Ranges, hidden_layers, watch_inputs

if TYPE_CHECKING:
    import torch

    from workloads.devices.base import Device

RangeMethod = Literal["minmax", "percentile", "mse", "divergence"]

#: Bins of absolute values, and int8's steps on one side of zero.
BINS, STEPS = 2048, 127
#: Share of values within the range of *percentile*.
WITHIN = 0.9999
#: Candidates are every so many bins.
_STRIDE = 16

Counts = np.ndarray[Any, Any]


def choose(counts: Counts, largest: float, method: RangeMethod) -> float:
    """Return the upper end of the range for a histogram of absolute values in [0, largest].

    ``counts`` [bins] are of equally wide bins; an empty one keeps ``largest``.
    """
    if method == "minmax" or not counts.sum() or largest <= 0:
        return largest
    width = largest / len(counts)
    if method == "percentile":
        within = np.searchsorted(np.cumsum(counts), WITHIN * counts.sum()) + 1
        return float(min(within, len(counts)) * width)
    ends = [*range(STEPS + 1, len(counts) + 1, _STRIDE), len(counts)]
    loss = squared_error if method == "mse" else divergence
    losses = [loss(counts, end) for end in ends]
    return float(ends[int(np.argmin(losses))] * width)


def squared_error(counts: Counts, end: int) -> float:
    """Sum of squared errors of int8 with a range of ``end`` bins, in bins²."""
    values = np.arange(len(counts)) + 0.5
    step = end / STEPS
    rounded = np.clip(np.round(values / step), 0, STEPS) * step
    return float((counts * (values - rounded) ** 2).sum())


def divergence(counts: Counts, end: int) -> float:
    """KL divergence of the values as int8 has them, with a range of ``end`` bins, from those cut to
    that range."""
    inside = counts[:end].astype(np.float64)
    cut = inside.copy()
    cut[-1] += counts[end:].sum()
    group = np.arange(end) * (STEPS + 1) // end
    occupied = inside > 0
    sums = np.bincount(group, inside, STEPS + 1)
    sharing = np.bincount(group, occupied, STEPS + 1)
    spread = np.where(occupied, (sums / np.maximum(sharing, 1))[group], 0.0)
    if not spread.sum():
        return float("inf")
    p, q = cut / cut.sum(), np.maximum(spread / spread.sum(), 1e-12)
    some = p > 0
    return float((p[some] * np.log(p[some] / q[some])).sum())


def narrowed(
    model: Any, texts: Sequence[Sequence[int]], device: Device, ranges: Ranges, method: RangeMethod
) -> Ranges:
    """Return the layers' ranges by a method, given those by minimum and maximum; reads the texts
    once more."""
    if method == "minmax":
        return ranges
    import torch

    layers = {name: model.get_submodule(name) for name in ranges}
    counts = {name: np.zeros(BINS) for name in ranges}

    def see(name: str, tensor: torch.Tensor) -> None:
        largest = ranges[name][0]
        if largest > 0:
            found = torch.histc(tensor.abs().float().flatten(), BINS, 0, largest)
            counts[name] += found.cpu().numpy()

    watch_inputs(model, layers, texts, device, see)
    return {
        name: (choose(counts[name], largest, method), dimensions)
        for name, (largest, dimensions) in ranges.items()
    }


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
