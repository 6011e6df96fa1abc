"""Models of a known shape with random weights: ``random:chatglm3-6b``, or ``random:DIR``.

Speed hardly depends on the weights' values, so models are measured without a download. The cache
holds the configuration only; weights are made on the card. A missing tokenizer is replaced by one
of bytes, which does not cover the vocabulary: jobs then need ``input_tokens`` (a rule checks).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from workloads.base import DataMissing
from workloads.inspection.checkpoints import read_config, side_files
from workloads.inspection.tokenizers import has_tokenizer
from workloads.models.embedded import copy_files

PREFIX = "random:"
#: Published configurations, with the byte tokenizer's special tokens.
DIRECTORY = Path(__file__).with_name("architectures")
#: Increment when the directories change: part of the cache's key.
RECIPE = 2


def architectures() -> tuple[str, ...]:
    """Return the names that may follow the prefix, besides directories."""
    return tuple(sorted(path.parent.name for path in DIRECTORY.glob("*/config.json")))


def directory_of(name: str) -> Path:
    """Return the configuration's directory of ``random:…``; raises DataMissing if unknown."""
    shape = name.removeprefix(PREFIX)
    if shape in architectures():
        return DIRECTORY / shape
    directory = Path(shape).expanduser()
    if not directory.is_dir():
        raise DataMissing(
            f"there is no architecture {shape!r} to fill with random weights: name one of "
            f"{', '.join(architectures())}, or a directory with a config.json"
        )
    return directory


def cache_key(directory: Path) -> str:
    """Return the cache key of what ``build`` makes of a directory."""
    digest = hashlib.sha256()
    for file in side_files(directory):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return f"random-v{RECIPE}-{digest.hexdigest()[:16]}"


def build(source: Path, directory: Path) -> None:
    """Write configuration and tokenizer (its own, or one of three special tokens and the 256 bytes)
    into an empty directory; no weights."""
    for file in side_files(source):
        shutil.copyfile(file, directory / file.name)
    if not has_tokenizer(source):
        copy_files("tiny-bytes", directory)
    config = {**read_config(source), "random_weights": True}
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def make(loader: Any, config: Any, seed: int = 0, **arguments: Any) -> Any:
    """Build a model on this process's card; quantised ones are made from plain ones."""
    import torch

    accelerator = getattr(torch, "accelerator", None)
    card = accelerator.current_accelerator() if accelerator and accelerator.is_available() else None
    plain = {k: v for k, v in arguments.items() if k in ("dtype", "torch_dtype")}
    if (attention := arguments.get("attn_implementation")) is not None:
        plain["attn_implementation"] = attention
    torch.manual_seed(seed)
    with torch.device(card or "cpu"):
        model = loader.from_config(config, **plain)
    if "quantization_config" not in arguments:
        return model
    weights = model.state_dict()
    return type(model).from_pretrained(
        None, config=config, state_dict=weights, trust_remote_code=False, **arguments
    )
