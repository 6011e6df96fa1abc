"""The embedded masked language model: BERT's architecture at 1/120 of its size.

Two layers of 128 channels; 4,096 English WordPiece entries in the file beside this module, in id
order. **Its weights are random.** No dropout, so that loss curves are comparable.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from workloads.models.embedded import (
    draw_weights,
    tokenizer_settings,
    write_files,
    write_weights,
)

NAME = "tiny-bert"
#: Increment when model or tokenizer change: part of the cache's key.
RECIPE = 1
SEED = 1
POSITIONS = 512
HIDDEN, LAYERS, HEADS, INTERMEDIATE = 128, 2, 2, 512
_VOCABULARY = Path(__file__).with_name("tiny_bert_vocabulary.txt")
_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def cache_key() -> str:
    """Return the built model's cache key."""
    return f"{NAME}-v{RECIPE}"


@cache
def vocabulary() -> tuple[str, ...]:
    """Return the entries in id order."""
    return tuple(_VOCABULARY.read_text(encoding="utf-8").split("\n")[:-1])


def config() -> dict[str, Any]:
    """Return the model's config.json."""
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": len(vocabulary()),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INTERMEDIATE,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "random_weights": True,
    }


def tokenizer() -> Any:
    """Return the tokenizer: lower case, WordPiece, ``[CLS]`` before and ``[SEP]`` after a text."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    ids = {piece: number for number, piece in enumerate(vocabulary())}
    made = Tokenizer(models.WordPiece(ids, unk_token=_SPECIAL["unk"]))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(
        (_SPECIAL["sep"], ids[_SPECIAL["sep"]]), (_SPECIAL["cls"], ids[_SPECIAL["cls"]])
    )
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(list(_SPECIAL.values()))
    return made


def build(directory: Path) -> None:
    """Write config, tokenizer and weights into an empty directory."""
    tokens = {f"{name}_token": token for name, token in _SPECIAL.items()}
    settings = tokenizer_settings(POSITIONS, **tokens, clean_up_tokenization_spaces=True)
    write_files(directory, {"config.json": config(), "tokenizer_config.json": settings})
    tokenizer().save(str(directory / "tokenizer.json"))
    write_weights(directory, weights())


def weights() -> dict[str, Any]:
    """Return all tensors in float32; the output layer shares the embedding's matrix."""
    return draw_weights(SEED, shapes(), lambda name, _: 0.0 if name.endswith("bias") else 0.02)


def shapes() -> dict[str, tuple[int, ...]]:
    """Return every tensor's name and shape, in a fixed order."""
    wide = (INTERMEDIATE, HIDDEN)
    tensors: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (len(vocabulary()), HIDDEN),
        "bert.embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "bert.embeddings.token_type_embeddings.weight": (2, HIDDEN),
        **_norm("bert.embeddings.LayerNorm"),
    }
    for number in range(LAYERS):
        layer = f"bert.encoder.layer.{number}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            tensors |= _linear(f"{layer}.attention.{part}", (HIDDEN, HIDDEN))
        tensors |= _norm(f"{layer}.attention.output.LayerNorm")
        tensors |= _linear(f"{layer}.intermediate.dense", wide)
        tensors |= _linear(f"{layer}.output.dense", wide[::-1])
        tensors |= _norm(f"{layer}.output.LayerNorm")
    tensors["cls.predictions.bias"] = (len(vocabulary()),)
    tensors |= _linear("cls.predictions.transform.dense", (HIDDEN, HIDDEN))
    return tensors | _norm("cls.predictions.transform.LayerNorm")


def _linear(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
