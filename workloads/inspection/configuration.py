"""Objections to values in config.json and generation_config.json that no library takes.

Values come from strangers: each is held against its type and a limit before anything computes with
it (a model of 10¹² layers, 10⁹ labels). Types of rotary scaling and positions are those of
transformers and vLLM; text models inside multimodal ones have their own ``text_config``.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from workloads.inspection.checkpoints import Objection
from workloads.inspection.families import FAMILIES

_CONFIG, _GENERATION = "config.json", "generation_config.json"
#: Configurations of the text model inside a multimodal one, in transformers' order.
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
ROPE_KEYS = ("rope_parameters", "rope_scaling")
#: Types of rotary scaling -> keys that transformers needs beside the type.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
    "axial": (),
    "mrope": (),  # Qwen2-VL's, read as the default
    "su": ("short_factor", "long_factor"),  # Phi-3's first name of longrope
}
_OF_FAMILIES = {"su": ("phi3", "phimoe", "phi4_multimodal")}
_READ_IDS = ("pad_token_id", "decoder_start_token_id")
#: Names that torch has for types of weights; a table of types by parts passes.
_DTYPES = re.compile(
    r"(torch\.)?(b?float(16|32|64)?|half|double|auto|u?int8|float8_e(4m3fn|5m2))|\{.*", re.DOTALL
)
#: Values of quant_method that transformers names.
_METHODS = re.compile(r"[\w./-]{1,40}")


def _number(value: Any) -> bool:
    """Tell finite numbers: Python's JSON has NaN and Infinity, too."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole or (isinstance(value, float) and math.isfinite(value))


def positive(value: Any) -> bool:
    """Tell numbers above 0."""
    return _number(value) and bool(value > 0)


def _whole(least: int, most: float, *, many: bool = True) -> Callable[[Any], bool]:
    """Tell whole numbers in a range; ``many``: or one for each layer, or part."""

    def fits(value: Any) -> bool:
        if many and isinstance(value, list | Mapping):
            return True
        whole = _number(value) and (isinstance(value, int) or value.is_integer())
        return whole and least <= value <= most

    return fits


def _layers(value: Any) -> bool:
    """Tell numbers of layers; 2.0 ends loading."""
    return isinstance(value, list | Mapping) or (type(value) is int and 1 <= value <= 2_000)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _activation(value: Any) -> bool:
    listed = _listing("activations.py")
    return not isinstance(value, str) or not listed or f'"{value}"' in listed


#: Keys -> largest sensible value: ten times that of the largest models.
_LARGEST = (
    ("encoder_layers decoder_layers", 2_000),
    ("n_embd d_model dim head_dim", 1_000_000),
    ("intermediate_size d_ff ffn_dim n_inner hidden_dim", 10_000_000),
    ("num_attention_heads n_head n_heads num_heads num_key_value_heads", 100_000),
    ("num_local_experts num_experts", 100_000),
    ("padded_vocab_size type_vocab_size", 50_000_000),
    ("max_position_embeddings n_positions seq_length", 1_000_000_000),
    ("num_labels", 1_000_000),
)
_LAYERS = "num_hidden_layers n_layer n_layers num_layers num_decoder_layers"
_Rule = tuple[str, Callable[[Any], bool], str]
#: Keys, test of a value that is there, and words for what it must be.
_RULES: tuple[_Rule, ...] = (
    (_LAYERS, _layers, "a whole number from 1 to 2,000"),
    *((keys, _whole(0, most), f"a whole number up to {most:,}") for keys, most in _LARGEST),
    ("hidden_size", _whole(0, 1_000_000, many=False), "a whole number up to 1,000,000"),
    ("vocab_size", _whole(0, 50_000_000, many=False), "a whole number up to 50,000,000"),
    (
        "text_config quantization_config auto_map id2label label2id rope_parameters rope_scaling",
        lambda value: isinstance(value, Mapping),
        "an object",
    ),
    ("layer_types", _names, "a list of names"),
    ("tie_word_embeddings", lambda value: isinstance(value, bool), "true or false"),
    ("rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps rope_theta", _number, "a number"),
    ("hidden_act", _activation, "an activation that transformers knows"),
    ("torch_dtype dtype", lambda value: bool(_DTYPES.fullmatch(str(value))), "a type of torch"),
)
_QUANTIZATION: tuple[_Rule, ...] = (
    ("quant_method", lambda value: bool(_METHODS.fullmatch(str(value))), "a name"),
    ("bits w_bit", _whole(1, 32, many=False), "a number of bits"),
)
_ROPE: tuple[_Rule, ...] = (
    ("factor rope_theta original_max_position_embeddings", positive, "above 0"),
)
_LENGTHS: tuple[_Rule, ...] = (
    ("max_new_tokens num_beams", _whole(1, 10**12, many=False), "above 0"),
    ("max_length", _whole(-(10**12), 10**12, many=False), "a whole number"),
    ("early_stopping", lambda value: value in (True, False, "never"), 'true, false or "never"'),
)


