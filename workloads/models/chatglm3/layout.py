"""ChatGLM3 on transformers' GLM class: names, sizes and prompt layout. No torch.

transformers no longer loads ChatGLM3-6B's own code (``ChatGLMModel``). Its arithmetic equals
``GlmForCausalLM``'s: multi-query attention with two key/value heads, rotary embedding on the first
half of each head in interleaved pairs, bias on queries, keys and values only, RMSNorm, SwiGLU, a
separate output layer. So tensors are renamed and the fused query-key-value matrix is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from workloads.base import BadConfiguration
from workloads.registry import kind_of

#: Appended to the SentencePiece pieces, spelled as in ChatGLM3's id table except ``<sop>`` and
#: ``<eop>``: plain ``sop`` would match inside ordinary words.
SPECIAL_TOKENS = (
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
UNKNOWN_ID, BEGIN_ID, END_ID = 0, 1, 2

#: ChatGLM3-6B: rows of the embedding, and SentencePiece pieces.
PUBLISHED_VOCABULARY, PUBLISHED_PIECES = 65024, 64789

#: Architectures in a config.json of the original layout.
_ORIGINAL = {"ChatGLMModel", "ChatGLMForConditionalGeneration"}

#: Original layout's switches of ChatGLM2 and 3, the only ones that ``GlmForCausalLM`` implements.
_SWITCHES = {
    "rmsnorm": True,
    "multi_query_attention": True,
    "post_layer_norm": True,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "tie_word_embeddings": False,
}

#: Renders the ids of ``prompts.encode_turns`` for content without special tokens. As in
#: SentencePiece, a space precedes content that is not empty. (The published template adds a second
#: one, hence other ids.) Tools are a system turn's, or the argument's for a first system turn.
CHAT_TEMPLATE = (
    "{{ '[gMASK]<sop>' }}{% for message in messages %}"
    "{% set content = message['content'] or '' %}"
    "{% set listed = message['tools'] or (tools if loop.first else none) %}"
    "{% if message['role'] == 'system' and listed %}"
    "{% set content = content + '\\n' + (listed | tojson(indent=4)) %}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + (message['metadata'] or '') + '\\n' "
    "+ (' ' + content if content else '') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


#: transformers' GLM class loads the native layout; optimum-habana is fast on the original.
Layout = Literal["native", "original"]


def layout_of(config: Mapping[str, Any]) -> Layout | None:
    """Return the layout that a config.json describes; None for other models."""
    if is_original(config):
        return "original"
    return "native" if kind_of(config).architecture == "GlmForCausalLM" else None


def is_original(config: Mapping[str, Any]) -> bool:
    """Tell if a config.json describes ChatGLM in its original layout."""
    named = config.get("architectures")
    names = {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()
    return config.get("model_type") == "chatglm" or not _ORIGINAL.isdisjoint(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes that determine every tensor's shape."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def query_rows(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim


#: Config keys of these sizes: (original, native).
_KEYS = {
    "hidden": ("hidden_size", "hidden_size"),
    "layers": ("num_layers", "num_hidden_layers"),
    "heads": ("num_attention_heads", "num_attention_heads"),
    "kv_heads": ("multi_query_group_num", "num_key_value_heads"),
    "head_dim": ("kv_channels", "head_dim"),
    "intermediate": ("ffn_hidden_size", "intermediate_size"),
    "vocabulary": ("padded_vocab_size", "vocab_size"),
}


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """Return the original layout's sizes; raises BadConfiguration if not plain ChatGLM2 or 3."""
    if "padded_vocab_size" not in config or "ffn_hidden_size" not in config:
        raise BadConfiguration(
            "config.json has no 'padded_vocab_size' or 'ffn_hidden_size': this is not the layout "
            "of ChatGLM2 or ChatGLM3 (the first ChatGLM-6B is another architecture)"
        )
    if config.get("quantization_bit"):
        raise BadConfiguration(
            f"the checkpoint is quantised (quantization_bit = {config['quantization_bit']}); "
            "convert the original half-precision one and choose int8 or int4 when running"
        )
    if config.get("pre_seq_len"):
        raise BadConfiguration(
            f"the checkpoint is a P-tuning one (pre_seq_len = {config['pre_seq_len']}); "
            "its prefix encoder has no counterpart in the native class"
        )
    wrong = {k: config[k] for k, v in _SWITCHES.items() if k in config and bool(config[k]) != v}
    if wrong:
        raise BadConfiguration(
            f"config.json asks for {wrong}, which the native class does not do; ChatGLM3 has "
            f"{ {k: _SWITCHES[k] for k in wrong} }"
        )
    if not config.get("kv_channels"):
        channels = _size(config, "hidden_size") // _size(config, "num_attention_heads")
        config = {**config, "kv_channels": channels}
    return Sizes(**{field: _size(config, original) for field, (original, _) in _KEYS.items()})


