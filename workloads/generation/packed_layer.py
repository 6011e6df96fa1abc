"""A decoder layer in few calls: queries, keys and values by one product, sums inside of products.

A decoding step of few texts is many small operations, each of which is over before the processor's
cores have met. A layer of norm, attention, norm and gated linear unit keeps its place in the model,
its attention function and its cache, and computes the same with a third of the calls. That it is
such a layer is shown, not believed: what comes out must be alike (``fuse``).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import rms_norm

from workloads.attention_words import refuse_unknown
from workloads.generation import kv_cache
from workloads.generation.native import decoder_layer as native
from workloads.generation.native.products import NativeGated, NativeLinear
from workloads.generation.packed_products import (
    GatedProduct,
    Int8Gated,
    Int8Linear,
    PackedLinear,
    Rows8,
    gate_up_down,
    is_int8,
    is_plain,
    joined,
)

_PARTS = {"input_layernorm", "mlp", "post_attention_layernorm", "self_attn"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
#: Positions of the text with which a layer is compared.
_PROOF_POSITIONS, _PROOF_DISTANCE = 4, 7
#: Positions beyond any at which a layer may begin to do something else.
_FAR = 1 << 30
#: Shares of what a layer changes by which it may be off: in fp32, and in other formats.
_ALIKE, _ALIKE_ROUNDED = 1e-4, 0.1


class Rotation:
    """Rotary positions, of which all layers of a model have one together: what the angles of a
    pass are in the form in which they are needed is found once."""

    def __init__(self, pairs: bool, in_code: bool) -> None:
        self.pairs = pairs
        self.passes = native.Passes() if in_code else None  # None: no layer is machine code
        self._of: Any = None
        self._angles: tuple[torch.Tensor, torch.Tensor]

    def __call__(self, heads: torch.Tensor, embeddings: Any) -> torch.Tensor:
        """Heads [..., heads, width], turned."""
        cos, sin = self._found(embeddings)
        rotary = cos.shape[-1]
        turns, rest = heads[..., :rotary], heads[..., rotary:]
        if self.pairs:
            other = turns.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            half = rotary // 2
            other = torch.cat((turns[..., half:], turns[..., :half]), dim=-1)
        done = torch.addcmul(turns * cos, other, sin)
        return torch.cat((done, rest), dim=-1) if rest.shape[-1] else done

    def _found(self, embeddings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the sign of what they are multiplied by; for all heads."""
        if embeddings is not self._of:
            cos, sin = (each.unsqueeze(-2) for each in embeddings)
            half = cos.shape[-1] // 2
            if self.pairs:
                cos = cos[..., :half].repeat_interleave(2, dim=-1)
                sin = torch.stack((-sin[..., :half], sin[..., :half]), dim=-1).flatten(-2)
            else:
                sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
            self._of, self._angles = embeddings, (cos, sin)
        return self._angles


