"""Tensors that each family of models needs, by arithmetic on config.json: a table of shapes.

A line names a module, the shape of its weight, and when it has a bias (``b``: always; else the key
of config.json that says so). ``*`` counts layers, ``=`` begins the full name of a tensor, ``?key``
and ``!key`` make a line depend on a key. Sizes are products and sums of letters (``3E``, ``P+2``)
that ``Family.sizes`` finds in config.json. Tests hold the table against transformers' own models.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family's tensors."""

    prefix: str  # of the base model, which a checkpoint may lack
    lines: str
    #: Letter -> keys of config.json, the first that has a value counts.
    sizes: Mapping[str, str]
    #: Values of keys that config.json leaves out, as in transformers' class.
    usual: Mapping[str, Any] = field(default_factory=dict)
    layers: str = "num_hidden_layers"
    #: Names that share a tensor while ``tie_word_embeddings`` holds.
    tied: tuple[str, ...] = ()
    always_tied: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The tensors that a model needs, with transformers' rules for their names."""

    shapes: Mapping[str, Shape]
    prefix: str
    tied: tuple[Collection[str], ...]


_SIZES = {
    "V": "vocab_size",
    "H": "hidden_size",
    "I": "intermediate_size",
    "N": "num_attention_heads",
    "G": "num_key_value_heads num_attention_heads",
    "P": "max_position_embeddings",
}
_HEAD = ("lm_head.weight", "model.embed_tokens.weight")


def _decoder(lines: str, *, tie: bool = False, **usual: Any) -> Family:
    """A decoder with llama's frame around its layers' ``lines``."""
    inside = "\n".join(f"model.layers.*.{line}" for line in lines.strip().splitlines())
    return Family(
        prefix="model",
        lines=f"model.embed_tokens V,H\n{inside}\nmodel.norm H\nlm_head V,H",
        sizes=_SIZES,
        usual={"tie_word_embeddings": tie, **usual},
        tied=_HEAD,
    )


def _attention(inputs: str = "", output: str = "") -> str:
    return f"""self_attn.q_proj ND,H {inputs}
self_attn.k_proj GD,H {inputs}
self_attn.v_proj GD,H {inputs}
self_attn.o_proj H,ND {output}
"""


_MLP = """mlp.gate_proj I,H mlp_bias
mlp.up_proj I,H mlp_bias
mlp.down_proj H,I mlp_bias
"""
_FUSED = "mlp.gate_up_proj 2I,H\nmlp.down_proj H,I\n"
_NORMS = "input_layernorm H\npost_attention_layernorm H\n"
_AROUND = "pre_feedforward_layernorm H\npost_feedforward_layernorm H\n"
_PLAIN_MLP = _MLP.replace(" mlp_bias", "")
_BOTH = _attention("attention_bias", "attention_bias")
_LLAMA = _decoder(_BOTH + _MLP + _NORMS)
_QK = "self_attn.q_norm D\nself_attn.k_norm D\n"
_GLM = _attention("attention_bias") + _FUSED + _NORMS