def native_sizes(config: Mapping[str, Any]) -> Sizes:
    """Return the sizes in a native config.json; raises BadConfiguration if one is missing."""
    return Sizes(**{field: _size(config, native) for field, (_, native) in _KEYS.items()})


def _size(config: Mapping[str, Any], name: str) -> int:
    """Return a count in config.json; raises BadConfiguration if it is missing or invalid."""
    if name not in config:
        raise BadConfiguration(f"config.json has no {name!r}")
    value, most = config[name], 10_000 if "layers" in name else 2**31
    if type(value) is not int or not 1 <= value <= most:
        raise BadConfiguration(
            f"config.json: {name} is {value!r:.60}, not a whole number from 1 to {most:,}"
        )
    return value


def _number(config: Mapping[str, Any], name: str, usual: float) -> float:
    """Return a positive number in config.json or the default; raises BadConfiguration."""
    value = config.get(name) or usual
    if type(value) not in (int, float) or not 0 < value < 1e12:
        raise BadConfiguration(f"config.json: {name} is {value!r:.60}, not a positive number")
    return float(value)


def native_config(
    sizes: Sizes,
    *,
    eos_token_ids: list[int],
    max_positions: int,
    rope_theta: float = 10000.0,
    rms_norm_eps: float = 1e-5,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Return ``GlmForCausalLM``'s config.json with keys that transformers 4.55 and 5 both read."""
    return {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        **{native: getattr(sizes, field) for field, (_, native) in _KEYS.items()},
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "partial_rotary_factor": 0.5,
        "rope_theta": rope_theta,
        "rms_norm_eps": rms_norm_eps,
        "max_position_embeddings": max_positions,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "pad_token_id": UNKNOWN_ID,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": eos_token_ids,
        "torch_dtype": dtype,
    }


def from_original_config(
    config: Mapping[str, Any], sentencepiece_pieces: int | None = None
) -> dict[str, Any]:
    """Return the native config.json for one of the original layout; raises as ``sizes_of``.

    Role tokens, some of which end a text, are numbered after the ``sentencepiece_pieces``.
    """
    sizes = sizes_of(config)
    return native_config(
        sizes,
        eos_token_ids=_eos_token_ids(config, sizes, sentencepiece_pieces),
        max_positions=_size(config, "seq_length") if config.get("seq_length") else 8192,
        rope_theta=10000.0 * _number(config, "rope_ratio", 1.0),
        rms_norm_eps=_number(config, "layernorm_epsilon", 1e-5),
        dtype=str(config.get("torch_dtype") or "float16"),
    )


def original_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published layout's config.json for a native one; raises as ``native_sizes``."""
    sizes = native_sizes(config)
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    return {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        **{original: getattr(sizes, field) for field, (original, _) in _KEYS.items()},
        "layernorm_epsilon": config["rms_norm_eps"],
        "rope_ratio": float(theta or 10000.0) / 10000.0,
        "original_rope": True,
        "seq_length": int(config["max_position_embeddings"]),
        **_SWITCHES,
        "apply_query_key_layer_scaling": True,
        "attention_softmax_in_fp32": True,
        "fp32_residual_connection": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cache": True,
        "eos_token_id": config.get("eos_token_id", END_ID),
        "pad_token_id": UNKNOWN_ID,
        "torch_dtype": config.get("torch_dtype") or config.get("dtype") or "float16",
        **({"random_weights": True} if config.get("random_weights") else {}),
    }


def _eos_token_ids(config: Mapping[str, Any], sizes: Sizes, pieces: int | None) -> list[int]:
    """Return the ids of ``</s>``, ``<|user|>``, ``<|observation|>``; 6B: [2, 64795, 64797]."""
    end = config.get("eos_token_id")
    ends = end if isinstance(end, list) else [END_ID if end is None else end]
    if not all(type(one) is int and 0 <= one < 2**31 for one in ends):
        raise BadConfiguration(f"config.json: eos_token_id is {end!r:.60}, not ids of tokens")
    if pieces is None and sizes.vocabulary == PUBLISHED_VOCABULARY:
        pieces = PUBLISHED_PIECES
    if pieces is not None:
        ends += [pieces + SPECIAL_TOKENS.index(t) for t in ("<|user|>", "<|observation|>")]
    return list(dict.fromkeys(ends))


@lru_cache(maxsize=8)
def _tensors(sizes: Sizes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map original tensors to (native name, shape); ``{}`` stands for q, k and v of a fused one."""
    s, fused = sizes, sizes.query_rows + 2 * sizes.kv_rows
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "embedding.word_embeddings.weight": ("model.embed_tokens.weight", (s.vocabulary, s.hidden)),
        "encoder.final_layernorm.weight": ("model.norm.weight", (s.hidden,)),
        "output_layer.weight": ("lm_head.weight", (s.vocabulary, s.hidden)),
    }
    in_layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "input_layernorm.weight": ("input_layernorm.weight", (s.hidden,)),
        "self_attention.query_key_value.weight": ("self_attn.{}_proj.weight", (fused, s.hidden)),
        "self_attention.query_key_value.bias": ("self_attn.{}_proj.bias", (fused,)),
        "self_attention.dense.weight": ("self_attn.o_proj.weight", (s.hidden, s.query_rows)),
        "post_attention_layernorm.weight": ("post_attention_layernorm.weight", (s.hidden,)),
        "mlp.dense_h_to_4h.weight": ("mlp.gate_up_proj.weight", (2 * s.intermediate, s.hidden)),
        "mlp.dense_4h_to_h.weight": ("mlp.down_proj.weight", (s.hidden, s.intermediate)),
    }
    for layer in range(s.layers):
        for name, (native, shape) in in_layer.items():
            tensors[f"encoder.layers.{layer}.{name}"] = (f"model.layers.{layer}.{native}", shape)
    return {f"transformer.{name}": tensor for name, tensor in tensors.items()}


def original_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return every tensor that a checkpoint of the original layout must have, with its shape."""
    return {name: shape for name, (_, shape) in _tensors(sizes).items()}


def native_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return every tensor of the native layout with its shape, in the original order."""
    return {
        native: (rows.stop - rows.start, *shape[1:])
        for name, shape in original_shapes(sizes).items()
        for native, rows in native_parts(name, sizes).items()
    }


def native_parts(name: str, sizes: Sizes) -> dict[str, slice]:
    """Return the native tensors of an original one, by name, as rows of it."""
    native, shape = _tensors(sizes)[name]
    if "{}" not in native:
        return {native: slice(0, shape[0])}
    queries, keys = sizes.query_rows, sizes.query_rows + sizes.kv_rows
    rows = (slice(0, queries), slice(queries, keys), slice(keys, shape[0]))
    return {native.format(letter): part for letter, part in zip("qkv", rows, strict=True)}
