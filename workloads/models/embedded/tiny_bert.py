"""The embedded masked language model: BERT's architecture at 1/120 of its size.

Two layers of 128 channels; a tokenizer of 4,096 English WordPiece entries in lower case. **Its
weights are random.** No dropout, so that loss curves are comparable.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from workloads.models.embedded import copy_files, draw_weights, read_file, shapes_of, write_weights

NAME = "tiny-bert"
#: Increment when model or tokenizer change: part of the cache's key.
RECIPE = 2
SEED = 1

#: Return the model's config.json.
config = partial(read_file, NAME)


def cache_key() -> str:
    """Return the built model's cache key."""
    return f"{NAME}-v{RECIPE}"


def build(directory: Path) -> None:
    """Write config, tokenizer and weights into an empty directory."""
    copy_files(NAME, directory)
    write_weights(directory, weights())


def weights() -> dict[str, Any]:
    """Return all tensors in float32; the output layer shares the embedding's matrix."""
    return draw_weights(SEED, shapes(), lambda name, _: 0.0 if name.endswith("bias") else 0.02)


def shapes() -> dict[str, tuple[int, ...]]:
    """Return every tensor's name and shape, in a fixed order."""
    return shapes_of(
        config(),
        r"bert\.embeddings\.",
        *(rf"bert\.encoder\.layer\.{layer}\." for layer in range(config()["num_hidden_layers"])),
        r"cls\.predictions\.(bias|transform)",
    )
