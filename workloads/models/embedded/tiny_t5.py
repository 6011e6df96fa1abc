"""The embedded sequence-to-sequence model: T5-3B's class at 1/2600 of its size.

Two layers each of encoder and decoder, relative positions, ReLU feed-forward layers, one shared
embedding. **Its weights are random**: realistic cost, meaningless texts. Layer outputs are large
beside the embeddings, so that texts do not repeat one token, and the row of ``</s>`` is scaled so
that lengths vary with the article. Dropout is 0 (T5: 0.1), so that losses are comparable.

The tokenizer is a unigram model over the embedded articles' words and single characters, with T5's
ids of ``<pad>``, ``</s>`` and ``<unk>``; a word is likelier than its characters together. Weights
are bytes of PCG64's raw stream in bfloat16: bit-identical everywhere.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.models.embedded import copy_files, draw_weights, read_file, shapes_of, write_weights

if TYPE_CHECKING:
    import torch

NAME = "tiny-t5"
#: Increment when model or tokenizer change: part of the cache's key.
RECIPE = 1
SEED = 1
END_GAIN = 1.75
#: Standard deviation of the embeddings; layers add values of order 1.
EMBEDDED = 0.02
#: Factor on attention scores, so that a text depends on single words.
SHARP = 2.0

#: Return the model's config.json.
config = partial(read_file, NAME)


def cache_key() -> str:
    """Return the built model's cache key."""
    return f"{NAME}-v{RECIPE}"


def build(directory: Path) -> None:
    """Write config, generation config, tokenizer and weights into an empty directory."""
    copy_files(NAME, directory)
    write_weights(directory, weights())


def native_shapes() -> dict[str, tuple[int, ...]]:
    """Return every tensor's name and shape, in a fixed order."""
    parts = ["shared"]
    for side in ("encoder", "decoder"):
        blocks = range(config()["num_layers"])
        parts += [rf"{side}\.block\.{block}\.(?!.*_bias)" for block in blocks]
        parts += [rf"{side}\.(block\..*_bias|final)"]
    return shapes_of(config(), *parts)


def weights() -> dict[str, torch.Tensor]:
    """Return all tensors in bfloat16, by name."""
    import torch

    head_dim = config()["d_kv"]

    def deviation(name: str, shape: tuple[int, ...]) -> float:
        if name == "shared.weight":
            return EMBEDDED
        if "relative_attention_bias" in name:
            return 0.5
        if name.endswith(("Attention.q.weight", "Attention.k.weight")):
            # T5 does not divide scores by the root of the head's width: shrink q and k.
            return SHARP / math.sqrt(shape[1] * math.sqrt(head_dim))
        return 1 / math.sqrt(shape[-1])

    tensors = draw_weights(SEED, native_shapes(), deviation)
    tensors["shared.weight"][0] = 0.0  # padding is never generated
    tensors["shared.weight"][1] *= END_GAIN
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