def broken(values: Mapping[str, Any], rules: tuple[_Rule, ...], where: str = "") -> Iterator[str]:
    """Yield in words which values break a rule."""
    for keys, fits, what in rules:
        for key in keys.split():
            value = values.get(key)
            if value is not None and not fits(value):
                yield f"{where}{key} is {shown(value)}, not {what}"


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the text model inside a multimodal one, else the whole."""
    for key in _TEXT_PARTS:
        if isinstance(part := config.get(key), Mapping) and part:
            return part
    return config


def rope_type(rope: Mapping[str, Any]) -> str:
    """Return the type of rotary scaling, by its new or old key."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return a config's vocabulary size."""
    config = text_part(config)
    size = config.get("vocab_size") or config.get("padded_vocab_size")
    return size if type(size) is int else None


def objections(config: Mapping[str, Any]) -> Iterator[Objection]:
    """Objections to a config.json: types, sizes, heads, rotary scaling, quantization."""
    for name in ("", *_TEXT_PARTS):
        part = config.get(name) if name else config
        if not isinstance(part, Mapping):
            continue
        where = f"{name}." if name else ""
        described = part.get("quantization_config")
        quantization = described if isinstance(described, Mapping) else {}
        for reason in (
            *broken(part, _RULES, where),
            *broken(quantization, _QUANTIZATION, f"{where}quantization_config."),
        ):
            yield Objection(_CONFIG, reason, "correct it or take it out")
        for reason, hint in (*_sizes(part), *_rope(part)):
            yield Objection(_CONFIG, f"{where}{reason}", hint)


def _sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if _names(kinds) and type(layers) is int and kinds and len(kinds) != layers:
        yield f"layer_types names {len(kinds):,} layers of {layers:,}", "correct either"
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    groups = config.get("num_key_value_heads")
    if type(heads) is not int or type(hidden) is not int:
        return
    family = FAMILIES.get(str(config.get("model_type")))
    derived = family and "head_dim" not in family.usual and not config.get("head_dim")
    if heads == 0 or (derived and hidden % heads):
        yield f"hidden_size {hidden:,} is not a multiple of {heads:,} heads", "correct it"
    elif type(groups) is int and (groups == 0 or heads % groups):
        of = f"num_key_value_heads {groups:,}"
        yield f"num_attention_heads {heads:,} is not a multiple of {of}", "correct it"


