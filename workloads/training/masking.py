"""Masked chunks of a corpus for masked language models.

Texts, with the tokenizer's special tokens, are joined and cut into chunks of one length; the rest
is dropped. Only masked tokens are learned: 80 % become the mask token, 10 % any token, 10 % stay.
Masks are drawn per step (dynamic masking) for the whole global batch from the number of the step,
so they are equal on any number of cards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from workloads.base import BadConfiguration
from workloads.data.shapes import text_of
from workloads.models.catalog import usable_positions
from workloads.training.data import NOT_LEARNED, Encoded, SampleFormat

if TYPE_CHECKING:
    from workloads.data.shapes import Example
    from workloads.training.technique import Inputs

#: Shares of masked tokens that become the mask token, and any token.
REPLACED, RANDOM = 0.8, 0.1
_SEED = 42
_TEXTS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens of one chunk, flags of special ones, and labels once masked for a step."""

    ids: NDArray[numpy.int64]
    special: NDArray[numpy.bool_]
    labels: NDArray[numpy.int64] | None = None  # -100 where nothing is learned; None: not masked

    @property
    def tokens(self) -> int:
        """Number of its tokens."""
        return len(self.ids)

    @property
    def learned_tokens(self) -> int:
        """Number of masked positions."""
        return 0 if self.labels is None else int((self.labels != NOT_LEARNED).sum())


def encode(examples: Sequence[Example], count: int, form: SampleFormat) -> Encoded:
    """The first ``count`` chunks of a corpus, or as many as there are."""
    room = usable_positions(form.config.to_dict())
    if room is not None and form.max_length > room:
        raise BadConfiguration(
            f"max_length is {form.max_length}, the model was made for {room} positions"
        )
    if form.tokenizer.mask_token_id is None:
        raise BadConfiguration("the tokenizer has no mask token, which masked words are shown as")
    ids: list[int] = []
    special: list[bool] = []
    texts = 0
    for text_ids, text_special in _encoded(examples, form.tokenizer):
        if len(ids) >= count * form.max_length:
            break
        ids += text_ids
        special += text_special
        texts += 1
    length, whole = form.max_length, min(len(ids) // form.max_length, count)
    table = numpy.asarray(ids[: whole * length], numpy.int64).reshape(whole, length)
    marks = numpy.asarray(special[: whole * length], numpy.bool_).reshape(whole, length)
    chunks = list(map(Chunk, table, marks))
    share = f"{form.parameters['masked_share']:.3g}"
    details = {
        "learned": f"masked tokens, each with probability {share}, anew in every step",
        "chunks": f"{len(chunks)} of {form.max_length} tokens, from {texts} texts",
    }
    return Encoded(samples=chunks, details=details)


def _encoded(examples: Sequence[Example], tokenizer: Any) -> Iterator[tuple[list[int], list[bool]]]:
    for start in range(0, len(examples), _TEXTS_AT_ONCE):
        texts = [text_of(example) for example in examples[start : start + _TEXTS_AT_ONCE]]
        encoded = tokenizer(texts, return_special_tokens_mask=True, verbose=False)
        yield from zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)


def arrange(chunks: Sequence[Chunk], batch: int) -> list[list[int]]:
    """Global batches in the order of the corpus; an incomplete last one is dropped."""
    whole = len(chunks) // batch
    if not whole:
        raise BadConfiguration(
            f"the dataset makes {len(chunks)} chunks, and one batch on all cards takes {batch}; "
            "take more text, a smaller batch_size or a smaller max_length"
        )
    return [list(range(start * batch, (start + 1) * batch)) for start in range(whole)]


def draw(chunks: Sequence[Chunk], form: SampleFormat, step: int) -> list[Chunk]:
    """Mask a global batch for one step."""
    share = float(form.parameters["masked_share"])
    return masked(chunks, share, int(form.tokenizer.mask_token_id), len(form.tokenizer), step)


def masked(
    chunks: Sequence[Chunk], share: float, mask_id: int, vocabulary: int, step: int
) -> list[Chunk]:
    """Mask chunks of one length as a function of their place and the step."""
    ids = numpy.stack([chunk.ids for chunk in chunks])
    special = numpy.stack([chunk.special for chunk in chunks])
    random = numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence([_SEED, step])))
    number = random.random(ids.shape, dtype=numpy.float32)  # decides a token's fate in one draw
    number[special] = 1.0
    learned = number < share
    labels = numpy.where(learned, ids, NOT_LEARNED)
    shown = numpy.where(number < share * REPLACED, mask_id, ids)
    anything = learned & (number >= share * REPLACED) & (number < share * (REPLACED + RANDOM))
    shown[anything] = random.integers(vocabulary, size=int(anything.sum()))
    return list(map(Chunk, shown, special, labels))


def collate(chunks: Sequence[Chunk], form: SampleFormat, fixed: bool = False) -> Inputs:
    """One chunk a row, unpadded since all have one length."""
    import torch

    from workloads.training.technique import Inputs

    ids, labels = ([getattr(chunk, name) for chunk in chunks] for name in ("ids", "labels"))
    return Inputs(
        input_ids=torch.from_numpy(numpy.stack(ids)),
        labels=torch.from_numpy(numpy.stack(labels)),
    )