_ENCODER = """{0}.embeddings.word_embeddings V,H
{0}.embeddings.position_embeddings P,H
{0}.embeddings.token_type_embeddings T,H
{0}.embeddings.LayerNorm H b
{0}.encoder.layer.*.attention.self.query H,H b
{0}.encoder.layer.*.attention.self.key H,H b
{0}.encoder.layer.*.attention.self.value H,H b
{0}.encoder.layer.*.attention.output.dense H,H b
{0}.encoder.layer.*.attention.output.LayerNorm H b
{0}.encoder.layer.*.intermediate.dense I,H b
{0}.encoder.layer.*.output.dense H,I b
{0}.encoder.layer.*.output.LayerNorm H b
"""
_WORDS = {**_SIZES, "T": "type_vocab_size"}
_BERT = Family(
    prefix="bert",
    lines=_ENCODER.format("bert")
    + """=cls.predictions.bias V
cls.predictions.transform.dense H,H b
cls.predictions.transform.LayerNorm H b
cls.predictions.decoder V,H b""",
    sizes=_WORDS,
    usual={"tie_word_embeddings": True, "type_vocab_size": 2},
    tied=("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    always_tied=(("cls.predictions.bias", "cls.predictions.decoder.bias"),),
)
_ROBERTA = Family(
    prefix="roberta",
    lines=_ENCODER.format("roberta")
    + "=lm_head.bias V\nlm_head.dense H,H b\nlm_head.layer_norm H b\nlm_head.decoder V,H b",
    sizes=_WORDS,
    usual={"tie_word_embeddings": True, "type_vocab_size": 2},
    tied=("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
    always_tied=(("lm_head.bias", "lm_head.decoder.bias"),),
)
_T5_ATTENTION = "".join(
    f"{{0}}.{name} {shape}\n"
    for name, shape in zip("qkvo", ("ND,H", "ND,H", "ND,H", "H,ND"), strict=True)
)
_T5_SIZES = {
    "V": "vocab_size",
    "H": "d_model",
    "I": "d_ff",
    "N": "num_heads",
    "D": "d_kv",
    "B": "relative_attention_num_buckets",
}


def _t5_stack(stack: str, layer: str, wide: str) -> str:
    block = f"{stack}.block.{layer}.layer"
    lines = f"{stack}.embed_tokens V,H\n{stack}.final_layer_norm H\n"
    lines += _T5_ATTENTION.format(f"{block}.0.SelfAttention") + f"{block}.0.layer_norm H\n"
    lines += f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias B,N\n"
    if stack == "decoder":
        lines += _T5_ATTENTION.format(f"{block}.1.EncDecAttention") + f"{block}.1.layer_norm H\n"
    lines += f"{block}.{wide}.DenseReluDense.wi I,H !gated\n"
    lines += f"{block}.{wide}.DenseReluDense.wi_0 I,H ?gated\n"
    lines += f"{block}.{wide}.DenseReluDense.wi_1 I,H ?gated\n"
    return lines + f"{block}.{wide}.DenseReluDense.wo H,I\n{block}.{wide}.layer_norm H\n"


_T5 = Family(
    prefix="transformer",
    lines="shared V,H\nlm_head V,H\n"
    + _t5_stack("encoder", "*", "1")
    + _t5_stack("decoder", "+", "2"),
    sizes=_T5_SIZES,
    usual={"tie_word_embeddings": True, "relative_attention_num_buckets": 32},
    layers="num_layers num_decoder_layers",
    always_tied=(
        (
            "shared.weight",
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "lm_head.weight",  # also where tie_word_embeddings is false, unless it has its own
        ),
    ),
)


def _bart_stack(stack: str, layer: str, wide: str, end: str) -> str:
    at = f"model.{stack}.layers.{layer}"
    lines = f"model.{stack}.embed_tokens V,H\nmodel.{stack}.embed_positions P+2,H\n"
    for attention in ("self_attn", "encoder_attn")[: 1 + (stack == "decoder")]:
        lines += "".join(f"{at}.{attention}.{x}_proj H,H b\n" for x in ("k", "v", "q", "out"))
        lines += f"{at}.{attention}_layer_norm H b\n"
    lines += f"{at}.fc1 {wide},H b\n{at}.fc2 H,{wide} b\n{at}.final_layer_norm H b\n"
    lines += f"model.{stack}.layernorm_embedding H b\n"
    return lines + (f"model.{stack}.layer_norm H b\n" if end else "")


def _bart(end: str) -> Family:
    return Family(
        prefix="model",
        lines="model.shared V,H\nlm_head V,H\n"
        + _bart_stack("encoder", "*", "I", end)
        + _bart_stack("decoder", "+", "J", end),
        sizes={
            "V": "vocab_size",
            "H": "d_model",
            "P": "max_position_embeddings",
            "I": "encoder_ffn_dim",
            "J": "decoder_ffn_dim",
        },
        usual={"tie_word_embeddings": True},
        layers="encoder_layers decoder_layers",
        tied=("lm_head.weight", "model.shared.weight"),
        always_tied=(
            (
                "model.shared.weight",
                *(f"model.{s}.embed_tokens.weight" for s in ("encoder", "decoder")),
            ),
        ),
    )


#: By ``model_type``.
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "granite": _LLAMA,
    "smollm3": _decoder(_BOTH + _MLP + _NORMS, tie=True),
    "mistral": _decoder(_attention() + _PLAIN_MLP + _NORMS, num_key_value_heads=8),
    "qwen2": _decoder(_attention("b") + _PLAIN_MLP + _NORMS),
    "qwen3": _decoder(_BOTH + _QK + _PLAIN_MLP + _NORMS, head_dim=128),
    "olmo2": _decoder(
        _BOTH
        + "self_attn.q_norm ND\nself_attn.k_norm GD\n"
        + _PLAIN_MLP
        + "post_attention_layernorm H\npost_feedforward_layernorm H"
    ),
    "gemma": _decoder(_BOTH + _PLAIN_MLP + _NORMS, tie=True, head_dim=256),
    "gemma2": _decoder(_BOTH + _PLAIN_MLP + _NORMS + _AROUND, tie=True, head_dim=256),
    "gemma3_text": _decoder(_BOTH + _QK + _PLAIN_MLP + _NORMS + _AROUND, tie=True, head_dim=256),
    "phi3": _decoder("self_attn.qkv_proj ND+2GD,H\nself_attn.o_proj H,ND\n" + _FUSED + _NORMS),
    "glm": _decoder(_GLM, head_dim=128, num_key_value_heads=2, attention_bias=True),
    "glm4": _decoder(
        _GLM + "post_self_attn_layernorm H\npost_mlp_layernorm H",
        head_dim=128,
        num_key_value_heads=2,
        attention_bias=True,
    ),
    "gpt2": Family(
        prefix="transformer",
        lines="""transformer.wte V,H
transformer.wpe P,H
transformer.h.*.ln_1 H b
transformer.h.*.attn.c_attn H,3H b
transformer.h.*.attn.c_proj H,H b
transformer.h.*.ln_2 H b
transformer.h.*.mlp.c_fc H,I b
transformer.h.*.mlp.c_proj I,H b
transformer.ln_f H b
lm_head V,H""",
        sizes={
            "V": "vocab_size",
            "H": "n_embd hidden_size",
            "N": "n_head num_attention_heads",
            "P": "n_positions max_position_embeddings",
            "I": "n_inner",
        },
        usual={"tie_word_embeddings": True},
        layers="n_layer num_hidden_layers",
        tied=("lm_head.weight", "transformer.wte.weight"),
    ),
    "gpt_neox": Family(
        prefix="gpt_neox",
        lines="""gpt_neox.embed_in V,H
gpt_neox.layers.*.input_layernorm H b
gpt_neox.layers.*.post_attention_layernorm H b
gpt_neox.layers.*.attention.query_key_value 3H,H attention_bias
gpt_neox.layers.*.attention.dense H,H attention_bias
gpt_neox.layers.*.mlp.dense_h_to_4h I,H b
gpt_neox.layers.*.mlp.dense_4h_to_h H,I b
gpt_neox.final_layer_norm H b
lm_head V,H""",
        sizes=_SIZES,
        usual={"tie_word_embeddings": False, "attention_bias": True},
        tied=("lm_head.weight", "gpt_neox.embed_in.weight"),
        always_tied=(("lm_head.weight", "embed_out.weight"),),
    ),
    "opt": Family(
        prefix="model",
        lines="""model.decoder.embed_tokens V,W
model.decoder.embed_positions P+2,H
model.decoder.project_in H,W ?projected
model.decoder.project_out W,H ?projected
model.decoder.final_layer_norm H b ?do_layer_norm_before
model.decoder.layers.*.self_attn.k_proj H,H enable_bias
model.decoder.layers.*.self_attn.v_proj H,H enable_bias
model.decoder.layers.*.self_attn.q_proj H,H enable_bias
model.decoder.layers.*.self_attn.out_proj H,H enable_bias
model.decoder.layers.*.self_attn_layer_norm H b
model.decoder.layers.*.fc1 I,H enable_bias
model.decoder.layers.*.fc2 H,I enable_bias
model.decoder.layers.*.final_layer_norm H b
lm_head V,W""",
        sizes={**_SIZES, "I": "ffn_dim", "W": "word_embed_proj_dim hidden_size"},
        usual={"tie_word_embeddings": True, "do_layer_norm_before": True, "enable_bias": True},
        tied=("lm_head.weight", "model.decoder.embed_tokens.weight"),
    ),
    "bert": _BERT,
    "roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": Family(
        prefix="distilbert",
        lines="""distilbert.embeddings.word_embeddings V,H
distilbert.embeddings.position_embeddings P,H
distilbert.embeddings.LayerNorm H b
distilbert.transformer.layer.*.attention.q_lin H,H b
distilbert.transformer.layer.*.attention.k_lin H,H b
distilbert.transformer.layer.*.attention.v_lin H,H b
distilbert.transformer.layer.*.attention.out_lin H,H b
distilbert.transformer.layer.*.sa_layer_norm H b
distilbert.transformer.layer.*.ffn.lin1 I,H b
distilbert.transformer.layer.*.ffn.lin2 H,I b
distilbert.transformer.layer.*.output_layer_norm H b
vocab_transform H,H b
vocab_layer_norm H b
vocab_projector V,H b""",
        sizes={
            "V": "vocab_size",
            "H": "dim hidden_size",
            "I": "hidden_dim",
            "P": "max_position_embeddings",
        },
        usual={"tie_word_embeddings": True},
        layers="n_layers num_hidden_layers",
        tied=("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
    ),
    "t5": _T5,
    "mt5": replace(_T5, usual={**_T5.usual, "feed_forward_proj": "gated-gelu"}),
    "bart": _bart(""),
    "mbart": _bart("end"),
}
_TERM = re.compile(r"(\d*)([A-Z]*)")


def needed(config: Mapping[str, Any]) -> Needed | None:
    """Return the tensors that a configuration asks for; None if its family is not in the table,
    or a size that it needs is missing or no number."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    values = {**family.usual, **{k: v for k, v in config.items() if v is not None}}
    sizes = _sizes(family, values)
    counts = [values.get(key) for key in family.layers.split()]
    if family.layers.startswith(("n_", "num_hidden")):  # two names of one number
        counts = [next((count for count in counts if count is not None), None)]
    elif counts[-1] is None:  # T5's decoder has as many layers as its encoder
        counts[-1] = counts[0]
    if sizes is None or not all(type(count) is int and 0 <= count <= 2_000 for count in counts):
        return None
    shapes: dict[str, Shape] = {}
    for line in family.lines.splitlines():
        shapes.update(_line(line, sizes, values, counts))
    if not all(all(size > 0 for size in shape) for shape in shapes.values()):
        return None
    tied = list(family.always_tied)
    if values.get("tie_word_embeddings"):
        tied.append(family.tied)
    return Needed(shapes=shapes, prefix=family.prefix, tied=tuple(tied))


def _sizes(family: Family, values: dict[str, Any]) -> dict[str, int] | None:
    sizes: dict[str, int] = {}
    for letter, keys in family.sizes.items():
        value = next((values[key] for key in keys.split() if values.get(key) is not None), None)
        if value is None and family is FAMILIES["gpt2"] and letter == "I":
            value = 4 * sizes["H"]
        if type(value) is not int or not 0 <= value <= 10**9:
            return None
        sizes[letter] = value
    if "D" not in family.sizes and "G" in sizes:
        head = values.get("head_dim") or (sizes["H"] // sizes["N"] if sizes["N"] else 0)
        if type(head) is not int:
            return None
        sizes["D"] = head
    values["projected"] = sizes.get("W") != sizes["H"]
    values["gated"] = "gated" in str(values.get("feed_forward_proj", ""))
    return sizes


def _line(
    line: str, sizes: Mapping[str, int], values: Mapping[str, Any], counts: list[Any]
) -> dict[str, Shape]:
    name, dimensions, *rest = line.split()
    for word in rest:
        if word[0] in "?!" and bool(values.get(word[1:])) != (word[0] == "?"):
            return {}
    shape = tuple(_size(text, sizes) for text in dimensions.split(","))
    tensors = {name[1:]: shape} if name[0] == "=" else {f"{name}.weight": shape}
    if any(word == "b" or values.get(word) for word in rest if word[0] not in "?!"):
        bias = shape[-1:] if "c_" in name else shape[:1]  # GPT-2's are transposed
        tensors[f"{name}.bias"] = bias
    for mark, count in (("*", counts[0]), ("+", counts[-1])):
        if f".{mark}." in name:
            return {
                key.replace(f".{mark}.", f".{layer}."): tensor
                for layer in range(count)
                for key, tensor in tensors.items()
            }
    return tensors


def _size(text: str, sizes: Mapping[str, int]) -> int:
    """Evaluate ``3H``, ``ND+2GD`` or ``P+2``."""
    total = 0
    for term in text.split("+"):
        number, letters = _TERM.fullmatch(term).groups()  # type: ignore[union-attr]
        product = int(number or 1)
        for letter in letters:
            product *= sizes[letter]
        total += product
    return total
