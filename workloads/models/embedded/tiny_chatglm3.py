"""The embedded causal model: ChatGLM3's architecture at 1/2000 of its size, for offline runs.

**Its weights are random**: realistic cost, meaningless texts. Two choices make greedy texts useful:

* Output rows of advert words are full size, other pieces a quarter, special tokens zero, so texts
  are advert words and never contain a role token.
* Rows of ``</s>`` and ``<|user|>``, which end a text, are scaled by ``END_GAIN``, so that lengths
  vary with the prompt. Over 64 prompts: 3 to over 128 tokens, 50 on average, a seventh beyond 128.

The best logit leads by at least 2.6e-4 standard deviations in 3200 steps (median 0.25); batching
moves logits by 3e-6, so greedy texts do not depend on it.

Weights are bytes of PCG64's raw stream (guaranteed by numpy, unlike its distributions) times a
scale, stored in bfloat16: bit-identical everywhere, and equal at the start in fp32 and bf16.

Pieces are a fixed list in ChatGLM3's order: ``<unk>``, ``<s>``, ``</s>``, 256 bytes, advert and
English words (two files beside this one), printable ASCII, full-width punctuation, the 3755
characters of GB 2312 level 1. Everything else falls back to bytes.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.models.chatglm3 import layout
from workloads.models.chatglm3.layout import SPECIAL_TOKENS, Sizes
from workloads.models.chatglm3.tokenizer import Piece, write_tokenizer
from workloads.models.embedded import draw_weights, write_files, write_weights

if TYPE_CHECKING:
    import torch

NAME = "tiny-chatglm3"
#: Increment when model or tokenizer change: part of the cache's key.
RECIPE = 1
SEED = 4  # of the first eight, the one with the most varied lengths
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


#: Names and values of AdvertiseGen's attributes, and words of its adverts.
ADVERT_WORDS = _words("adverts")
_PUNCTUATION = "，。！？、；：“”‘’（）《》【】—…·～￥％＋－＝０１２３４５６７８９"


@cache
def pieces() -> tuple[Piece, ...]:
    """Return all pieces in id order, scores falling; cached, as plans count them for every job."""
    words = [*ADVERT_WORDS, *(f"▁{word}" for word in _words("english"))]
    # Prefixes precede each word: both halves of a merge must be pieces.
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
    """Return the built model's cache key."""
    return f"{NAME}-v{RECIPE}"


def config() -> dict[str, Any]:
    """Return the model's config.json."""
    return layout.native_config(
        SIZES, eos_token_ids=end_token_ids(), max_positions=MAX_POSITIONS
    ) | {"random_weights": True}


def end_token_ids() -> list[int]:
    """Return the ids of ``</s>``, ``<|user|>`` and ``<|observation|>``, as in ChatGLM3."""
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
    """Return all tensors in bfloat16, by native name."""
    import torch

    def deviation(name: str, shape: tuple[int, ...]) -> float:
        if name.endswith("bias"):
            return 0.1
        return 1.0 if name == "model.embed_tokens.weight" else 1 / math.sqrt(shape[1])

    tensors = draw_weights(SEED, native_shapes(), deviation)
    words = {*ADVERT_WORDS, "，", "。"}
    gains = torch.zeros(SIZES.vocabulary)  # of each output row
    for index, piece in enumerate(pieces()):
        if piece.kind == "normal":
            gains[index] = 1.0 if piece.text in words else 0.25
    gains[end_token_ids()[:2]] = END_GAIN
    tensors["lm_head.weight"] *= gains[:, None]
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def native_shapes() -> dict[str, tuple[int, ...]]:
    """Return every native tensor's name and shape, in a fixed order."""
    return layout.native_shapes(SIZES)
