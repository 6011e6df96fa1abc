"""Embedded models: random weights, bit-identical on all machines and numpy versions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class RawUniform:
    """Uniform values from a bit generator's raw output, one byte each."""

    def __init__(self, seed: int) -> None:
        import numpy

        self._bits = numpy.random.PCG64(seed)

    def tensor(self, shape: tuple[int, ...], *, deviation: float) -> torch.Tensor:
        """Return a float32 tensor with mean 0 and this standard deviation."""
        import numpy
        import torch

        count = math.prod(shape)
        raw = self._bits.random_raw((count + 7) // 8).astype("<u8")
        levels = raw.view(numpy.uint8)[:count].astype(numpy.float32) - numpy.float32(127.5)
        step = numpy.float32(deviation / math.sqrt((256**2 - 1) / 12))
        return torch.from_numpy((levels * step).reshape(shape))


def draw_weights(
    seed: int,
    shapes: Mapping[str, tuple[int, ...]],
    deviation: Callable[[str, tuple[int, ...]], float],
) -> dict[str, torch.Tensor]:
    """Return tensors in float32, drawn in order: ones for norms, zeros for a deviation of 0."""
    import torch

    random = RawUniform(seed)
    tensors = {}
    for name, shape in shapes.items():
        if name.lower().endswith("norm.weight"):
            tensors[name] = torch.ones(shape)
        elif spread := deviation(name, shape):
            tensors[name] = random.tensor(shape, deviation=spread)
        else:
            tensors[name] = torch.zeros(shape)
    return tensors


def write_files(directory: Path, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write JSON files by their names."""
    for name, content in contents.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (directory / name).write_text(text + "\n", encoding="utf-8")


def write_weights(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write model.safetensors."""
    from safetensors.torch import save_file

    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
