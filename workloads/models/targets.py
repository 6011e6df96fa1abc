"""Linear layers that an adapter sits on: the choice for each architecture, and what there is.

Adapters go on the attention's inputs by default: query, key and value, or the one layer in which
an architecture fuses them. peft has a table of that for many architectures, and none for ``glm``;
here the model's own layers decide, so an architecture needs no entry.

Planning asks without torch: names then come from the tensors that a checkpoint's files list.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from workloads import files
from workloads.base import BadConfiguration, WorkloadError
from workloads.models.catalog import MADE, SMOLLM2, find_model
from workloads.models.checkpoint_files import read_config, weight_files
from workloads.models.layouts import layout_of

#: The attention's inputs as architectures spell them; the first whole set that a model has.
ATTENTION_TARGETS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query_key_value",),
    ("qkv_proj",),
    ("c_attn",),
    ("Wqkv",),
    ("q", "k", "v"),
    ("query", "key", "value"),
)

#: ``targets`` that means every linear layer but the output layer.
ALL_LINEAR = "all-linear"

_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def choose(targets: str | None, layers: Iterable[str]) -> tuple[str, ...]:
    """The last name components of the layers that an adapter is put on.

    Args:
        targets: names separated by commas, ``all-linear``, or None for the attention's inputs.
        layers: full or last names of the model's linear layers, the output layer left out.

    Raises:
        BadConfiguration: a name is none of the model's, or None finds no attention.
    """
    there = sorted({layer.rsplit(".", 1)[-1] for layer in layers})
    if targets == ALL_LINEAR and there:
        return tuple(there)
    if targets is None or targets == ALL_LINEAR:
        for names in ATTENTION_TARGETS:
            if set(names) <= set(there):
                return names
        raise BadConfiguration(
            f"this model has none of the usual attention layers; name targets among "
            f"{', '.join(there) or 'none: it has no linear layers'}"
        )
    wanted = split(targets)
    unknown = [name for name in wanted if name not in there]
    if unknown or not wanted:
        raise BadConfiguration(
            f"targets: no linear layer is named {', '.join(unknown) or repr(targets)}; there is: "
            f"{', '.join(there)}"
        )
    return wanted


def split(targets: str) -> tuple[str, ...]:
    """The names in a list separated by commas, each once."""
    return tuple(dict.fromkeys(name.strip() for name in targets.split(",") if name.strip()))


def linear_names(model: str) -> frozenset[str] | None:
    """Last names of a model's linear layers by what its files say; None if that cannot be told.

    Nothing is loaded, and torch is not imported: for planning.
    """
    if model == SMOLLM2:
        return frozenset(_LLAMA)
    shapes = linear_shapes(model)
    return None if shapes is None else frozenset(name.rsplit(".", 1)[-1] for name in shapes)


def linear_shapes(model: str) -> dict[str, tuple[int, int]] | None:
    """Outputs and inputs of a model's linear layers, by name, by what its files say; None if that
    cannot be told. For planning, like ``linear_names``."""
    try:
        entry = find_model(model)
        if entry.name in MADE:
            return _from_shapes(importlib.import_module(MADE[entry.name]).native_shapes().items())
        directory = Path(entry.location)
        if not os.path.isdir(directory):
            return None  # on a hub, not downloaded
        if layout_of(read_config(directory)) == "original":
            return None  # it is trained in the native layout, which is yet to be made
        weights = [file for file in weight_files(directory) if file.suffix == ".safetensors"]
        shapes = [item for file in weights for item in _safetensors_shapes(file)]
        return _from_shapes(shapes) or None
    except (WorkloadError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    except (RecursionError, struct.error):
        return None


def _from_shapes(shapes: Iterable[tuple[str, Sequence[int]]]) -> dict[str, tuple[int, int]]:
    """Matrices called ``….layer.weight`` inside layers; embeddings and heads lie outside."""
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes
        if name.endswith(".weight")
        and len(shape) == 2
        and any(part.isdigit() for part in name.split("."))
        and not name.endswith("_bias.weight")  # a table of relative positions
    }


def _safetensors_shapes(file: Path) -> list[tuple[str, list[int]]]:
    """Name and shape of each tensor: 8 bytes of length, then JSON."""
    with files.opened(file) as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        if length > 100_000_000:
            raise ValueError(f"{file} is not a safetensors file")
        header: dict[str, Any] = json.loads(handle.read(length))
    return [(name, item["shape"]) for name, item in header.items() if name != "__metadata__"]
