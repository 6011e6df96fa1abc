"""A decoder as matrices and constants, read off a model of transformers by its parts' names.

Supports models of norm, attention, norm and gated linear unit with residuals (Llama, Mistral,
Qwen2, Qwen3, GLM, GLM-4, ChatGLM3 and others); ``prove`` refuses those that compute otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from workloads.base import Unsupported
from workloads.engines.graph.layers import Decoder, Layer, Matrix, pack, plain, read_whole
from workloads.models import rules

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
        if any(type(part) is not torch.nn.Linear for part in _linear(layer)):
            return f"linear layers of {name} are of another kind"
    config = model.config
    if getattr(config, "hidden_act", None) not in ("silu", "swish"):
        return f"{name} has the activation {getattr(config, 'hidden_act', None)}"
    if rules.moving_rotation(inner.rotary_emb):
        return f"rotary positions of {name} depend on the text's length"
    if rules.narrow_layers(config):
        return f"{name} has layers that see a part of the text only"
    return None


def _linear(layer: Any) -> Iterator[torch.nn.Module]:
    for _, part in (*layer.self_attn.named_children(), *layer.mlp.named_children()):
        if hasattr(part, "weight") and part.weight.dim() == 2:
            yield part


def read(model: Any, *, positions: int, kind: str = "") -> Decoder:
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
