"""Libraries that store weights in fewer bits, and bias correction.

AutoRound learns from texts and writes a directory; torchao and bitsandbytes convert weights while
transformers loads them. Bias correction adds to each bias what the layer's mean output lost.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.base import Unsupported
from workloads.data.cache import cache_root
from workloads.models.precision import watch_inputs

if TYPE_CHECKING:
    import torch

    from workloads.devices.base import Device
    from workloads.quantization import QuantizationParameters

#: Weights per scale: int4's default, and NF4's.
INT4_GROUP, NF4_BLOCK = 32, 64

#: The library's default.
AUTO_ROUND_ITERS = 200


def learn_rounding(
    plain: Any,
    tokenizer: Any,
    parameters: QuantizationParameters,
    texts: Sequence[Sequence[int]],
    ending: contextlib.ExitStack,
) -> Path:
    """Run AutoRound and return the directory that it wrote; Unsupported without the package."""
    try:
        from auto_round import AutoRound
    except ImportError as error:
        raise Unsupported(
            "method auto-round needs the package auto-round, for Python 3.11 and newer: "
            f"pip install 'nightgrid[auto-round]' ({error})"
        ) from error
    directory = ending.enter_context(tempfile.TemporaryDirectory(dir=cache_root()))
    learner = AutoRound(
        plain,
        tokenizer,
        scheme="W4A16",
        group_size=parameters.group_size or INT4_GROUP,
        iters=AUTO_ROUND_ITERS if parameters.iters is None else parameters.iters,
        nsamples=parameters.samples,
        seqlen=parameters.length,
        # Twice, since re-encoded texts may get shorter and AutoRound skips short ones.
        dataset=[tokenizer.decode([*ids, *ids]) for ids in texts],
        device_map=str(plain.device),
        enable_torch_compile=False,
    )
    _, folders = learner.quantize_and_save(f"{directory}/model", format="auto_round")
    return Path(folders[0] if isinstance(folders, (list, tuple)) else folders)


def library_config(parameters: QuantizationParameters, dtype: torch.dtype) -> Any:
    """Quantization configuration for transformers; Unsupported if a package is missing."""
    import torch
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if parameters.numbers == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    try:
        from torchao.quantization import (
            Float8WeightOnlyConfig,
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            PerGroup,
        )
    except ImportError as error:
        raise Unsupported(f"quantization needs torchao: {error}") from error
    if parameters.numbers == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    if parameters.numbers == "fp8":
        return TorchAoConfig(Float8WeightOnlyConfig())
    return TorchAoConfig(
        IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]
            granularity=PerGroup(parameters.group_size or INT4_GROUP),
        )
    )


#: A layer's mean input [1, …, width], and the plain layer's output of it without bias.
MeanOutput = tuple["torch.Tensor", "torch.Tensor"]


def mean_outputs(
    model: Any, texts: Sequence[Sequence[int]], device: Device
) -> dict[str, MeanOutput]:
    """Mean inputs and outputs of the linear layers with bias that the texts reach, by name."""
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

    watch_inputs(model, layers, texts, device, add)
    outputs = {}
    for name, total in sums.items():
        layer = layers[name]
        mean = (total / rows[name]).to(layer.weight.dtype)
        with torch.no_grad():
            outputs[name] = (mean, torch.nn.functional.linear(mean, layer.weight))
    return outputs


def correct_biases(model: Any, outputs: dict[str, MeanOutput]) -> int:
    """Add to each layer's bias what its mean output lost; return the number of layers."""
    import torch

    for name, (mean, wanted) in outputs.items():
        layer = model.get_submodule(name)
        with torch.no_grad():
            lost = wanted - (layer(mean) - layer.bias)
            layer.bias += lost.flatten().to(layer.bias.dtype)
    return len(outputs)
