"""Keys and values of texts that begin and end at different times, one row of memory for each.

transformers' cache is a rectangle in which every text has the same position: it is copied for every
token (concatenated), and a text that has ended keeps its place. Here every row has a length of its
own and its memory is taken once. A pass over the model is one of two kinds:

    prefill   whole prompts one behind the other in a single row of tokens, [1, all tokens]: no
              padding; each prompt attends to itself alone
    decode    one token for each row, [rows, 1]; each attends to its own row

Models reach this through transformers' attention interface, under the name ``NAME``: whatever
architecture calls it with its keys and values works here, and its cache stays unused.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from workloads.attention_words import refuse_unknown
from workloads.errors import Unsupported

#: Of the attention function, for transformers.
NAME = "nightgrid_rows"


@dataclass(frozen=True, slots=True)
class Segment:
    """One prompt within a prefill: where its tokens stand, and which row keeps them."""

    row: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """A pass over prompts, one behind the other."""

    rows: Rows
    segments: Sequence[Segment]


@dataclass(frozen=True, slots=True)
class Decode:
    """A pass over one token for each of the first ``count`` rows."""

    rows: Rows
    count: int
    positions: torch.Tensor  # [count]: of the tokens, each row from 0
    longest: int  # positions that any of them attends to
    mask: torch.Tensor  # [count, 1, 1, longest], added to the scores: 0 or -inf


class Rows:
    """Keys and values: for each layer two tensors [rows, heads, capacity, width].

    They are made when a layer first shows what it holds, and hold zeros: beyond its end a row that
    is shorter than another is attended to with a weight of zero, and zero times what happens to be
    in memory need not be zero. On a CPU, memory that was never written is not there, so a row costs
    what its text needs; in small pages, for a large one is there as soon as a byte of it is.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows = rows
        self.capacity = capacity
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._memory: list[mmap.mmap] = []  # of the host, one for each tensor

    def layer(
        self, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values; like those given in heads, width and format."""
        if index not in self._layers:
            self._layers[index] = (self._zeros(key), self._zeros(value))
        return self._layers[index]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.rows, like.shape[1], self.capacity, like.shape[3])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        # Zeros of torch are written one by one, those of numpy lie in large pages.
        size = math.prod(shape) * like.element_size()
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with suppress(OSError):  # a kernel that knows no large pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._memory.append(memory)
        return torch.frombuffer(memory, dtype=like.dtype).view(shape)

    def clear(self, row: int) -> None:
        """The row's text has ended: on a CPU its memory goes back, and the row is as new. Else
        every row would soon hold as much as the longest text that it ever had."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for memory in self._memory:
            size = len(memory) // self.rows
            # Pages that it shares with its neighbours stay.
            start = -(-row * size // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (row + 1) * size // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of one row into another, whose own text is gone."""
        self.clear(target)
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    rows_pass: Prefill | Decode | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over rows; called by the model's layers.

    Args:
        module: the layer, whose ``layer_idx`` says which it is.
        query: [1, heads, all tokens, width] in a prefill, [rows, heads, 1, width] in decoding.
        key: as ``query``, with as many heads as the model keeps.
        value: as ``key``.
        attention_mask: none; rows say what is attended to.
        scaling: of the scores.
        rows_pass: what is being done, handed through by the model.
        others: what else a model says, refused where it would change the result.

    Returns:
        [1, all tokens, heads, width] or [rows, 1, heads, width], and None for the weights.
    """
    if rows_pass is None:
        raise Unsupported("this model does not hand on to its attention what it is called with")
    refuse_unknown("attention over rows", others)
    keys, values = rows_pass.rows.layer(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    if isinstance(rows_pass, Prefill):
        return _prefill(rows_pass, query, key, value, keys, values, scaling), None
    return _decode(rows_pass, query, key, value, keys, values, scaling), None


def _prefill(
    work: Prefill,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    parts = []
    for segment in work.segments:
        here = slice(segment.start, segment.start + segment.length)
        own_key, own_value = key[:, :, here], value[:, :, here]
        keys[segment.row, :, : segment.length] = own_key[0]
        values[segment.row, :, : segment.length] = own_value[0]
        parts.append(
            scaled_dot_product_attention(
                query[:, :, here],
                own_key,
                own_value,
                is_causal=True,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


def _decode(
    work: Decode,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    count, heads, _, width = query.shape
    kept = key.shape[1]
    which = torch.arange(count, device=key.device)
    keys[which, :, work.positions] = key[:, :, 0]
    values[which, :, work.positions] = value[:, :, 0]
    # Heads that share keys stand side by side as if they were positions: nothing is repeated.
    grouped = query.view(count, kept, heads // kept, width)
    found = scaled_dot_product_attention(
        grouped,
        keys[:count, :, : work.longest],
        values[:count, :, : work.longest],
        attn_mask=work.mask,
        scale=scaling,
    )
    return found.reshape(count, 1, heads, value.shape[3])