class PackedLayer:
    """The forward of a decoder layer.

    Args:
        layer: of transformers, with the parts of which this is made.
        rotation: of the model's positions.
    """

    def __init__(self, layer: Any, rotation: Rotation) -> None:
        attention: Any = layer.self_attn
        self._attention = attention
        self._rotation = rotation
        self._before = _gain(layer.input_layernorm)
        self._between = _gain(layer.post_attention_layernorm)
        self._width = int(attention.head_dim)
        three = [getattr(attention, name) for name in _PROJECTIONS[:3]]
        self._heads = [each.out_features // self._width for each in three]
        self.int8 = is_int8(attention.o_proj)
        self.native = _native(layer, three, rotation)
        self._qkv: Int8Linear | PackedLinear | NativeLinear
        self._out: Int8Linear | PackedLinear | NativeLinear
        self._unit: Int8Gated | GatedProduct | NativeGated
        if self.native is not None:
            self._qkv, self._out = self.native.qkv, self.native.out
            self._unit = self.native.unit
        elif self.int8:
            *gates, down = _gated(layer.mlp)
            self._qkv = Int8Linear(three, Rows8())
            self._out = Int8Linear([attention.o_proj], Rows8())
            self._unit = Int8Gated(gates, down)
        else:
            gate, up, down = _gated(layer.mlp)
            self._qkv, self._out = PackedLinear(joined(three)), PackedLinear(attention.o_proj)
            self._unit = GatedProduct(gate, up, down)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """As transformers calls it."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attention = self._attention
        work = others.get("cache_pass")
        if (
            self.native is not None
            and isinstance(work, kv_cache.Prefill | kv_cache.Decode)
            and attention.config._attn_implementation == kv_cache.NAME
        ):
            refuse_unknown("attention over the KV cache", others)
            done = self.native.forward(hidden_states, position_embeddings, work)
            if done is not None:
                return done
        normed = rms_norm(hidden_states, *self._before)
        three = self._qkv(normed).unflatten(-1, (-1, self._width))
        queries, keys, values = self._heads
        turned = self._rotation(three[..., : queries + keys, :], position_embeddings)
        query, key = (each.transpose(1, 2) for each in turned.split((queries, keys), dim=-2))
        value = three[..., -values:, :].transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
        found, _ = attend(
            *(attention, query, key, value, attention_mask),
            dropout=0.0,
            scaling=attention.scaling,
            **others,
        )
        hidden = self._out.plus(found.flatten(2), hidden_states)
        return self._unit.plus(rms_norm(hidden, *self._between), hidden)


def _native(
    layer: Any, projections: Sequence[torch.nn.Linear], rotation: Rotation
) -> native.NativeLayer | None:
    """The layer in machine code; None where there is none for it."""
    gated = _gated(layer.mlp)
    if rotation.passes is None or native.lacking(layer, projections, gated):
        return None
    norms = layer.input_layernorm, layer.post_attention_layernorm
    gains = [(gain, eps) for _, gain, eps in map(_gain, norms)]
    return native.NativeLayer(layer, projections, gated, gains, rotation.pairs, rotation.passes)


def lacking(layers: torch.nn.ModuleList) -> str:
    """The reason why there is no machine code for some of a model's layers; empty where there is
    for all. Told before one is proved, since a proof in fp32 would compile code for nothing."""
    for layer in filter(_has_parts, layers):
        attention: Any = layer.self_attn
        three = [getattr(attention, name) for name in _PROJECTIONS[:3]]
        if reason := native.lacking(layer, three, _gated(layer.mlp)):
            return reason
    return ""


def fuse(layers: torch.nn.ModuleList, rotary: torch.nn.Module, in_code: bool) -> list[PackedLayer]:
    """Give those of a model's layers that can be computed so this forward, which are returned.

    Args:
        layers: one after the other; each gives up its matrices as it is packed.
        rotary: makes the embeddings of positions.
        in_code: by machine code, for which nothing is ``lacking``.
    """
    done: list[PackedLayer] = []
    rotations = [Rotation(pairs, in_code) for pairs in (False, True)]
    for layer in layers:
        rotation = _proved(layer, rotary, rotations)
        if rotation is None:
            continue
        packed = PackedLayer(layer, rotation)
        layer.forward = packed.forward
        for name in _PROJECTIONS:
            delattr(layer.self_attn, name)
        del layer.mlp
        done.append(packed)
        rotations = [rotation]
    return done


def by_rows(model: Any) -> bool:
    """Tell if machine code attends in all layers of a model: to each row's own length, so that
    texts of like length need not stand side by side."""
    layers = getattr(getattr(model, "model", None), "layers", None) or ()
    forwards = [getattr(layer.forward, "__self__", None) for layer in layers]
    return bool(forwards) and all(
        isinstance(each, PackedLayer) and each.native is not None for each in forwards
    )


def _proved(layer: Any, rotary: torch.nn.Module, rotations: Sequence[Rotation]) -> Rotation | None:
    """The rotation with which the same comes out; None where it does with neither."""
    if not _has_parts(layer):
        return None
    try:
        # In int8 and bf16 a wrong reading may look like rounding; in fp32 it does not.
        best = _alike(_in_fp32(layer), rotary, rotations, _ALIKE)
        if best is None or layer.input_layernorm.weight.dtype == torch.float32:
            return best
        return _alike(layer, rotary, [best], _ALIKE_ROUNDED)
    except Exception:  # whatever a layer of another kind makes of this
        return None


def _alike(
    layer: Any, rotary: torch.nn.Module, rotations: Sequence[Rotation], limit: float
) -> Rotation | None:
    """The rotation with which what comes out of a layer is off by no more than this share of what
    it changes, and a rounding; None where there is none."""
    gain = layer.input_layernorm.weight
    size = _PROOF_POSITIONS, len(gain)
    hidden = torch.arange(size[0] * size[1]).sin().view(1, *size).to(gain.dtype)
    positions = torch.arange(_PROOF_POSITIONS)[None] * _PROOF_DISTANCE
    asked = {"position_embeddings": rotary(hidden, positions), "position_ids": positions}
    expected = layer(hidden, **asked)
    allowed = limit * (expected - hidden).float().norm()
    allowed += torch.finfo(gain.dtype).eps * expected.float().norm()
    farther = asked | {"position_ids": positions + _FAR}
    if not expected.equal(layer(hidden, **farther)):
        return None  # it reads positions by itself, as Ministral's scale of queries does
    off = {}
    for rotation in rotations:
        packed = PackedLayer(layer, rotation)
        got = [packed.forward(hidden, **asked)]
        if packed.native is not None:
            cache = kv_cache.KVCache(1, _PROOF_POSITIONS)
            whole = kv_cache.Prefill(cache, [kv_cache.Segment(0, 0, _PROOF_POSITIONS)])
            read = packed.native.forward(hidden, asked["position_embeddings"], whole)
            if read is not None:
                got += [read, _last_again(packed.native, read, hidden, asked, cache)]
        off[rotation] = max(float((each - expected).float().norm()) for each in got)
    best = min(off, key=off.__getitem__)
    return best if off[best] <= allowed else None


def _last_again(
    layer: native.NativeLayer, read: torch.Tensor, hidden: Any, asked: Any, cache: kv_cache.KVCache
) -> torch.Tensor:
    """Outputs [1, positions, hidden] of a read prompt, the last one as it would be decoded."""
    last = slice(hidden.shape[1] - 1, None)
    work = kv_cache.Decode(cache, [(0, [last.start])], hidden.dtype, hidden.device)
    angles = tuple(each[:, last] for each in asked["position_embeddings"])
    found = layer.forward(hidden[:, last], angles, work)
    assert found is not None  # like the pass before
    return torch.cat((read[:, : last.start], found), dim=1)


def _in_fp32(layer: Any) -> Any:
    """A copy of a layer with plain numbers of 32 bits."""
    layer = copy.deepcopy(layer)
    for module in layer.modules():
        if type(module) is torch.nn.Linear and is_int8(module):
            plain = module.weight.dequantize()  # type: ignore[operator]
            module.weight = torch.nn.Parameter(plain, requires_grad=False)
    return layer.float()


def _has_parts(layer: Any) -> bool:
    """Tell if a layer has the parts of which ``PackedLayer`` is made, and no others."""
    if {name for name, _ in layer.named_children()} != _PARTS or layer.training:
        return False
    attention: Any = layer.self_attn
    if {name for name, _ in attention.named_children()} != set(_PROJECTIONS):
        return False
    linear: Sequence[Any] = [getattr(attention, name) for name in _PROJECTIONS]
    if any(type(one) is not torch.nn.Linear for one in linear):
        return False
    if linear[0].weight.device.type != "cpu":
        return False
    if all(map(is_int8, linear)):
        return bool(_int8_gates(layer.mlp))
    return all(map(is_plain, linear)) and gate_up_down(layer.mlp) is not None


def _gated(unit: Any) -> tuple[torch.nn.Linear, ...]:
    """The linear layers of a gated feed-forward layer, those of the gate first, down last."""
    if names := _int8_gates(unit):
        return tuple(getattr(unit, name) for name in names)
    found = gate_up_down(unit)
    assert found is not None
    return found


def _int8_gates(unit: torch.nn.Module) -> tuple[str, ...]:
    """The names of the linear layers of a gated feed-forward layer in int8; none: it is not one."""
    children = {name: each for name, each in unit.named_children() if type(each) is torch.nn.Linear}
    if not all(map(is_int8, children.values())):
        return ()
    for names in (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")):
        if children.keys() == set(names):
            return names
    return ()


def _gain(norm: Any) -> tuple[tuple[int, ...], torch.Tensor, float]:
    """A norm's further arguments of ``rms_norm``."""
    weight = norm.weight.detach()
    return tuple(weight.shape), weight, float(norm.variance_epsilon)