def _rope(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    family = str(config.get("model_type"))
    for key in ROPE_KEYS:
        rope = config.get(key)
        if not isinstance(rope, Mapping) or not rope:
            continue
        for part in [part for part in rope.values() if isinstance(part, Mapping)] or [rope]:
            kind = rope_type(part)
            if config.get("auto_map") and kind not in ROPE_TYPES:
                continue  # of the model's own code
            if kind not in ROPE_TYPES or not family.startswith(_OF_FAMILIES.get(kind, "")):
                known = ", ".join(name for name in ROPE_TYPES if name not in _OF_FAMILIES)
                other = "; 'su' is longrope's old name, with other keys" if kind == "su" else ""
                hint = f"transformers knows {known}{other}"
                yield f"{key} names the unknown type {kind!r:.40}", hint
                continue
            if lacking := [name for name in ROPE_TYPES[kind] if part.get(name) is None]:
                yield f"{key} of type {kind} lacks {' and '.join(lacking)}", "add it"
            for reason in broken(part, _ROPE, f"{key}."):
                yield reason, "correct it"


def generation_objections(
    generation: Mapping[str, Any], vocabulary: int | None
) -> Iterator[Objection]:
    """Objections to a generation_config.json: values on which loading ends, ids of no token."""
    hint = f"correct it, or delete {_GENERATION}: a job has its own lengths"
    for reason in broken(generation, _LENGTHS):
        yield Objection(_GENERATION, reason, hint)
    yield from id_objections(_GENERATION, generation, vocabulary)


def id_objections(
    file: str, values: Mapping[str, Any], vocabulary: int | None
) -> Iterator[Objection]:
    """Objections to ids of special tokens that are no row of the embedding."""
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        value = values.get(key)
        ids = value if isinstance(value, list) else [value]
        given = [number for number in ids if number is not None]
        if any(type(number) is not int or number < -1 for number in given):
            reason = f"{key} is {shown(value)}, not a token's number"
            yield Objection(file, reason, "correct it")
        # An end beyond the vocabulary never comes; these two are read by the model.
        elif vocabulary and key in _READ_IDS and max(given, default=-1) >= vocabulary:
            reason = f"{key} is {max(given):,}, and vocab_size {vocabulary:,}"
            yield Objection(file, reason, "correct it")


@cache
def _listing(*names: str) -> str:
    """Return the text in which transformers lists its names; "" if it is not installed."""
    spec = importlib.util.find_spec("transformers")
    places = (spec.submodule_search_locations or ()) if spec else ()
    found = [Path(place) / name for place in places for name in names]
    return "".join(file.read_text(encoding="utf-8") for file in found if file.is_file())


def takes_quantization(quantization: Mapping[str, Any]) -> bool:
    """Tell if transformers knows a ``quantization_config``; it reads others' values as they are."""
    listed = _listing("quantizers/auto.py")
    bits = next((bits for bits in (4, 8) if quantization.get(f"load_in_{bits}bit")), 0)
    method = f"bitsandbytes_{bits}bit" if bits else quantization.get("quant_method")
    return not listed or f'"{method}":' in listed


def own_code(config: Mapping[str, Any]) -> str:
    """Return why a model needs Python code of its own, or a newer transformers; "" if neither."""
    kind = config.get("model_type")
    listed = _listing("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
    if not listed or (isinstance(kind, str) and f'"{kind}"' in listed):
        return ""
    if module := _module(config.get("auto_map")):
        return f"it brings Python code of its own ({module:.60}.py)"
    return f"transformers here knows no model_type {shown(kind)}"


def _module(classes: Any, name: str = "") -> str:
    """Return the Python file of a class in an ``auto_map``, of the first one by default."""
    if not isinstance(classes, Mapping) or not classes:
        return ""
    chosen = classes.get(name) if name else next(iter(classes.values()))
    chosen = next(filter(None, chosen), None) if isinstance(chosen, list) else chosen
    return str(chosen or "").partition(".")[0]


def own_tokenizer(settings: Mapping[str, Any]) -> str:
    """Return why a tokenizer needs Python code of its own; "" if it does not."""
    listed = _listing("models/auto/tokenization_auto.py", "models/auto/auto_mappings.py")
    module = _module(settings.get("auto_map"), "AutoTokenizer")
    kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if not listed or not module or f'"{kind}"' in listed or f'"{kind}Fast"' in listed:
        return ""
    return f"its tokenizer is Python code of its own ({module:.60}.py)"


def shown(value: Any) -> str:
    """Return a value of a configuration for a message."""
    return json.dumps(value, default=str)[:60]
