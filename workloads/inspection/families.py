"""Tensors that each family of models needs, by arithmetic on config.json: a table of shapes.

A line names a module, the shape of its weight, and when it has a bias (``b``: always; else the key
of config.json that says so). ``[a|b]`` stands for two names, ``*`` counts layers, ``+`` those of a
second stack, ``=`` begins the full name of a tensor, ``?key`` and ``!key`` make a line depend on a
key. Sizes are products and sums of letters (``3H``, ``P+2``), which stand for keys of config.json.
Tests hold the table against transformers' own models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family's tensors."""

    prefix: str  # of the base model, which a checkpoint may lack
    lines: str
    keys: str = ""  # others than ``_KEYS``
    #: Values of keys that config.json leaves out, as in transformers' class.
    usual: Mapping[str, Any] = field(default_factory=dict)
    #: Names that share a tensor while ``tie_word_embeddings`` holds.
    tied: tuple[str, ...] = ()
    always_tied: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The tensors that a model needs, with transformers' rules for their names."""

    shapes: Mapping[str, Shape]
    prefix: str
    tied: tuple[Collection[str], ...]


#: Letter or mark, and keys of config.json, of which the first that has a value counts. D is else H
#: over N.
_KEYS = """V:vocab_size H:hidden_size I:intermediate_size N:num_attention_heads D:head_dim
G:num_key_value_heads,num_attention_heads P:max_position_embeddings T:type_vocab_size
*:num_hidden_layers"""
_LARGEST, _MOST_LAYERS = 10**9, 2_000


def _decoder(lines: str, *, tie: bool = False, **usual: Any) -> Family:
    """A decoder with llama's frame around its layers' ``lines``."""
    inside = "\n".join(f"model.layers.*.{line}" for line in lines.strip().splitlines())
    return Family(
        prefix="model",
        lines=f"[model.embed_tokens|lm_head] V,H\nmodel.norm H\n{inside}",
        usual={"tie_word_embeddings": tie, **usual},
        tied=("lm_head.weight", "model.embed_tokens.weight"),
    )


def _attention(inputs: str = "", output: str = "") -> str:
    """Attention whose products have a bias under these flags."""
    return f"""self_attn.q_proj ND,H {inputs}
self_attn.[k_proj|v_proj] GD,H {inputs}
self_attn.o_proj H,ND {output}
"""


_MLP = "mlp.[gate_proj|up_proj] I,H\nmlp.down_proj H,I\n"
_FUSED = "mlp.gate_up_proj 2I,H\nmlp.down_proj H,I\n"
_NORMS = "[input_layernorm|post_attention_layernorm] H\n"
_AROUND = "[pre_feedforward_layernorm|post_feedforward_layernorm] H\n"
_BOTH = _attention("attention_bias", "attention_bias")
_LLAMA = _BOTH + "mlp.[gate_proj|up_proj] I,H mlp_bias\nmlp.down_proj H,I mlp_bias\n" + _NORMS
_QK = "self_attn.[q_norm|k_norm] D\n"
_GLM = _attention("attention_bias") + _FUSED + _NORMS
_GLM_USUAL: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 2, "attention_bias": True}

_ENCODER = """embeddings.word_embeddings V,H
embeddings.position_embeddings P,H
embeddings.token_type_embeddings T,H
embeddings.LayerNorm H b
encoder.layer.*.attention.[self.query|self.key|self.value|output.dense] H,H b
encoder.layer.*.[attention.output|output].LayerNorm H b
encoder.layer.*.intermediate.dense I,H b
encoder.layer.*.output.dense H,I b"""


def _encoder(name: str, head: str, output: str, bias: str) -> Family:
    """BERT's encoder and a ``head``, whose ``output`` and ``bias`` are tied to others."""
    lines = "\n".join(f"{name}.{line}" for line in _ENCODER.splitlines())
    return Family(
        prefix=name,
        lines=f"{lines}\n={bias} V\n{output} V,H b\n{head}",
        usual={"tie_word_embeddings": True, "type_vocab_size": 2},
        tied=(f"{output}.weight", f"{name}.embeddings.word_embeddings.weight"),
        always_tied=((bias, f"{output}.bias"),),
    )


