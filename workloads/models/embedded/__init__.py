"""Embedded models: random weights, bit-identical on all machines and numpy versions.

Configurations and tokenizers lie in a directory of the model's name beside this file.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.inspection.families import needed

if TYPE_CHECKING:
    import torch


def draw_weights(
    seed: int,
    shapes: Mapping[str, tuple[int, ...]],
    deviation: Callable[[str, tuple[int, ...]], float],
) -> dict[str, torch.Tensor]:
    """Return tensors in float32, drawn in order: ones for norms, zeros for a deviation of 0.

    Others have mean 0, uniform by a bit generator's raw output, a byte each.
    """
    import numpy
    import torch

    bits = numpy.random.PCG64(seed)
    tensors = {}
    for name, shape in shapes.items():
        if name.lower().endswith("norm.weight"):
            tensors[name] = torch.ones(shape)
        elif spread := deviation(name, shape):
            count = math.prod(shape)
            raw = bits.random_raw((count + 7) // 8).astype("<u8")
            levels = raw.view(numpy.uint8)[:count].astype(numpy.float32) - numpy.float32(127.5)
            step = numpy.float32(spread / math.sqrt((256**2 - 1) / 12))
            tensors[name] = torch.from_numpy((levels * step).reshape(shape))
        else:
            tensors[name] = torch.zeros(shape)
    return tensors


#: Directory of these models' files.
FILES = Path(__file__).parent


def read_file(model: str, name: str = "config.json") -> dict[str, Any]:
    """Return a JSON file of a model that has its files here."""
    return dict(json.loads((FILES / model / name).read_text(encoding="utf-8")))


def copy_files(name: str, directory: Path) -> None:
    """Copy a model's configurations and tokenizer into a directory."""
    for file in (FILES / name).glob("*.json"):
        shutil.copyfile(file, directory / file.name)


def shapes_of(config: Mapping[str, Any], *parts: str) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a model's tensors in the order in which they are drawn: by
    ``parts``, which are patterns of names. Of names that share a tensor, they have only one."""
    described = needed(config)
    assert described is not None
    shapes = described.shapes.items()
    return {name: shape for part in parts for name, shape in shapes if re.match(part, name)}


def tokenizer_settings(max_length: int, **others: Any) -> dict[str, Any]:
    """Return a tokenizer_config.json that transformers 4.55 and 5 both load."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        **others,
    }


def write_files(directory: Path, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write JSON files by their names."""
    for name, content in contents.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (directory / name).write_text(text + "\n", encoding="utf-8")


def write_weights(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write model.safetensors."""
    from safetensors.torch import save_file

    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
