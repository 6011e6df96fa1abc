"""The embedded sequence-to-sequence model: T5-3B's class at 1/2600 of its size.

Two layers each of encoder and decoder, relative positions, ReLU feed-forward layers, one shared
embedding. **Its weights are random**: realistic cost, meaningless texts. Layer outputs are large
beside the embeddings, so that texts do not repeat one token, and the row of ``</s>`` is scaled so
that lengths vary with the article. Dropout is 0 (T5: 0.1), so that losses are comparable.

The tokenizer is a unigram model over the embedded articles' words and single characters, with T5's
ids of ``<pad>``, ``</s>`` and ``<unk>``. Weights are bytes of PCG64's raw stream in bfloat16:
bit-identical everywhere.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.models.embedded import (
    draw_weights,
    tokenizer_settings,
    write_files,
    write_weights,
)

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

NAME = "tiny-t5"
#: Increment when the model changes: part of the cache's key.
RECIPE = 1
SEED = 1
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # T5's first three ids
END_GAIN = 1.75
#: Standard deviation of the embeddings; layers add values of order 1.
EMBEDDED = 0.02
HIDDEN, HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 128, 4, 32, 512, 2
#: Factor on attention scores, so that a text depends on single words.
SHARP = 2.0
BUCKETS = 32  # of distances between positions


def cache_key() -> str:
    """Return the built model's cache key."""
    digest = hashlib.sha256("\n".join(pieces()).encode()).hexdigest()[:8]
    return f"{NAME}-v{RECIPE}-{digest}"


def pieces() -> list[str]:
    """Return the vocabulary in id order; ``▁`` stands for the space before a word."""
    from workloads.data.embedded import news_words

    characters = [chr(code) for code in range(0x21, 0x7F)]
    words = [f"▁{word}" for word in news_words()]
    return list(dict.fromkeys([PAD, END, UNKNOWN, "▁", *characters, *words]))


def config() -> dict[str, Any]:
    """Return the model's config.json."""
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": len(pieces()),
        "d_model": HIDDEN,
        "d_kv": HEAD_DIM,
        "d_ff": INTERMEDIATE,
        "num_layers": LAYERS,
        "num_decoder_layers": LAYERS,
        "num_heads": HEADS,
        "relative_attention_num_buckets": BUCKETS,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
        "dropout_rate": 0.0,
        "layer_norm_epsilon": 1e-6,
        "initializer_factor": 1.0,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "use_cache": True,
        "random_weights": True,
    }


def build(directory: Path) -> None:
    """Write config, generation config, tokenizer and weights into an empty directory."""
    contents = {
        "config.json": config(),
        "generation_config.json": {
            "decoder_start_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        "tokenizer_config.json": tokenizer_settings(
            512, eos_token=END, unk_token=UNKNOWN, pad_token=PAD
        ),
    }
    write_files(directory, contents)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    write_weights(directory, weights())


def build_tokenizer() -> Tokenizer:
    """Return a unigram tokenizer over the pieces, which ends every text like T5's."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    # A word is likelier than its characters together, whatever its length.
    scored = [(piece, -10.0 if len(piece) == 1 else -4.0) for piece in pieces()]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=2, byte_fallback=False))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, END, UNKNOWN)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, 1)]
    )
    return tokenizer


def native_shapes() -> dict[str, tuple[int, ...]]:
    """Return every tensor's name and shape, in a fixed order."""
    inner = HEADS * HEAD_DIM
    tensors: dict[str, tuple[int, ...]] = {"shared.weight": (len(pieces()), HIDDEN)}
    sides = {"encoder": ("SelfAttention",), "decoder": ("SelfAttention", "EncDecAttention")}
    for side, attentions in sides.items():
        for block in range(LAYERS):
            layers = f"{side}.block.{block}.layer"
            for number, attention in enumerate(attentions):
                for part in "qkv":
                    tensors[f"{layers}.{number}.{attention}.{part}.weight"] = (inner, HIDDEN)
                tensors[f"{layers}.{number}.{attention}.o.weight"] = (HIDDEN, inner)
                tensors[f"{layers}.{number}.layer_norm.weight"] = (HIDDEN,)
            last = len(attentions)
            tensors[f"{layers}.{last}.DenseReluDense.wi.weight"] = (INTERMEDIATE, HIDDEN)
            tensors[f"{layers}.{last}.DenseReluDense.wo.weight"] = (HIDDEN, INTERMEDIATE)
            tensors[f"{layers}.{last}.layer_norm.weight"] = (HIDDEN,)
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        tensors[bias] = (BUCKETS, HEADS)
        tensors[f"{side}.final_layer_norm.weight"] = (HIDDEN,)
    return tensors


def weights() -> dict[str, torch.Tensor]:
    """Return all tensors in bfloat16, by name."""
    import torch

    def deviation(name: str, shape: tuple[int, ...]) -> float:
        if name == "shared.weight":
            return EMBEDDED
        if "relative_attention_bias" in name:
            return 0.5
        if name.endswith(("Attention.q.weight", "Attention.k.weight")):
            # T5 does not divide scores by the root of the head's width: shrink q and k.
            return SHARP / math.sqrt(shape[1] * math.sqrt(HEAD_DIM))
        return 1 / math.sqrt(shape[-1])

    tensors = draw_weights(SEED, native_shapes(), deviation)
    tensors["shared.weight"][0] = 0.0  # padding is never generated
    tensors["shared.weight"][1] *= END_GAIN
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