_ROBERTA = _encoder(
    "roberta", "lm_head.dense H,H b\nlm_head.layer_norm H b", "lm_head.decoder", "lm_head.bias"
)
_T5 = Family(
    prefix="transformer",
    lines="""[shared|encoder.embed_tokens|decoder.embed_tokens|lm_head] V,H
[encoder|decoder].final_layer_norm H
[encoder|decoder].block.0.layer.0.SelfAttention.relative_attention_bias B,N
[encoder.block.*|decoder.block.+].layer.[0|1].layer_norm H
decoder.block.+.layer.2.layer_norm H
[encoder.block.*|decoder.block.+].layer.0.SelfAttention.[q|k|v] ND,H
[encoder.block.*|decoder.block.+].layer.0.SelfAttention.o H,ND
decoder.block.+.layer.1.EncDecAttention.[q|k|v] ND,H
decoder.block.+.layer.1.EncDecAttention.o H,ND
[encoder.block.*.layer.1|decoder.block.+.layer.2].DenseReluDense.wi I,H !gated
[encoder.block.*.layer.1|decoder.block.+.layer.2].DenseReluDense.[wi_0|wi_1] I,H ?gated
[encoder.block.*.layer.1|decoder.block.+.layer.2].DenseReluDense.wo H,I""",
    keys="""H:d_model I:d_ff N:num_heads D:d_kv B:relative_attention_num_buckets
*:num_layers +:num_decoder_layers,num_layers""",
    usual={"tie_word_embeddings": True, "relative_attention_num_buckets": 32},
    always_tied=(
        (
            "shared.weight",
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "lm_head.weight",  # also where tie_word_embeddings is false, unless it has its own
        ),
    ),
)
_BART = Family(
    prefix="model",
    lines="""[model.shared|model.encoder.embed_tokens|model.decoder.embed_tokens|lm_head] V,H
model.[encoder|decoder].embed_positions P+2,H
model.[encoder|decoder].layernorm_embedding H b
model.encoder.layers.*.self_attn.[k_proj|v_proj|q_proj|out_proj] H,H b
model.encoder.layers.*.[self_attn_layer_norm|final_layer_norm] H b
model.encoder.layers.*.fc1 I,H b
model.encoder.layers.*.fc2 H,I b
model.decoder.layers.+.[self_attn|encoder_attn].[k_proj|v_proj|q_proj|out_proj] H,H b
model.decoder.layers.+.[self_attn_layer_norm|encoder_attn_layer_norm|final_layer_norm] H b
model.decoder.layers.+.fc1 J,H b
model.decoder.layers.+.fc2 H,J b""",
    keys="""H:d_model I:encoder_ffn_dim J:decoder_ffn_dim
*:encoder_layers +:decoder_layers,encoder_layers""",
    usual={"tie_word_embeddings": True},
    tied=("lm_head.weight", "model.shared.weight"),
    always_tied=(
        (
            "model.shared.weight",
            "model.encoder.embed_tokens.weight",
            "model.decoder.embed_tokens.weight",
        ),
    ),
)

