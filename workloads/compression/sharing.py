"""Weight sharing and Huffman coding: the second and third stage of Deep Compression.

One-dimensional k-means (Lloyd's algorithm from evenly spaced values) gathers a layer's weights into
a few values; zero is a symbol of its own. Shared values can be trained on: the gradient of a value
is the sum over its weights. The code is a file that is read back, so a row's size is that of
decodable layers. It saves disk, not time: layers are expanded before use.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
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
class Coded:
    """Symbols as bits."""

    data: bytes
    lengths: Array  # bits of each symbol's code; canonical, so the lengths are the code
    lanes: Array  # position of every 1,024th symbol in the bits
    count: int


def share(weights: Array, bits: int) -> tuple[Array, Array]:
    """Gather nonzero weights into 2**bits values: a symbol for each weight in a row, and the value
    of each symbol in float32; symbol 0 is zero."""
    flat = weights.astype(np.float32).ravel()
    some = flat != 0
    ordered = np.sort(flat[some]).astype(np.float64)
    count = min(2**bits, len(np.unique(ordered)))
    if not count:
        return np.zeros(flat.size, np.int32), np.zeros(1, np.float32)
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
    symbols = np.zeros(flat.size, np.int32)
    symbols[some] = 1 + np.searchsorted((centres[1:] + centres[:-1]) / 2, flat[some])
    return symbols, np.concatenate([[0.0], centres]).astype(np.float32)


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


#: Name of the coded file beside a saved model's weights; its content is in safetensors.
CODED_FILE = "layers.coded"


class SharedLayers:
    """Linear layers whose nonzero weights share 2**bits values each, changed in place."""

    def __init__(self, layers: Mapping[str, torch.nn.Linear], bits: int) -> None:
        import torch

        self._layers = layers
        self._symbols: dict[str, torch.Tensor] = {}  # int16, in the weight's shape
        self._counts: dict[str, torch.Tensor] = {}  # weights of each symbol
        for name, layer in layers.items():
            weight = layer.weight.data
            numbers, values = map(torch.from_numpy, share(weight.float().cpu().numpy(), bits))
            symbols = numbers.long().view_as(weight).to(weight.device)
            weight.copy_(values.to(weight)[symbols])
            self._symbols[name] = symbols.short()
            self._counts[name] = torch.bincount(symbols.flatten(), minlength=len(values))

    def sum_gradients(self) -> None:
        """Replace each weight's gradient by the sum over its cluster: the gradient of the shared
        value (Han et al. 2016). Zeros stay."""
        for name, layer in self._layers.items():
            if layer.weight.grad is not None:
                sums = self._sums(name, layer.weight.grad)
                layer.weight.grad.copy_(sums[self._symbols[name].long()])

    def average_states(self, optimizer: Any) -> None:
        """Give the weights of a cluster equal averages in the optimizer: they move alike."""
        for name, layer in self._layers.items():
            for value in getattr(optimizer, "state", {}).get(layer.weight, {}).values():
                if getattr(value, "shape", None) == layer.weight.shape:
                    value.copy_(self._means(name, value)[self._symbols[name].long()])

    def tie(self) -> None:
        """Make the weights of a cluster equal again, where arithmetic has moved them apart."""
        for name, layer in self._layers.items():
            weight = layer.weight.data
            weight.copy_(self._means(name, weight)[self._symbols[name].long()])

    def _sums(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        counts = self._counts[name]
        sums = torch.zeros(len(counts), device=tensor.device)  # float32
        sums.index_add_(0, self._symbols[name].flatten().long(), tensor.detach().flatten().to(sums))
        sums[0] = 0  # of the zeros
        return sums

    def _means(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        means = self._sums(name, tensor) / self._counts[name].clamp(min=1)
        return means.to(tensor.dtype)

    def coded(self) -> tuple[bytes, dict[str, float]]:
        """Code all layers as a file's content, and read them back; also figures of the row.

        Raises BadConfiguration if a layer reads back otherwise.
        """
        import torch
        from safetensors.numpy import save

        tensors: dict[str, Array] = {}
        weights = coded_bytes = 0
        entropy = 0.0
        for name, layer in self._layers.items():
            symbols = self._symbols[name].cpu().numpy().astype(np.int32).ravel()
            values = np.zeros(len(self._counts[name]), np.float32)
            values[symbols] = layer.weight.data.float().cpu().numpy().ravel()
            coded = encode(symbols, values.size)
            tensors |= {
                f"shape.{name}": np.array(layer.weight.shape),
                f"values.{name}": values,
                f"lengths.{name}": coded.lengths,
                f"lanes.{name}": coded.lanes,
                f"bits.{name}": np.frombuffer(coded.data, np.uint8),
            }
            weights += symbols.size
            coded_bytes += len(coded.data)
            entropy += entropy_bits(np.bincount(symbols)) * symbols.size
        data: bytes = save(tensors)
        for name, array in read_layers(data).items():
            weight = self._layers[name].weight.data
            if not torch.equal(torch.from_numpy(array).to(weight), weight):
                raise BadConfiguration(f"cluster_bits: the code of {name} does not read back")
        return data, {"entropy_bits": entropy / weights, "coded_bits": 8 * coded_bytes / weights}


def read_layers(data: bytes) -> dict[str, Array]:
    """Open a coded file's content: weights [outputs, inputs] in float32, by layer.

    Raises BadConfiguration if it is another file, or truncated.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(data)
        layers = {}
        for name in [key.removeprefix("shape.") for key in tensors if key.startswith("shape.")]:
            shape = tensors[f"shape.{name}"].tolist()
            coded = Coded(
                data=tensors[f"bits.{name}"].tobytes(),
                lengths=tensors[f"lengths.{name}"],
                lanes=tensors[f"lanes.{name}"],
                count=math.prod(shape),
            )
            layers[name] = tensors[f"values.{name}"][decode(coded)].reshape(shape)
        return layers
    except (SafetensorError, LookupError, ValueError) as error:
        raise BadConfiguration(f"this is no file of coded layers: {error}") from error
