"""Weight sharing and Huffman coding: the second and third stage of Deep Compression.

One-dimensional k-means (Lloyd's algorithm from evenly spaced values) gathers a layer's weights into
a few values; zero is a symbol of its own. The code is written and read back, so a row's size is
that of a decodable layer. It saves disk, not time: layers are expanded before use.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workloads.base import BadConfiguration

if TYPE_CHECKING:
    import torch

_ITERATIONS = 40
#: Symbols between noted positions, for decoding in parallel.
_LANE = 1024
#: Bits that a reader sees at once; longer codes would need 2**37 weights.
_WINDOW = 56

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One layer after sharing: symbols and their values."""

    symbols: Array  # one a weight
    values: Array  # float32, by symbol


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """Symbols as bits."""

    data: bytes
    lengths: Array  # bits of each symbol's code; canonical, so the lengths are the code
    lanes: Array  # position of every 1,024th symbol in the bits
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes that a reader needs, besides the values."""
        return len(self.data) + self.lengths.size + self.lanes.nbytes


def share(weights: Array, bits: int) -> Shared:
    """Gather nonzero weights into 2**bits values."""
    flat = weights.astype(np.float32).ravel()
    some = flat != 0
    ordered = np.sort(flat[some]).astype(np.float64)
    count = min(2**bits, len(np.unique(ordered)))
    if not count:
        return Shared(symbols=np.zeros(flat.size, np.int32), values=np.zeros(1, np.float32))
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    centres = np.linspace(ordered[0], ordered[-1], count)
    for _ in range(_ITERATIONS):
        cuts = np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2)
        edges = np.concatenate([[0], cuts, [ordered.size]])
        sizes = np.diff(edges)
        means = np.diff(sums[edges]) / np.maximum(sizes, 1)
        moved = np.where(sizes > 0, means, centres)
        if np.allclose(moved, centres, rtol=0, atol=1e-12):
            break
        centres = moved
    symbols = np.zeros(flat.size, np.int32)  # 0 is zero
    symbols[some] = 1 + np.searchsorted((centres[1:] + centres[:-1]) / 2, flat[some])
    values = np.concatenate([[0.0], centres]).astype(np.float32)
    return Shared(symbols=symbols, values=values)


def entropy_bits(counts: Array) -> float:
    """Entropy in bits a symbol: the lower bound of codes of single symbols."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def code_lengths(counts: Array) -> Array:
    """Length of each symbol's Huffman code in bits; 0 for a symbol that does not occur."""
    lengths = np.zeros(counts.size, np.uint8)
    heap: list[tuple[int, int, tuple[int, ...]]] = [
        (int(count), symbol, (symbol,)) for symbol, count in enumerate(counts) if count
    ]
    if len(heap) == 1:
        lengths[heap[0][1]] = 1
        return lengths
    heapq.heapify(heap)
    while len(heap) > 1:
        first, _, below = heapq.heappop(heap)
        second, tie, beside = heapq.heappop(heap)
        together = below + beside
        lengths[list(together)] += 1
        heapq.heappush(heap, (first + second, tie, together))
    return lengths


def encode(symbols: Array, size: int) -> Coded:
    """Code symbols below ``size``."""
    lengths = code_lengths(np.bincount(symbols, minlength=size))
    codes = _codes(lengths)
    widths = lengths[symbols].astype(np.int64)
    starts = np.cumsum(widths) - widths
    total = int(widths.sum())
    bits = np.zeros(total, np.uint8)
    for bit in range(int(lengths.max())):
        here = widths > bit
        shift = (widths[here] - 1 - bit).astype(np.uint64)
        bits[starts[here] + bit] = (codes[symbols[here]] >> shift) & np.uint64(1)
    return Coded(
        data=np.packbits(bits).tobytes(),
        lengths=lengths,
        lanes=starts[::_LANE].astype(np.uint32 if total < 2**32 else np.uint64),
        count=symbols.size,
    )


def decode(coded: Coded) -> Array:
    """Decode the symbols; codes follow from their lengths."""
    lengths = coded.lengths.astype(np.int64)
    used = np.flatnonzero(lengths)
    order = used[np.lexsort((used, lengths[used]))]
    left = (_WINDOW - lengths[order]).astype(np.uint64)
    first = _codes(coded.lengths)[order] << left  # ascending, as codes are canonical
    data = np.concatenate([np.frombuffer(coded.data, np.uint8), np.zeros(8, np.uint8)])
    at = coded.lanes.astype(np.int64)
    symbols = np.zeros((_LANE, at.size), np.int32)
    eight, whole = np.arange(8), len(coded.data)
    shifts = (56 - 8 * eight).astype(np.uint64)
    for step in range(min(_LANE, coded.count)):
        place = np.minimum(at >> 3, whole)  # the last lane may end before the others
        window = data[place[:, None] + eight].astype(np.uint64)
        word = np.bitwise_or.reduce(window << shifts, axis=1) << (at & 7).astype(np.uint64)
        symbol = order[np.searchsorted(first, word >> np.uint64(8), side="right") - 1]
        symbols[step] = symbol
        at = at + lengths[symbol]
    return symbols.T.ravel()[: coded.count]


def _codes(lengths: Array) -> Array:
    """Canonical codes: ascending by length, then by symbol."""
    codes = np.zeros(lengths.size, np.uint64)
    code, before = 0, 0
    for symbol in sorted(np.flatnonzero(lengths), key=lambda s: (lengths[s], s)):
        code <<= int(lengths[symbol]) - before
        codes[symbol], before = code, int(lengths[symbol])
        code += 1
    return codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Total sizes of shared layers."""

    coded_bytes: int  # codes, their tables and the values
    entropy_bits: float  # a weight
    coded_bits: float  # a weight, of codes alone


def share_layers(layers: dict[str, torch.nn.Linear], bits: int) -> Sizes:
    """Share layers' weights in place, measure their code; BadConfiguration if not decodable."""
    import torch

    weights = coded_bytes = data_bytes = 0
    entropy = 0.0
    for name, layer in layers.items():
        weight = layer.weight.data
        shared = share(weight.float().cpu().numpy(), bits)
        coded = encode(shared.symbols, shared.values.size)
        if not np.array_equal(decode(coded), shared.symbols):
            raise BadConfiguration(f"cluster_bits: the code of {name} does not read back")
        values = torch.from_numpy(shared.values[shared.symbols]).view_as(weight)
        weight.copy_(values.to(weight.dtype))
        weights += shared.symbols.size
        coded_bytes += coded.nbytes + 4 * shared.values.size
        data_bytes += len(coded.data)
        entropy += entropy_bits(np.bincount(shared.symbols)) * shared.symbols.size
    return Sizes(
        coded_bytes=coded_bytes,
        entropy_bits=entropy / weights,
        coded_bits=8 * data_bytes / weights,
    )