#: By ``model_type``.
FAMILIES: dict[str, Family] = {
    "llama": _decoder(_LLAMA),
    "granite": _decoder(_LLAMA),
    "smollm3": _decoder(_LLAMA, tie=True),
    "mistral": _decoder(_attention() + _MLP + _NORMS, num_key_value_heads=8),
    "qwen2": _decoder(_attention("b") + _MLP + _NORMS),
    "qwen3": _decoder(_BOTH + _QK + _MLP + _NORMS, head_dim=128),
    "olmo2": _decoder(
        _BOTH
        + "self_attn.q_norm ND\nself_attn.k_norm GD\n"
        + _MLP
        + "[post_attention_layernorm|post_feedforward_layernorm] H"
    ),
    "gemma": _decoder(_BOTH + _MLP + _NORMS, tie=True, head_dim=256),
    "gemma2": _decoder(_BOTH + _MLP + _NORMS + _AROUND, tie=True, head_dim=256),
    "gemma3_text": _decoder(_BOTH + _QK + _MLP + _NORMS + _AROUND, tie=True, head_dim=256),
    "phi3": _decoder("self_attn.qkv_proj ND+2GD,H\nself_attn.o_proj H,ND\n" + _FUSED + _NORMS),
    "glm": _decoder(_GLM, **_GLM_USUAL),
    "glm4": _decoder(_GLM + "[post_self_attn_layernorm|post_mlp_layernorm] H", **_GLM_USUAL),
    "gpt2": Family(
        prefix="transformer",
        lines="""[transformer.wte|lm_head] V,H
transformer.wpe P,H
transformer.[ln_f|h.*.ln_1|h.*.ln_2] H b
transformer.h.*.attn.c_attn H,3H b
transformer.h.*.attn.c_proj H,H b
transformer.h.*.mlp.c_fc H,I b ?n_inner
transformer.h.*.mlp.c_proj I,H b ?n_inner
transformer.h.*.mlp.c_fc H,4H b !n_inner
transformer.h.*.mlp.c_proj 4H,H b !n_inner""",
        keys="""H:n_embd,hidden_size I:n_inner P:n_positions,max_position_embeddings
*:n_layer,num_hidden_layers""",
        usual={"tie_word_embeddings": True},
        tied=("lm_head.weight", "transformer.wte.weight"),
    ),
    "gpt_neox": Family(
        prefix="gpt_neox",
        lines="""[gpt_neox.embed_in|lm_head] V,H
gpt_neox.[final_layer_norm|layers.*.input_layernorm|layers.*.post_attention_layernorm] H b
gpt_neox.layers.*.attention.query_key_value 3H,H attention_bias
gpt_neox.layers.*.attention.dense H,H attention_bias
gpt_neox.layers.*.mlp.dense_h_to_4h I,H b
gpt_neox.layers.*.mlp.dense_4h_to_h H,I b""",
        usual={"tie_word_embeddings": False, "attention_bias": True},
        tied=("lm_head.weight", "gpt_neox.embed_in.weight"),
        always_tied=(("lm_head.weight", "embed_out.weight"),),
    ),
    "opt": Family(
        prefix="model",
        lines="""[model.decoder.embed_tokens|lm_head] V,W
model.decoder.embed_positions P+2,H
model.decoder.project_in H,W ?projected
model.decoder.project_out W,H ?projected
model.decoder.final_layer_norm H b ?do_layer_norm_before
model.decoder.layers.*.self_attn.[k_proj|v_proj|q_proj|out_proj] H,H enable_bias
model.decoder.layers.*.[self_attn_layer_norm|final_layer_norm] H b
model.decoder.layers.*.fc1 I,H enable_bias
model.decoder.layers.*.fc2 H,I enable_bias""",
        keys="I:ffn_dim W:word_embed_proj_dim,hidden_size",
        usual={"tie_word_embeddings": True, "do_layer_norm_before": True, "enable_bias": True},
        tied=("lm_head.weight", "model.decoder.embed_tokens.weight"),
    ),
    "bert": _encoder(
        "bert",
        "cls.predictions.transform.dense H,H b\ncls.predictions.transform.LayerNorm H b",
        "cls.predictions.decoder",
        "cls.predictions.bias",
    ),
    "roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": Family(
        prefix="distilbert",
        lines="""distilbert.embeddings.word_embeddings V,H
distilbert.embeddings.position_embeddings P,H
distilbert.embeddings.LayerNorm H b
distilbert.transformer.layer.*.attention.[q_lin|k_lin|v_lin|out_lin] H,H b
distilbert.transformer.layer.*.[sa_layer_norm|output_layer_norm] H b
distilbert.transformer.layer.*.ffn.lin1 I,H b
distilbert.transformer.layer.*.ffn.lin2 H,I b
vocab_transform H,H b
vocab_layer_norm H b
vocab_projector V,H b""",
        keys="H:dim,hidden_size I:hidden_dim *:n_layers,num_hidden_layers",
        usual={"tie_word_embeddings": True},
        tied=("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
    ),
    "t5": _T5,
    "mt5": replace(_T5, usual={**_T5.usual, "feed_forward_proj": "gated-gelu"}),
    "bart": _BART,
    "mbart": replace(_BART, lines=f"{_BART.lines}\nmodel.[encoder|decoder].layer_norm H b"),
}
_TERM = re.compile(r"(\d*)([A-Z]*)")


def needed(config: Mapping[str, Any]) -> Needed | None:
    """Return the tensors that a configuration asks for; None if its family is not in the table,
    or a size that it needs is missing or no number."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    values = {**family.usual, **{k: v for k, v in config.items() if v is not None}}
    width = values.get("hidden_size")
    values["projected"] = values.get("word_embed_proj_dim", width) != width
    values["gated"] = "gated" in str(values.get("feed_forward_proj", ""))
    try:
        keys = dict(pair.split(":") for pair in f"{_KEYS} {family.keys}".split())
        shapes = dict(_tensors(family.lines, _Sizes(keys, values)))
    except (LookupError, ZeroDivisionError):
        return None
    tied = [*family.always_tied, *([family.tied] if values.get("tie_word_embeddings") else [])]
    return Needed(shapes=shapes, prefix=family.prefix, tied=tuple(tied))


@dataclass(frozen=True, slots=True)
class _Sizes:
    keys: Mapping[str, str]  # by letter or mark
    values: Mapping[str, Any]

    def of(self, letter: str) -> int:
        """Return a letter's size or a mark's number of layers; LookupError if it is no number."""
        given = (self.values.get(key) for key in self.keys[letter].split(","))
        value = next((value for value in given if value is not None), None)
        if value is None and letter == "D":
            return self.of("H") // self.of("N")
        least, most = (0, _MOST_LAYERS) if letter in "*+" else (1, _LARGEST)
        if type(value) is not int or not least <= value <= most:
            raise LookupError(letter)
        return value

    def product(self, term: str) -> int:
        """Evaluate ``3H``."""
        number, letters = _TERM.fullmatch(term).groups()  # type: ignore[union-attr]
        return math.prod([int(number or 1), *map(self.of, letters)])


def _tensors(lines: str, sizes: _Sizes) -> Iterator[tuple[str, Shape]]:
    for line in lines.splitlines():
        names, dimensions, *flags = line.split()
        conditions = [flag for flag in flags if flag[0] in "?!"]
        if any(bool(sizes.values.get(flag[1:])) != (flag[0] == "?") for flag in conditions):
            continue
        shape = tuple(sum(map(sizes.product, text.split("+"))) for text in dimensions.split(","))
        biases = [flag for flag in flags if flag not in conditions]
        biased = any(flag == "b" or sizes.values.get(flag) for flag in biases)
        for name in _expanded(names, sizes):
            if name.startswith("="):
                yield name[1:], shape
                continue
            yield f"{name}.weight", shape
            if biased:  # GPT-2's matrices are transposed
                yield f"{name}.bias", shape[-1:] if "c_" in name else shape[:1]


def _expanded(name: str, sizes: _Sizes) -> list[str]:
    """Return the names for which one with ``[a|b]``, ``*`` and ``+`` stands."""
    before, bracket, rest = name.partition("[")
    if bracket:
        words, _, after = rest.partition("]")
        parts = [f"{before}{word}{after}" for word in words.split("|")]
        return [full for part in parts for full in _expanded(part, sizes)]
    for mark in "*+":
        if f".{mark}." in name:
            layers = range(sizes.of(mark))
            return [name.replace(f".{mark}.", f".{layer}.") for layer in layers]
    return [name]
