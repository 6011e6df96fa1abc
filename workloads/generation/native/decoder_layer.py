"""A decoder layer over the slots of continuous batching, in one call of machine code.

What ``packed_layer.PackedLayer`` says in torch's operations, with less memory gone through and no
time between operations. It takes a pass over the slots alone: a prompt's tokens or one of each
text, each at its slot and its position. Everything else goes by torch's operations, on the same
weights.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from workloads.generation.kv_cache import Decode, Prefill
from workloads.generation.native.products import (
    HALF,
    PANEL,
    NativeGated,
    NativeLinear,
    Weights,
    code,
    kept_in,
    sums_fit,
)
from workloads.generation.native.products import lacking as lacking_products

#: Most tokens of a prompt: the keys and values of a longer one's heads would not stay in a core's
#: cache, and torch reads them in blocks.
LONGEST_PROMPT = 512

#: Numbers between products, by the format of weights.
_NUMBERS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16}
_int, _float, _pointer = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, Weights) for name in ("qkv", "out", "gates", "down")),
        *((name, _pointer) for name in ("before", "between", "keys", "values")),
        ("capacity", ctypes.c_int64),
        *((n, _int) for n in ("hidden", "inner", "heads", "kept", "width", "rotary", "pairs")),
        *((name, _float) for name in ("before_eps", "between_eps", "scaling")),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("slots", "positions", "cos", "sin")),
        *((name, _int) for name in ("rows", "threads")),
    ]


class Passes:
    """The pass that is being done, as the machine code takes it: made once for all layers."""

    def __init__(self) -> None:
        self._of: weakref.ref[Any] | None = None
        self._embeddings: Any = None
        self._made: tuple[_Pass | None, int] = None, 0
        self._held: tuple[torch.Tensor, ...] = ()

    def __call__(
        self, work: Prefill | Decode, embeddings: Any, dtype: torch.dtype
    ) -> tuple[_Pass | None, int]:
        """The pass and the width of its angles; None for one that is left to torch."""
        if self._of is None or self._of() is not work or self._embeddings is not embeddings:
            self._made = self._make(work, embeddings, dtype)
            self._of, self._embeddings = weakref.ref(work), embeddings
        return self._made

    def _make(self, work: Any, embeddings: Any, dtype: torch.dtype) -> tuple[_Pass | None, int]:
        rotary = embeddings[0].shape[-1]
        slots, positions = work.rows()
        rows = len(slots)
        if any(each.numel() != rows * rotary for each in embeddings):
            return None, rotary
        if isinstance(work, Prefill) and max(s.length for s in work.segments) > LONGEST_PROMPT:
            return None, rotary
        cache = work.cache  # beyond which nothing may be written; torch says what is wrong
        if int(slots.max()) >= cache.slot_count or int(positions.max()) >= cache.capacity:
            return None, rotary
        angles = [each.to(dtype).contiguous() for each in embeddings]
        self._held = slots, positions, *angles
        at = [each.data_ptr() for each in self._held]
        return _Pass(*at, rows, torch.get_num_threads()), rotary


class NativeLayer:
    """The weights of a decoder layer, and its forward over slots.

    Args:
        layer: of transformers, with the parts of which ``PackedLayer`` is made.
        projections: of queries, keys and values.
        gated: the linear layers of its feed-forward layer, ``down`` last.
        gains: of both norms, with what is added to their squares.
        pairs: rotary positions turn neighbours, else halves.
        passes: of all layers together.
    """

    def __init__(
        self,
        layer: Any,
        projections: Sequence[torch.nn.Linear],
        gated: Sequence[torch.nn.Linear],
        gains: Sequence[tuple[torch.Tensor, float]],
        pairs: bool,
        passes: Passes,
    ) -> None:
        attention = layer.self_attn
        self.qkv, self.out = NativeLinear(projections), NativeLinear([attention.o_proj])
        self.unit = NativeGated(gated[:-1], gated[-1])
        self.format = self.qkv.format
        parts = self.qkv, self.out, self.unit.gates, self.unit.down
        (self.kernel,) = {each.kernel for each in parts}
        self._run = getattr(code().library, f"layer_{self.kernel}")
        self._index, self._passes = int(attention.layer_idx), passes
        width = int(attention.head_dim)
        heads, kept = (each.out_features // width for each in projections[:2])
        self._cached = (1, kept, 1, width)  # one position's keys
        self._gains = gains
        self._layer = _Layer(
            *(each.weights for each in parts),
            *(gain.data_ptr() for gain, _ in gains),
            *(None, None, 0),
            *(self.out.out_features, self.unit.down.in_features, heads, kept, width),
            *(0, int(pairs), *(eps for _, eps in gains), float(attention.scaling)),
        )
        self._cache: weakref.ref[Any] | None = None

    def forward(self, hidden: torch.Tensor, embeddings: Any, work: Any) -> torch.Tensor | None:
        """The output of the layer; None for a pass that is left to torch.

        Args:
            hidden: [1, all tokens, hidden] in a prefill, [slots, 1, hidden] in decoding.
            embeddings: cosines and sines of the rows' positions.
            work: the pass.

        Raises:
            MemoryError: there is none for what lies between the layer's products.
        """
        made, rotary = self._passes(work, embeddings, hidden.dtype)
        if made is None or hidden.dtype != self.qkv.dtype:
            return None
        if self._cache is None or self._cache() is not work.cache:
            like = hidden.new_empty(self._cached)
            keys, values = work.cache.layer(self._index, like, like)
            self._layer.keys, self._layer.values = keys.data_ptr(), values.data_ptr()
            self._layer.capacity, self._layer.rotary = work.cache.capacity, rotary
            self._cache = weakref.ref(work.cache)
        hidden = hidden.contiguous()
        found = torch.empty_like(hidden)
        if self._run(
            *(ctypes.byref(self._layer), ctypes.byref(made)),
            *(_pointer(each.data_ptr()) for each in (hidden, found)),
        ):
            raise MemoryError(f"no memory for a decoder layer over {made.rows} rows")
        return found


def lacking(
    layer: Any, projections: Sequence[torch.nn.Linear], gated: Sequence[torch.nn.Linear]
) -> str:
    """The reason why there is no machine code for a layer of this format and these sizes; empty
    where there is."""
    name = kept_in([*projections, layer.self_attn.o_proj, *gated])
    if name is None or layer.input_layernorm.weight.dtype != _NUMBERS[name]:
        return "it is for fp32, bf16, and int8 beside bf16"
    if reason := lacking_products(name):
        return reason
    width = int(layer.self_attn.head_dim)
    heads, kept = (each.out_features // width for each in projections[:2])
    library: Any = code().library
    down, out = gated[-1], layer.self_attn.o_proj
    fits = (
        sums_fit(name, [*projections, out, *gated])
        and out.in_features == heads * width
        and out.out_features == down.out_features
        and not down.out_features % PANEL
        and not sum(each.out_features for each in projections) % PANEL
        and not down.in_features % HALF
        and all(not each.in_features % 4 for each in (*projections, out, down))
        and heads % kept == 0
        and heads // kept <= library.most_shared()
        and width <= library.most_width()
        and projections[2].out_features == projections[1].out_features
    )
    return "" if fits else "it is for layers of other sizes"
