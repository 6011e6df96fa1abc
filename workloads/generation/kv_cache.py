"""KV cache for continuous batching: a slot for each text, whatever its length.

transformers' cache is a rectangle in which every text has the same position: it is copied for every
token (concatenated), and a text that has ended keeps its place. Here every slot has a length of
its own and its memory is taken once. A pass over the model is one of two kinds:

    prefill   whole prompts one behind the other in a single row of tokens, [1, all tokens]: no
              padding; each prompt attends to itself alone
    decode    one token for each slot, [slots, 1]; each attends to its own slot

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

#: The name of the attention function in transformers' registry.
NAME = "nightgrid_kv_cache"


@dataclass(frozen=True, slots=True)
class Segment:
    """One prompt within a prefill: where its tokens stand, and which slot keeps them."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """A pass over prompts, one behind the other."""

    cache: KVCache
    segments: Sequence[Segment]


@dataclass(frozen=True, slots=True)
class Decode:
    """A pass over one token for each of the first ``count`` slots."""

    cache: KVCache
    count: int
    positions: torch.Tensor  # [count]: of the tokens, in each slot from 0
    longest: int  # positions that any of them attends to
    mask: torch.Tensor  # [count, 1, 1, longest], added to the scores: 0 or -inf


class KVCache:
    """Keys and values: for each layer two tensors [slots, heads, capacity, width].

    They are made when a layer first shows what it holds, and hold zeros: beyond its end a slot
    that is shorter than another is attended to with a weight of zero, and zero times what
    happens to be in memory need not be zero. On a CPU, memory that was never written is not there,
    so a slot costs what its text needs; in small pages, for a large one is there as soon as a
    byte of it is.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots = slots
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
        shape = (self.slots, like.shape[1], self.capacity, like.shape[3])
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

    def clear(self, slot: int) -> None:
        """Empty a slot whose text has ended: on a CPU its memory goes back to the system. Else
        every slot would soon hold as much as the longest text that it ever had."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for memory in self._memory:
            size = len(memory) // self.slots
            # Pages that it shares with its neighbours stay.
            start = -(-slot * size // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (slot + 1) * size // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of one slot into another, whose own text is gone."""
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
    cache_pass: Prefill | Decode | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the KV cache; called by the model's layers.

    Args:
        module: the layer, whose ``layer_idx`` says which it is.
        query: [1, heads, all tokens, width] in a prefill, [slots, heads, 1, width] in decoding.
        key: as ``query``, with as many heads as the model keeps.
        value: as ``key``.
        attention_mask: none; the pass says what is attended to.
        scaling: of the scores.
        cache_pass: what is being done, handed through by the model.
        others: what else a model says, refused where it would change the result.

    Returns:
        [1, all tokens, heads, width] or [slots, 1, heads, width], and None for the weights.
    """
    if cache_pass is None:
        raise Unsupported("this model does not pass its keyword arguments on to its attention")
    refuse_unknown("attention over the KV cache", others)
    keys, values = cache_pass.cache.layer(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    if isinstance(cache_pass, Prefill):
        return _prefill(cache_pass, query, key, value, keys, values, scaling), None
    return _decode(cache_pass, query, key, value, keys, values, scaling), None


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
        keys[segment.slot, :, : segment.length] = own_key[0]
        values[segment.slot, :, : segment.length] = own_value[0]
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
