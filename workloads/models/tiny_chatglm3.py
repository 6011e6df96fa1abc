"""The embedded model: ChatGLM3's architecture at 1/2000 of its size, so that all runs offline.

Multi-query attention with two key/value heads, half-rotary heads, bias on queries, keys and
values, SwiGLU, an output layer of its own. **Its weights are random**: it costs what such a model
costs and says nothing sensible. Two arrangements make its greedy texts useful for measuring:

* Rows of the output layer for advert words are full size, other pieces a quarter, special tokens
  zero, so texts are strings of advert words and never a stray role token.
* The rows of ``</s>`` and ``<|user|>``, where a ChatGLM3 text ends, are enlarged by ``END_GAIN``,
  so that a few per cent of steps end the text and lengths vary with the prompt, as a real model's
  do. Over 64 advert prompts: 3 to 128 tokens and more, 50 on average, a seventh beyond 128.

The best logit leads the second by 0.25 standard deviations of the logits in the median and by
2.6e-4 at the least of 3200 steps; batching moves logits by 3e-6. So greedy texts are the same
batched and single.

Every weight is one byte of PCG64's raw stream (whose values numpy guarantees, unlike those of its
distributions) times a scale, rounded to bfloat16, in which the checkpoint is stored: the same bits
on every machine, and fp32 and bf16 runs start from equal values.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.models import chatglm3
from workloads.models.chatglm3 import SPECIAL_TOKENS, Sizes
from workloads.models.chatglm3_tokenizer import write_tokenizer
from workloads.models.raw_uniform import RawUniform
from workloads.models.tiny_vocabulary import ADVERT_WORDS, pieces

if TYPE_CHECKING:
    import torch

NAME = "tiny-chatglm3"
#: Raise when anything changes that changes the model or its tokenizer: it is in the cache's key.
RECIPE = 1
SEED = 4  # of the first eight, the one whose texts vary most in length
SIZES = Sizes(
    hidden=192,
    layers=4,
    heads=6,
    kv_heads=2,
    head_dim=32,
    intermediate=384,
    vocabulary=4672,
)
MAX_POSITIONS = 8192
END_GAIN = 1.4


def cache_key() -> str:
    """The key of the built model in the cache."""
    return f"{NAME}-v{RECIPE}"


def config() -> dict[str, Any]:
    """The model's config.json."""
    return chatglm3.native_config(
        SIZES, eos_token_ids=end_token_ids(), max_positions=MAX_POSITIONS
    ) | {"random_weights": True}


def end_token_ids() -> list[int]:
    """``</s>``, ``<|user|>`` and ``<|observation|>``, as in ChatGLM3."""
    first = len(pieces())
    return [chatglm3.END_ID] + [
        first + SPECIAL_TOKENS.index(token) for token in ("<|user|>", "<|observation|>")
    ]


def build(directory: Path) -> None:
    """Write config, generation config, tokenizer and weights into an empty directory."""
    from safetensors.torch import save_file

    generation = {
        "bos_token_id": chatglm3.BEGIN_ID,
        "eos_token_id": end_token_ids(),
        "pad_token_id": chatglm3.UNKNOWN_ID,
    }
    for name, content in (("config.json", config()), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(directory, pieces(), MAX_POSITIONS)
    save_file(weights(), directory / "model.safetensors", metadata={"format": "pt"})


def weights() -> dict[str, torch.Tensor]:
    """All tensors in bfloat16, by their native names."""
    import torch

    random = RawUniform(SEED)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in native_shapes().items():
        if name.endswith("norm.weight"):
            tensor = torch.ones(shape)
        elif name.endswith("bias"):
            tensor = random.tensor(shape, deviation=0.1)
        elif name == "model.embed_tokens.weight":
            tensor = random.tensor(shape, deviation=1.0)
        else:
            tensor = random.tensor(shape, deviation=1 / math.sqrt(shape[1]))
        if name == "lm_head.weight":
            tensor *= _head_gains()[:, None]
        tensors[name] = tensor.to(torch.bfloat16)
    return tensors


def native_shapes() -> dict[str, tuple[int, ...]]:
    """Every native tensor's name and shape, in a fixed order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in chatglm3.original_shapes(SIZES).items():
        for part in chatglm3.native_parts(name, SIZES):
            shapes[part.name] = (part.stop - part.start, *shape[1:])
    return shapes


def _head_gains() -> torch.Tensor:
    """The size of each row of the output layer, [vocabulary]."""
    import torch

    listed = pieces()
    words = {*ADVERT_WORDS, "，", "。"}
    gains = torch.zeros(SIZES.vocabulary)
    for index, piece in enumerate(listed):
        if piece.kind == "normal":
            gains[index] = 1.0 if piece.text in words else 0.25
    for end in end_token_ids()[:2]:
        gains[end] = END_GAIN
    return gains
