"""A decoder in plain torch: its matrices, constants and layers, read off a model of transformers by
its parts' names.

Supports models of norm, attention, norm and gated linear unit with residuals (Llama, Mistral,
Qwen2, Qwen3, GLM, GLM-4, ChatGLM3 and others); ``prove`` refuses those that compute otherwise.
Matrices may be stored in 8 and 4 bits, for weights only; a value is a stored number times a scale.

    int8   [N, K] int8, one scale for each row
    fp8    [N, K] float8_e4m3fn in the order below, one scale for each row
    int4   [N, K / 8] int32 words of eight values, one scale for ``GROUP`` values of a row

A thread reads ``WORDS`` 32-bit words at once. In int4 and fp8, part s (nibble or byte) of word j is
column s × ``WORDS`` + j, so each part covers neighbouring columns and threads exchange nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from workloads.base import Unsupported
from workloads.models import rules

GROUP = 64
WORDS = 4

#: Largest stored number of each format.
_LARGEST = {"int8": 127.0, "fp8": 448.0}
#: Range ends tried for 4 bits, as shares of the largest value.
_RANGES = tuple(share / 20 for share in range(14, 21))


@dataclass(frozen=True, slots=True)
class Matrix:
    """Stored matrix [rows, columns] of a linear layer."""

    values: torch.Tensor
    rows: int
    columns: int
    kind: str = ""  # "" for plain values, else int8, fp8 or int4
    scales: torch.Tensor | None = None  # [rows], or [rows, columns / GROUP] in 4 bits; float32
    bias: torch.Tensor | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of values, scales and bias."""
        return sum(t.nbytes for t in (self.values, self.scales, self.bias) if t is not None)

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Unpacked values [rows, columns]."""
        if not self.kind:
            return self.values.to(dtype)
        assert self.scales is not None
        if self.kind == "fp8":
            bytes_ = self.values.view(torch.uint8).unflatten(1, (-1, WORDS, 4)).transpose(2, 3)
            values = bytes_.reshape(self.rows, -1).view(torch.float8_e4m3fn).to(torch.float32)
            return (values * self.scales[:, None]).to(dtype)
        if self.kind != "int4":
            return (self.values.to(torch.float32) * self.scales[:, None]).to(dtype)
        shifts = torch.arange(0, 32, 4, device=self.values.device, dtype=torch.int32)
        words = self.values.view(self.rows, -1, 1, WORDS)
        numbers = ((words >> shifts[:, None]) & 15) - 8
        grouped = numbers.view(self.rows, -1, GROUP).to(torch.float32)
        return (grouped * self.scales[:, :, None]).view(self.rows, self.columns).to(dtype)


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    """An unpacked matrix."""
    return Matrix(weight, weight.shape[0], weight.shape[1], bias=bias)


def pack(weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> Matrix:
    """Pack a matrix as ``kind`` ("": plain); Unsupported if the columns do not divide."""
    if not kind:
        return plain(weight, bias)
    rows, columns = weight.shape
    full = weight.to(torch.float32)
    together = {"int4": GROUP, "fp8": 4 * WORDS}.get(kind, 1)
    if columns % together:
        raise Unsupported(
            f"{kind} with the engine graph stores {together} columns together; this model has a "
            f"matrix of {columns}"
        )
    if kind == "int4":
        numbers, scales = _four_bits(full.view(rows, -1, GROUP))
        words = numbers.view(rows, -1, 8, WORDS).to(torch.int32) + 8
        shifts = torch.arange(0, 32, 4, device=weight.device, dtype=torch.int32)
        # Nibbles do not overlap, so the wrapping sum is their union.
        packed = (words << shifts[:, None]).sum(dim=2, dtype=torch.int32)
        return Matrix(packed.view(rows, -1).contiguous(), rows, columns, kind, scales, bias)
    scales = full.abs().amax(dim=1).clamp_(min=1e-12) / _LARGEST[kind]
    stored = full / scales[:, None]
    if kind == "int8":
        return Matrix(stored.round_().to(torch.int8), rows, columns, kind, scales, bias)
    bytes_ = stored.to(torch.float8_e4m3fn).view(torch.uint8)
    bytes_ = bytes_.unflatten(1, (-1, 4, WORDS)).transpose(2, 3).reshape(rows, columns)
    values = bytes_.view(torch.float8_e4m3fn)
    return Matrix(values, rows, columns, kind, scales, bias)


def _four_bits(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers from -8 to 7, and scales of least squared error, for [rows, groups, GROUP]."""
    largest = groups.abs().amax(dim=-1).clamp_(min=1e-12)
    scales = largest / 7
    least = torch.full_like(largest, torch.inf)
    for share in _RANGES:
        tried = largest * (share / 7)
        stored = (groups / tried[..., None]).round_().clamp_(-8, 7)
        error = (stored * tried[..., None] - groups).square_().sum(dim=-1)
        better = error < least
        least = torch.where(better, error, least)
        scales = torch.where(better, tried, scales)
    return (groups / scales[..., None]).round_().clamp_(-8, 7).to(torch.int8), scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer."""

    before: torch.Tensor  # gain of the norm before attention
    qkv: Matrix
    q_gain: torch.Tensor | None  # of the norms of single heads
    k_gain: torch.Tensor | None
    out: Matrix
    between: torch.Tensor
    gate_up: Matrix
    down: Matrix
    after_out: torch.Tensor | None = None  # gains of norms before residual sums
    after_down: torch.Tensor | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Matrices of linear layers."""
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def vectors(self) -> list[torch.Tensor]:
        """Gains of norms."""
        gains = (self.before, self.between, self.q_gain, self.k_gain)
        return [v for v in (*gains, self.after_out, self.after_down) if v is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Weights and constants of a decoder."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Matrix
    eps: float
    heads: int
    kv_heads: int
    width: int  # of a head
    scaling: float  # of scores
    rotary: int  # rotated numbers of a head
    pairs: bool  # rotation pairs neighbours, not halves
    cos: torch.Tensor  # [positions, rotary / 2], float32
    sin: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Type of hidden states."""
        return self.embedding.dtype

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads


#: Multiplies rows by a matrix, and adds its bias.
Product = Callable[[torch.Tensor, Matrix], torch.Tensor]


def expanded(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Product with the unpacked matrix."""
    return linear(x, matrix.plain(x.dtype), matrix.bias)


def normed(x: torch.Tensor, gain: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise by the root of the mean square; without a gain the values as they are."""
    return x if gain is None else rms_norm(x, x.shape[-1:], gain, eps)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Rotate heads [..., heads, width]; ``cos`` and ``sin`` are [..., 1, rotary / 2]."""
    rotary = 2 * cos.shape[-1]
    turns, rest = x[..., :rotary].float(), x[..., rotary:]
    if pairs:
        first, second = turns[..., 0::2], turns[..., 1::2]
    else:
        first, second = turns[..., : rotary // 2], turns[..., rotary // 2 :]
    both = (first * cos - second * sin, second * cos + first * sin)
    done = torch.stack(both, dim=-1).flatten(-2) if pairs else torch.cat(both, dim=-1)
    done = done.to(x.dtype)
    return torch.cat((done, rest), dim=-1) if rest.shape[-1] else done


def queries_keys_values(
    decoder: Decoder,
    layer: Layer,
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    product: Product,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three [..., heads, width] from hidden states [..., size]."""
    joint = product(normed(hidden, layer.before, decoder.eps), layer.qkv)
    heads = joint.unflatten(-1, (-1, decoder.width))
    q, k, v = heads.split((decoder.heads, decoder.kv_heads, decoder.kv_heads), dim=-2)
    q, k = normed(q, layer.q_gain, decoder.eps), normed(k, layer.k_gain, decoder.eps)
    return turned(q, cos, sin, decoder.pairs), turned(k, cos, sin, decoder.pairs), v


def after_attention(
    decoder: Decoder, layer: Layer, hidden: torch.Tensor, attended: torch.Tensor, product: Product
) -> torch.Tensor:
    """The rest of a layer; ``attended`` [..., heads x width]."""
    hidden = hidden + normed(product(attended, layer.out), layer.after_out, decoder.eps)
    both = product(normed(hidden, layer.between, decoder.eps), layer.gate_up)
    gate, up = both.chunk(2, dim=-1)
    change = product(silu(gate) * up, layer.down)
    return hidden + normed(change, layer.after_down, decoder.eps)


def read_layer(
    decoder: Decoder,
    layer: Layer,
    hidden: torch.Tensor,  # [rows, tokens, size]
    cos: torch.Tensor,  # [tokens, 1, rotary / 2]
    sin: torch.Tensor,
    keys: torch.Tensor | None,  # [rows, heads, at least tokens, width]; None keeps nothing
    values: torch.Tensor | None,
    product: Product = expanded,
) -> torch.Tensor:
    """A layer over whole prompts from position 0."""
    q, k, v = (
        one.transpose(1, 2)
        for one in queries_keys_values(decoder, layer, hidden, cos, sin, product)
    )
    if keys is not None and values is not None:
        keys[:, :, : k.shape[2]].copy_(k)
        values[:, :, : v.shape[2]].copy_(v)
    attended = scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=decoder.scaling, enable_gqa=decoder.group > 1
    )
    return after_attention(decoder, layer, hidden, attended.transpose(1, 2).flatten(2), product)


def decode_layer(
    decoder: Decoder,
    layer: Layer,
    hidden: torch.Tensor,  # [rows, size]
    cos: torch.Tensor,  # [rows, 1, rotary / 2]
    sin: torch.Tensor,
    keys: torch.Tensor,  # [rows, heads, length, width]
    values: torch.Tensor,
    positions: torch.Tensor,  # [rows]
    mask: torch.Tensor,  # [rows, 1, 1, length], added to scores
    product: Product = expanded,
) -> torch.Tensor:
    """A layer over one token of each row."""
    q, k, v = queries_keys_values(decoder, layer, hidden, cos, sin, product)
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    keys[rows, :, positions] = k
    values[rows, :, positions] = v
    # Heads that share keys are passed as positions, so keys need no repeating.
    grouped = q.unflatten(1, (decoder.kv_heads, decoder.group))
    attended = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, scale=decoder.scaling
    )
    return after_attention(decoder, layer, hidden, attended.flatten(1), product)


def output(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of hidden states."""
    return expanded(normed(hidden, decoder.norm, decoder.eps), decoder.head)


def read_whole(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Logits at every position of texts [rows, tokens], without a cache."""
    hidden = decoder.embedding[ids]
    cos, sin = (table[: ids.shape[1], None] for table in (decoder.cos, decoder.sin))
    for layer in decoder.layers:
        hidden = read_layer(decoder, layer, hidden, cos, sin, None, None)
    return output(decoder, hidden)


_PARTS = ("input_layernorm", "mlp", "post_attention_layernorm", "self_attn")
#: GLM-4's norms before residual sums.
_BEFORE_SUMS = ("post_mlp_layernorm", "post_self_attn_layernorm")
#: Largest difference of the first layer's logits in standard deviations, by bytes of a number.
_ROUNDING = {4: 1e-3, 2: 0.25}
_PROOF_TOKENS = 16


def misfit(model: Any) -> str | None:
    """Reason why a model is not supported; None if it is."""
    inner: Any = getattr(model, "model", None)
    name = type(model).__name__
    needed = ("embed_tokens", "layers", "norm", "rotary_emb")
    lacking = [part for part in needed if not hasattr(inner, part)]
    if lacking:
        return f"{name} has no {lacking[0]}"
    for layer in inner.layers:
        parts = sorted(part for part, _ in layer.named_children())
        if parts not in (sorted(_PARTS), sorted((*_PARTS, *_BEFORE_SUMS))):
            return f"layers of {name} have other parts ({', '.join(parts)})"
        if not all(hasattr(layer.self_attn, f"{one}_proj") for one in "qkvo"):
            return f"attention of {name} has other projections"
        if not hasattr(layer.mlp, "down_proj") or not (
            hasattr(layer.mlp, "gate_up_proj") or hasattr(layer.mlp, "gate_proj")
        ):
            return f"{name} has another kind of linear unit"
        for _, part in (*layer.self_attn.named_children(), *layer.mlp.named_children()):
            is_matrix = hasattr(part, "weight") and part.weight.dim() == 2
            if is_matrix and type(part) is not torch.nn.Linear:
                return f"linear layers of {name} are of another kind"
    config = model.config
    if getattr(config, "hidden_act", None) not in ("silu", "swish"):
        return f"{name} has the activation {getattr(config, 'hidden_act', None)}"
    if rules.moving_rotation(inner.rotary_emb):
        return f"rotary positions of {name} depend on the text's length"
    if rules.narrow_layers(config):
        return f"{name} has layers that see a part of the text only"
    return None


def read_decoder(model: Any, *, positions: int, kind: str = "") -> Decoder:
    """The decoder with linear layers packed as ``kind``; layers are taken out of the model one by
    one, so that only one is in memory twice. Unsupported if the model has other parts."""
    if reason := misfit(model):
        raise Unsupported(reason)
    inner = model.model
    pairs = prove(model, positions)
    constants = _constants(model, positions, pairs)
    layers = []
    for index in range(len(inner.layers)):
        layers.append(_layer(inner.layers[index], kind))
        inner.layers[index] = torch.nn.Module()
    return replace(constants, layers=tuple(layers))


def _constants(model: Any, positions: int, pairs: bool) -> Decoder:
    inner = model.model
    attention = inner.layers[0].self_attn
    width = int(attention.head_dim)
    device = inner.embed_tokens.weight.device
    every = torch.arange(positions, device=device)[None]
    cos, sin = inner.rotary_emb(torch.zeros(1, dtype=torch.float32, device=device), every)
    half = cos.shape[-1] // 2
    head = model.lm_head
    return Decoder(
        embedding=inner.embed_tokens.weight.detach(),
        layers=(),
        norm=inner.norm.weight.detach(),
        head=plain(head.weight.detach(), _bias(head)),
        eps=float(inner.norm.variance_epsilon),
        heads=attention.q_proj.out_features // width,
        kv_heads=attention.k_proj.out_features // width,
        width=width,
        scaling=float(getattr(attention, "scaling", width**-0.5)),
        rotary=2 * half,
        pairs=pairs,
        cos=cos[0, :, :half].contiguous(),
        sin=sin[0, :, :half].contiguous(),
    )


def _layer(layer: Any, kind: str) -> Layer:
    attention, unit = layer.self_attn, layer.mlp
    gates = [unit.gate_up_proj] if hasattr(unit, "gate_up_proj") else [unit.gate_proj, unit.up_proj]
    return Layer(
        before=layer.input_layernorm.weight.detach(),
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj], kind),
        q_gain=_gain(attention, "q_norm"),
        k_gain=_gain(attention, "k_norm"),
        out=_joined([attention.o_proj], kind),
        between=layer.post_attention_layernorm.weight.detach(),
        gate_up=_joined(gates, kind),
        down=_joined([unit.down_proj], kind),
        after_out=_gain(layer, "post_self_attn_layernorm"),
        after_down=_gain(layer, "post_mlp_layernorm"),
    )


def _joined(parts: list[Any], kind: str) -> Matrix:
    weights, biases = [part.weight.detach() for part in parts], [_bias(part) for part in parts]
    bias = None
    if any(part is not None for part in biases):
        pairs = zip(weights, biases, strict=True)
        bias = torch.cat([torch.zeros_like(w[:, 0]) if b is None else b for w, b in pairs])
    return pack(torch.cat(weights) if len(weights) > 1 else weights[0], bias, kind)


def _bias(part: Any) -> torch.Tensor | None:
    return None if part.bias is None else part.bias.detach()


def _gain(part: Any, name: str) -> torch.Tensor | None:
    norm = getattr(part, name, None)
    return None if norm is None else norm.weight.detach()


@torch.inference_mode()
def prove(model: Any, positions: int) -> bool:
    """Return whether rotary positions pair neighbours, by the first layer's logits; Unsupported if
    they differ from the model's either way."""
    inner = model.model
    whole = inner.layers
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, _PROOF_TOKENS), generator=draw)
    ids = ids.to(inner.embed_tokens.weight.device)
    try:
        inner.layers = whole[:1]
        theirs = model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        inner.layers = whole
    one = _layer(whole[0], "")
    apart = {}
    for pairs in (True, False):
        decoder = replace(_constants(model, max(positions, _PROOF_TOKENS), pairs), layers=(one,))
        mine = read_whole(decoder, ids)[0].float()
        apart[pairs] = float((mine - theirs).abs().max() / theirs.std())
    pairs = min(apart, key=apart.__getitem__)
    if not apart[pairs] <= _ROUNDING[inner.embed_tokens.weight.element_size()]:
        raise Unsupported(
            f"{type(model).__name__} does something that the engine graph does not know: logits of "
            f"its first layer differ by {apart[pairs]:.3g} standard deviations"
        )
    return pairs
