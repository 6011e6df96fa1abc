"""Ranges of activations by each method, beside plain computations on the same values."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch

from workloads.compression import calibration
from workloads.data.datasets import load_dataset
from workloads.devices import device_for
from workloads.models.loading import load_causal_model, load_tokenizer, open_model
from workloads.models.precision import measure_ranges
from workloads.quantization import calibration_texts

METHODS = get_args(calibration.RangeMethod)
LAYER = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def chosen() -> tuple[np.ndarray, dict[str, float]]:
    """A layer's inputs on calibration texts, taken by a hook, and its range by each method."""
    source = open_model("tiny-chatglm3")
    model, device = load_causal_model(source, dtype=torch.float32).eval(), device_for("cpu")
    examples = load_dataset("advertisegen-synthetic").examples
    texts = calibration_texts(examples, load_tokenizer(source), 4, 32)
    inputs: list[torch.Tensor] = []
    hook = model.get_submodule(LAYER).register_forward_pre_hook(
        lambda _, given: inputs.append(given[0].flatten())
    )
    with torch.no_grad():
        for text in texts:
            model(input_ids=torch.tensor([text]), use_cache=False)
    hook.remove()
    measured = measure_ranges(model, texts, device)
    found = {
        method: calibration.narrowed(model, texts, device, measured, method)[LAYER][0]
        for method in METHODS
    }
    return torch.cat(inputs).numpy(), found


def in_int8(values: np.ndarray, largest: float) -> np.ndarray:
    scale = largest / 127
    return np.clip(np.round(values / scale), -127, 127) * scale


def test_ranges_end_where_plain_computations_put_them(chosen) -> None:
    values, found = chosen
    size = np.abs(values).astype(float)
    assert found["minmax"] == pytest.approx(size.max(), rel=1e-6)
    bin_width = size.max() / calibration.BINS
    assert found["percentile"] == pytest.approx(
        sorted(size)[math.ceil(0.9999 * len(size)) - 1], abs=2 * bin_width
    )
    assert found["mse"] < found["minmax"]
    errors = {
        end: float(((values - in_int8(values, end)) ** 2).sum())
        for end in np.linspace(0.06, 1, 300) * size.max()
    }
    own = float(((values - in_int8(values, found["mse"])) ** 2).sum())
    assert own <= 1.02 * min(errors.values())


def test_divergence_is_that_of_the_two_distributions(chosen) -> None:
    """A loop over bins and groups, without arrays."""
    values, found = chosen
    counts, _ = np.histogram(np.abs(values), calibration.BINS, (0, np.abs(values).max()))

    def reference(end: int) -> float:
        p = [float(count) for count in counts[:end]]
        p[-1] += float(counts[end:].sum())
        q = [0.0] * end
        for level in range(128):
            members = [bin for bin in range(end) if bin * 128 // end == level and counts[bin]]
            for bin in members:
                q[bin] = sum(float(counts[m]) for m in members) / len(members)
        whole, spread = sum(p), sum(q)
        return sum(
            a / whole * math.log(a / whole / max(b / spread, 1e-12))
            for a, b in zip(p, q, strict=True)
            if a
        )

    for end in (128, 500, 2048):
        assert calibration.divergence(counts, end) == pytest.approx(
            reference(end), rel=1e-9, abs=1e-12
        )
    ends = [*range(128, 2049, 16), 2048]
    best = min(ends, key=lambda end: calibration.divergence(counts, end))
    assert found["divergence"] == pytest.approx(best * np.abs(values).max() / 2048, rel=0.02)


def test_nothing_seen_keeps_the_range() -> None:
    for method in METHODS:
        assert calibration.choose(np.zeros(8), 3.0, method) == 3.0
