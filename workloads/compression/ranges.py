"""Ranges of activations for static int8, from what calibration texts show.

int8 has 127 steps on either side of zero. A range up to the largest value wastes them on outliers;
a narrower one cuts those off and is finer elsewhere. *percentile* cuts one of 10,000 values; *mse*
takes the range whose rounding and cutting have the least squared error; *divergence* the one after
which the distribution of values differs least (Kullback and Leibler, as TensorRT chooses). The last
two are searched among parts of a histogram of absolute values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from workloads.models.precision import Ranges, watch_inputs

if TYPE_CHECKING:
    import torch

    from workloads.devices.base import Device

Method = Literal["minmax", "percentile", "mse", "divergence"]

#: Bins of absolute values, and int8's steps on one side of zero.
BINS, STEPS = 2048, 127
#: Share of values within the range of *percentile*.
WITHIN = 0.9999
#: Candidates are every so many bins.
_STRIDE = 16

Counts = np.ndarray[Any, Any]


def choose(counts: Counts, largest: float, method: Method) -> float:
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
    model: Any, texts: Sequence[Sequence[int]], device: Device, ranges: Ranges, method: Method
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
