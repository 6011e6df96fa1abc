"""KV cache for continuous batching: a slot for each text, whatever its length.

transformers' cache is a rectangle in which every text has the same position: it is copied for every
token (concatenated), and a text that has ended keeps its place. Here every slot has a length of
its own and its memory is taken once. A pass over the model is one of two kinds:

    prefill   whole prompts one behind the other in a single row of tokens, [1, all tokens]: no
              padding; each prompt attends to itself alone
    decode    one token for each slot, [slots, 1]; each attends to its own slot

A decoding step waits for memory: it reads all keys and values. One call of attention reads every
row up to the longest, so texts of like length stand side by side, and each such group has a call.

Models reach this through transformers' attention interface, under the name ``NAME``: whatever
architecture calls it with its keys and values works here, and its cache stays unused.
"""

from __future__ import annotations

import bisect
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
#: Most positions of a text in the first class of lengths; each further class has half as many more.
SHORTEST = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """One prompt within a prefill: where its tokens stand, and which slot keeps them."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True)
class Prefill:
    """A pass over prompts, one behind the other."""

    cache: KVCache
    segments: Sequence[Segment]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot and position of each token, on the host."""
        lengths = torch.tensor([segment.length for segment in self.segments])
        slots = torch.tensor([segment.slot for segment in self.segments])
        positions = torch.cat([torch.arange(segment.length) for segment in self.segments])
        return slots.repeat_interleave(lengths), positions


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of a decoding step whose texts are of like length, in slots side by side."""

    slots: slice
    rows: slice
    longest: int  # positions that any of them attends to
    mask: torch.Tensor  # [rows, 1, 1, longest], added to the scores: 0 or -inf


class Decode:
    """A pass over one token for each slot in use, group by group.

    Args:
        cache: of the texts.
        groups: of each the first slot, and for this and those behind it the positions of the
            tokens, in each slot from 0.
        dtype: of the model.
        device: of the model.
    """

    def __init__(
        self,
        cache: KVCache,
        groups: Sequence[tuple[int, Sequence[int]]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.cache = cache
        self.groups: list[Group] = []
        slots: list[int] = []
        for first, own in groups:
            longest = max(own) + 1
            beyond = torch.arange(longest)[None, :] > torch.tensor(own)[:, None]
            mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, float("-inf"))
            rows = slice(len(slots), len(slots) + len(own))
            at = slice(first, first + len(own))
            self.groups.append(Group(at, rows, longest, mask[:, None, None, :].to(device)))
            slots += range(at.start, at.stop)
        self.positions = torch.tensor(
            [position for _, own in groups for position in own], device=device
        )
        self._slots = torch.tensor(slots, device=device)
        self._cells: dict[int, torch.Tensor] = {}

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot and position of each token."""
        return self._slots, self.positions

    def cells(self, heads: int) -> torch.Tensor:
        """Place for what the tokens add to a layer of so many heads: row by row, head by head."""
        if heads not in self._cells:
            head = torch.arange(heads, device=self._slots.device)
            rows = self._slots[:, None] * heads + head
            self._cells[heads] = (rows * self.cache.capacity + self.positions[:, None]).view(-1)
        return self._cells[heads]


class KVCache:
    """Keys and values: for each layer two tensors [all positions × heads, width].

    They are made when a layer first shows what it holds, and hold zeros: beyond its end a slot
    that is shorter than another is attended to with a weight of zero, and zero times what
    happens to be in memory need not be zero. On a CPU, memory that was never written is not there,
    so a slot costs what its texts needed; in small pages, for a large one is there as soon as a
    byte of it is.

    Args:
        slot_count: texts that have room at a time.
        capacity: positions of each.
    """

    def __init__(self, slot_count: int, capacity: int) -> None:
        self.slot_count = slot_count
        self.capacity = capacity
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(
        self, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values; like those given in heads, width and format."""
        if index not in self._layers:
            self._layers[index] = (self._zeros(key), self._zeros(value))
        return self._layers[index]

    def slots(self, held: torch.Tensor) -> torch.Tensor:
        """A layer's keys or values: [slots, heads, capacity, width]."""
        return held.view(self.slot_count, -1, self.capacity, held.shape[1])

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.slot_count * self.capacity * like.shape[1], like.shape[3])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        # Zeros of torch are written one by one, those of numpy lie in large pages.
        size = math.prod(shape) * like.element_size()
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with suppress(OSError):  # a kernel that knows no large pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(memory, dtype=like.dtype).view(shape)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of one slot into another, whose own text is gone."""
        for layer in self._layers.values():
            for held in layer:
                slots = self.slots(held)
                slots[target, :, :length] = slots[source, :, :length]


def length_classes(totals: Sequence[int], device: torch.device) -> list[int]:
    """The class of each text, by its length at most; those of one class are attended to together.

    Elsewhere than on a CPU there is one class: a layer has one call, and no text makes room.
    """
    if device.type != "cpu":
        return [0] * len(totals)
    bounds = [SHORTEST]
    while bounds[-1] < max(totals):
        bounds.append(bounds[-1] * 3 // 2)
    return [bisect.bisect_left(bounds, total) for total in totals]


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
        for held, own in ((keys, own_key), (values, own_value)):
            work.cache.slots(held)[segment.slot, :, : segment.length] = own[0]
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
    cells = work.cells(kept)
    keys.index_put_((cells,), key.reshape(-1, width))
    values.index_put_((cells,), value.reshape(-1, value.shape[3]))
    # Heads that share keys stand side by side as if they were positions: nothing is repeated.
    grouped = query.view(count, kept, heads // kept, width)
    all_keys, all_values = work.cache.slots(keys), work.cache.slots(values)
    parts = []
    for group in work.groups:
        parts.append(
            scaled_dot_product_attention(
                grouped[group.rows],
                all_keys[group.slots, :, : group.longest],
                all_values[group.slots, :, : group.longest],
                attn_mask=group.mask,
                scale=scaling,
            )
        )
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found.reshape(count, 1, heads, value.shape[3])
