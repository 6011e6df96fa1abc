"""A decoder's matrices, gains and constants, and its layers in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from workloads.engines.graph.packing import Matrix


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
    hidden = rms_norm(hidden, hidden.shape[-1:], layer.before, decoder.eps)
    joint = product(hidden, layer.qkv).unflatten(-1, (-1, decoder.width))
    q, k, v = joint.split((decoder.heads, decoder.kv_heads, decoder.kv_heads), dim=-2)
    if layer.q_gain is not None:
        q = rms_norm(q, q.shape[-1:], layer.q_gain, decoder.eps)
    if layer.k_gain is not None:
        k = rms_norm(k, k.shape[-1:], layer.k_gain, decoder.eps)
    return turned(q, cos, sin, decoder.pairs), turned(k, cos, sin, decoder.pairs), v


def after_attention(
    decoder: Decoder,
    layer: Layer,
    hidden: torch.Tensor,
    attended: torch.Tensor,
    product: Product,
) -> torch.Tensor:
    """The rest of a layer; ``attended`` [..., heads x width]."""
    change = product(attended, layer.out)
    if layer.after_out is not None:
        change = rms_norm(change, change.shape[-1:], layer.after_out, decoder.eps)
    hidden = hidden + change
    normed = rms_norm(hidden, hidden.shape[-1:], layer.between, decoder.eps)
    gate, up = product(normed, layer.gate_up).chunk(2, dim=-1)
    change = product(silu(gate) * up, layer.down)
    if layer.after_down is not None:
        change = rms_norm(change, change.shape[-1:], layer.after_down, decoder.eps)
    return hidden + change


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


def output(decoder: Decoder, hidden: torch.Tensor, product: Product = expanded) -> torch.Tensor:
    """Logits of hidden states."""
    return product(rms_norm(hidden, hidden.shape[-1:], decoder.norm, decoder.eps), decoder.head)


def read_whole(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Logits at every position of texts [rows, tokens], without a cache."""
    hidden = decoder.embedding[ids]
    cos, sin = (table[: ids.shape[1], None] for table in (decoder.cos, decoder.sin))
    for layer in decoder.layers:
        hidden = read_layer(decoder, layer, hidden, cos, sin, None, None)
    return output(decoder, hidden)
