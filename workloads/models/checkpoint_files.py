"""The files of a checkpoint's directory, looked at without loading any: is it all there?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from workloads import files
from workloads.errors import DataMissing

#: Index of shards, and the single file it stands for.
WEIGHT_FILES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a checkpoint's weights, looked for in transformers' order.

    Raises:
        DataMissing: there are none, or a shard that the index names is not there.
    """
    for index, single in WEIGHT_FILES:
        if os.path.isfile(directory / single):
            return [directory / single]
        if os.path.isfile(directory / index):
            shards = index_shards(directory / index)
            missing = [name for name in shards if not os.path.isfile(directory / name)]
            if missing:
                more = " …" if len(missing) > 3 else ""
                raise DataMissing(
                    f"{directory} lacks {len(missing)} of its {len(shards)} weight files: "
                    f"{', '.join(missing[:3])}{more} (named in {index})"
                )
            return [directory / name for name in shards]
    raise DataMissing(
        f"{directory} has no weights: no model.safetensors, no pytorch_model.bin and no index "
        "of shards"
    )


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a directory.

    Raises:
        DataMissing: it is not there, not a directory, or not JSON.
    """
    file = directory / "config.json"
    if not os.path.lexists(directory):
        raise DataMissing(f"there is no directory {directory}")
    if not os.path.isdir(directory):
        raise DataMissing(f"{directory} is a file; a model is a directory with a config.json")
    if not os.path.isfile(file):
        raise DataMissing(f"{directory} has no config.json, so it is not a model's directory")
    try:
        config = json.loads(files.read_text(file))
    except (ValueError, OSError, RecursionError) as error:
        raise DataMissing(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise DataMissing(f"{file} holds a {type(config).__name__}, not an object")
    return config


def architecture_of(config: dict[str, Any]) -> str:
    """The model class that config.json names, or its model type."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else config.get("model_type")
    return str(first or "unknown")


def index_shards(index_file: Path) -> list[str]:
    """The file names in an index of shards, sorted.

    Raises:
        DataMissing: the index is not one.
    """
    try:
        weight_map = json.loads(files.read_text(index_file))["weight_map"]
        names = sorted(set(weight_map.values()))
        if not names:
            raise ValueError("it names no file")
        for name in names:
            if not isinstance(name, str) or not name.endswith((".safetensors", ".bin")):
                raise ValueError(f"{name!r:.60} is no weight file")
            if name != os.path.basename(name) or not name.isprintable():
                raise ValueError(f"{name!r:.60} is no file of this directory")
        return names
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataMissing(f"{index_file} is not an index of weight files: {error}") from error
