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
distributions) times a scale, rounded to bfloat16, in which the checkpoint is stored: the same
bits on every machine, and fp32 and bf16 runs start from equal values.

The tokenizer's pieces are a fixed list in ChatGLM3's order: ``<unk>``, ``<s>``, ``</s>``, the 256
bytes, then words of Chinese clothing adverts and a few English ones (what AdvertiseGen and short
prompts are made of; two files beside this one), printable ASCII, full-width punctuation and the
3755 everyday Chinese characters of GB 2312 level 1. Everything else falls back to bytes. Nothing is
trained, so the ids are the same for everyone, for good.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.models.chatglm3 import layout
from workloads.models.chatglm3.layout import SPECIAL_TOKENS, Sizes
from workloads.models.chatglm3.tokenizer import Piece, write_tokenizer
from workloads.models.embedded import RawUniform, write_files, write_weights

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


def _words(name: str) -> tuple[str, ...]:
    file = Path(__file__).with_name(f"tiny_chatglm3_{name}.txt")
    return tuple(file.read_text(encoding="utf-8").split())


#: Names and values of AdvertiseGen's attributes, and what adverts say about them.
ADVERT_WORDS = _words("adverts")
_PUNCTUATION = "，。！？、；：“”‘’（）《》【】—…·～￥％＋－＝０１２３４５６７８９"


@cache
def pieces() -> tuple[Piece, ...]:
    """All pieces, in id order; scores fall with the id, as SentencePiece writes them. Made once: a
    plan asks for their number with every job."""
    words = [*ADVERT_WORDS, *(f"▁{word}" for word in _words("english"))]
    # Each word comes after its own beginnings: a merge needs both its halves to be pieces.
    parts = [word[:end] for word in words for end in range(2, len(word) + 1)]
    codes = [bytes((row, cell)) for row in range(0xB0, 0xD8) for cell in range(0xA1, 0xFF)]
    level_one = [c.decode("gb2312") for c in codes if not (c[0] == 0xD7 and c[1] > 0xF9)]
    ascii_printable = [chr(code) for code in range(0x21, 0x7F)]
    texts = dict.fromkeys([*parts, "▁", *ascii_printable, *_PUNCTUATION, *level_one])
    return (
        Piece(text="<unk>", score=0.0, kind="unknown"),
        Piece(text="<s>", score=0.0, kind="control"),
        Piece(text="</s>", score=0.0, kind="control"),
        *(Piece(text=f"<0x{byte:02X}>", score=0.0, kind="byte") for byte in range(256)),
        *(Piece(text=text, score=-float(rank), kind="normal") for rank, text in enumerate(texts)),
    )


def cache_key() -> str:
    """The key of the built model in the cache."""
    return f"{NAME}-v{RECIPE}"


def config() -> dict[str, Any]:
    """The model's config.json."""
    return layout.native_config(
        SIZES, eos_token_ids=end_token_ids(), max_positions=MAX_POSITIONS
    ) | {"random_weights": True}


def end_token_ids() -> list[int]:
    """``</s>``, ``<|user|>`` and ``<|observation|>``, as in ChatGLM3."""
    first = len(pieces())
    turns = (SPECIAL_TOKENS.index(token) for token in ("<|user|>", "<|observation|>"))
    return [layout.END_ID, *(first + index for index in turns)]


def build(directory: Path) -> None:
    """Write config, generation config, tokenizer and weights into an empty directory."""
    ends = {
        "bos_token_id": layout.BEGIN_ID,
        "eos_token_id": end_token_ids(),
        "pad_token_id": layout.UNKNOWN_ID,
    }
    write_files(directory, {"config.json": config(), "generation_config.json": ends})
    write_tokenizer(directory, pieces(), MAX_POSITIONS)
    write_weights(directory, weights())


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
    return layout.native_shapes(SIZES)


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
