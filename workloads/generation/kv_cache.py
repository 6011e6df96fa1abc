"""KV cache for continuous batching: a slot for each text, whatever its length.

transformers' cache is a rectangle in which every text has the same position: it is copied for every
token (concatenated), and a text that has ended keeps its place. Here every slot has a length of
its own and its memory is taken once. A pass over the model is one of two kinds:

    prefill   whole prompts one behind the other in a single row of tokens, [1, all tokens]: no
              padding; each prompt attends to itself alone
    decode    one token for each slot, [slots, 1]; each attends to its own slot

A decoding step waits for memory: it reads all keys and values. One call of attention reads every
row up to the longest, so slots come in regions of like capacity, and each region has a call.

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
#: Positions of a slot in the first region; each further region has half as many more.
SHORTEST = 64


@dataclass(frozen=True, slots=True)
class Region:
    """Slots of one capacity, one behind the other in the memory of each layer."""

    slots: int
    capacity: int  # positions of a slot
    start: int  # positions of the regions before it


@dataclass(frozen=True, slots=True)
class Segment:
    """One prompt within a prefill: where its tokens stand, and which slot keeps them."""

    region: int
    slot: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """A pass over prompts, one behind the other."""

    cache: KVCache
    segments: Sequence[Segment]


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of a decoding step that are in one region: its first slots, in order."""

    region: int
    rows: slice
    longest: int  # positions that any of them attends to
    mask: torch.Tensor  # [rows, 1, 1, longest], added to the scores: 0 or -inf


class Decode:
    """A pass over one token for each slot in use, region by region.

    Args:
        cache: of the texts.
        positions: of the tokens, in each slot from 0: for each region those of its first slots.
        dtype: of the model.
        device: of the model.
    """

    def __init__(
        self,
        cache: KVCache,
        positions: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.cache = cache
        self.groups: list[Group] = []
        starts: list[int] = []
        capacities: list[int] = []
        for number, (region, own) in enumerate(zip(cache.regions, positions, strict=True)):
            if not own:
                continue
            longest = max(own) + 1
            beyond = torch.arange(longest)[None, :] > torch.tensor(own)[:, None]
            mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, float("-inf"))
            rows = slice(len(starts), len(starts) + len(own))
            mask = mask[:, None, None, :].to(device)
            self.groups.append(Group(number, rows, longest, mask))
            starts += [region.start + slot * region.capacity for slot in range(len(own))]
            capacities += [region.capacity] * len(own)
        self.positions = torch.tensor(
            [position for own in positions for position in own], device=device
        )
        self._starts = torch.tensor(starts, device=device)
        self._capacities = torch.tensor(capacities, device=device)
        self._cells: dict[int, torch.Tensor] = {}

    def cells(self, heads: int) -> torch.Tensor:
        """Place for what the tokens add to a layer of so many heads: row by row, head by head."""
        if heads not in self._cells:
            head = torch.arange(heads, device=self._starts.device)
            starts = (self._starts * heads + self.positions)[:, None]
            self._cells[heads] = (starts + head * self._capacities[:, None]).view(-1)
        return self._cells[heads]


class KVCache:
    """Keys and values: for each layer two tensors [all positions × heads, width].

    They are made when a layer first shows what it holds, and hold zeros: beyond its end a slot
    that is shorter than another is attended to with a weight of zero, and zero times what
    happens to be in memory need not be zero. On a CPU, memory that was never written is not there,
    so a slot costs what its texts needed; in small pages, for a large one is there as soon as a
    byte of it is.

    Args:
        sizes: of each region its slots and their capacity.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        regions, start = [], 0
        for slots, capacity in sizes:
            regions.append(Region(slots, capacity, start))
            start += slots * capacity
        self.regions: Sequence[Region] = regions
        self.positions = start
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(
        self, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values; like those given in heads, width and format."""
        if index not in self._layers:
            self._layers[index] = (self._zeros(key), self._zeros(value))
        return self._layers[index]

    def slots(self, held: torch.Tensor, region: int, heads: int) -> torch.Tensor:
        """A region of a layer's keys or values: [slots, heads, capacity, width]."""
        at = self.regions[region]
        size = at.slots * at.capacity * heads
        part = held[at.start * heads : at.start * heads + size]
        return part.view(at.slots, heads, at.capacity, -1)

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.positions * like.shape[1], like.shape[3])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        # Zeros of torch are written one by one, those of numpy lie in large pages.
        size = math.prod(shape) * like.element_size()
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with suppress(OSError):  # a kernel that knows no large pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(memory, dtype=like.dtype).view(shape)

    def move(self, region: int, source: int, target: int, length: int) -> None:
        """Copy the first positions of one slot into another, whose own text is gone."""
        for layer in self._layers.values():
            for held in layer:
                heads = held.shape[0] // self.positions
                slots = self.slots(held, region, heads)
                slots[target, :, :length] = slots[source, :, :length]


def region_sizes(
    totals: Sequence[int], slot_count: int, device: torch.device
) -> list[tuple[int, int]]:
    """Slots and capacity of each region, shortest first, for texts of these lengths at most.

    Elsewhere than on a CPU memory that is asked for is taken, so there is one region.
    """
    if device.type != "cpu":
        return [(min(slot_count, len(totals)), max(totals))]
    sizes: list[tuple[int, int]] = []
    bound, left = SHORTEST, sorted(totals)
    while left:
        own = [total for total in left if total <= bound]
        if own:
            sizes.append((min(slot_count, len(own)), own[-1]))
        left = left[len(own) :]
        bound = bound * 3 // 2
    return sizes


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
            slots = work.cache.slots(held, segment.region, own.shape[1])
            slots[segment.slot, :, : segment.length] = own[0]
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
    parts = []
    for group in work.groups:
        slots = slice(group.rows.stop - group.rows.start)
        parts.append(
            scaled_dot_product_attention(
                grouped[group.rows],
                work.cache.slots(keys, group.region, kept)[slots, :, : group.longest],
                work.cache.slots(values, group.region, kept)[slots, :, : group.longest],
                attn_mask=group.mask,
                scale=scaling,
            )
        )
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found.reshape(count, 1, heads, value.shape[3])
