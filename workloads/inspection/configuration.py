"""Reads config.json and generation_config.json, and objects to values that no library takes.

Values come from strangers: each is held against its type and a limit before anything computes with
it (a model of 10¹² layers, 10⁹ labels). Types of rotary scaling and positions are those of
transformers and vLLM; text models inside multimodal ones have their own ``text_config``.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from workloads.inspection.families import FAMILIES


class Objection(NamedTuple):
    """A fault of a file in a model's directory, and the remedy."""

    file: str
    reason: str
    hint: str = ""


_CONFIG, _GENERATION = "config.json", "generation_config.json"
#: Configurations of the text model inside a multimodal one, in transformers' order.
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
#: Key -> largest sensible value: ten times that of the largest models.
_LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), 2_000),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "n_layers"), 2_000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "head_dim"), 1_000_000),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "hidden_dim"), 10_000_000),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 100_000),
    **dict.fromkeys(("num_key_value_heads", "num_local_experts", "num_experts"), 100_000),
    **dict.fromkeys(("vocab_size", "padded_vocab_size", "type_vocab_size"), 50_000_000),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length"), 1_000_000_000),
    "num_labels": 1_000_000,
}
_NUMBERS = ("vocab_size", "hidden_size")
#: Key -> the JSON type that transformers reads.
_OBJECTS = ("text_config", "quantization_config", "auto_map", "id2label", "label2id")
_ROPE_KEYS = ("rope_parameters", "rope_scaling")
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
_POSITIONS = ("max_position_embeddings", "seq_length", "n_positions")
_FLOATS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta")
#: Key of a type -> the names that torch has for types of weights, in quotes.
_DTYPES = (
    '"float32" "float16" "bfloat16" "float64" "float" "half" "double" "auto" "int8" "uint8" '
    '"float8_e4m3fn" "float8_e5m2"'
)
_TYPES = (("torch_dtype", _DTYPES), ("dtype", _DTYPES))
_OUT = "correct it or take it out"
#: Values of quant_method that transformers names.
_METHODS = re.compile(r"[\w./-]{1,40}")


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the text model inside a multimodal one, else the whole."""
    for key in _TEXT_PARTS:
        if isinstance(part := config.get(key), Mapping) and part:
            return part
    return config


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary parameters of a text model's full attention; empty if it has none."""
    for key in _ROPE_KEYS:
        rope = config.get(key)
        if isinstance(rope, Mapping) and rope:
            nested = rope.get("full_attention")
            return nested if isinstance(nested, Mapping) else rope
    return {}


def rope_type(rope: Mapping[str, Any]) -> str:
    """Return the type of rotary scaling, by its new or old key."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens that a model takes, as vLLM reckons them; None if unknown.

    yarn multiplies the positions before its scaling; linear and dynamic multiply those that are
    written; longrope's and llama3's are written scaled. T5's ``n_positions`` are no limit.
    """
    config = text_part(config)
    names = _POSITIONS[:1] if config.get("is_encoder_decoder") else _POSITIONS
    positions = next((config[name] for name in names if config.get(name)), None)
    if type(positions) is not int:
        return None
    rope = rope_of(config)
    kind, factor = rope_type(rope), rope.get("factor")
    if not isinstance(factor, int | float) or not 0 < factor < 1e6:
        return positions
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings")
        return int((original if type(original) is int else positions) * factor)
    return int(positions * factor) if kind in ("linear", "dynamic") else positions


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return a config's vocabulary size."""
    config = text_part(config)
    size = config.get("vocab_size") or config.get("padded_vocab_size")
    return size if type(size) is int else None


def objections(config: Mapping[str, Any]) -> Iterator[Objection]:
    """Objections to a config.json: types, sizes, heads, rotary scaling, quantization."""
    for where, part in (("", config), *_nested(config)):
        for problem, hint in _values(part, where):
            yield Objection(_CONFIG, problem, hint)


def _nested(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in _TEXT_PARTS:
        if isinstance(part := config.get(key), Mapping):
            yield f"{key}.", part


def _values(config: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    for key, most in _LARGEST.items():
        value = config.get(key)
        if value is None or (isinstance(value, list | Mapping) and key not in _NUMBERS):
            continue  # a number for each layer, or part
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not 0 <= value <= most:
            yield f"{where}{key} is {shown(value)}, not a number up to {most:,}", "correct it"
    for key in _OBJECTS:
        if not isinstance(config.get(key), Mapping | None):
            yield (
                f"{where}{key} is {shown(config[key])}, not an object",
                "correct it or take it out",
            )
    kinds = config.get("layer_types")
    layers = config.get("num_hidden_layers")
    if kinds is not None and not (
        isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    ):
        yield f"{where}layer_types is {shown(kinds)}, not a list of names", "correct it"
    elif kinds and type(layers) is int and len(kinds) != layers:
        yield f"{where}layer_types names {len(kinds):,} layers of {layers:,}", "correct either"
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    groups = config.get("num_key_value_heads")
    if type(heads) is int and type(hidden) is int:
        family = FAMILIES.get(str(config.get("model_type")))
        derived = family and "head_dim" not in family.usual and not config.get("head_dim")
        if heads == 0 or (derived and hidden % heads):
            yield (
                f"{where}hidden_size {hidden:,} is not a multiple of {heads:,} heads",
                "correct it",
            )
        elif type(groups) is int and (groups == 0 or heads % groups):
            yield (
                f"{where}num_attention_heads {heads:,} is not a multiple of num_key_value_heads "
                f"{groups:,}",
                "correct it",
            )
    if not isinstance(config.get("tie_word_embeddings"), bool | None):
        yield f"{where}tie_word_embeddings is {shown(config['tie_word_embeddings'])}", "correct it"
    for key in _FLOATS:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield f"{where}{key} is {shown(value)}, not a number", "correct it"
    for key, listed in (("hidden_act", _listing("activations.py")), *_TYPES):
        value = config.get(key)
        if isinstance(value, str) and listed and f'"{value.removeprefix("torch.")}"' not in listed:
            yield f"{where}{key} is the unknown {value!r:.40}", "correct it"
    yield from _rope(config, where)
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization:
        method = quantization.get("quant_method")
        bits = quantization.get("bits", quantization.get("w_bit", 4))
        if method is not None and not (isinstance(method, str) and _METHODS.fullmatch(method)):
            yield f"{where}quantization_config.quant_method is {shown(method)}, not a name", ""
        if type(bits) is not int or not 1 <= bits <= 32:
            yield f"{where}quantization_config.bits is {shown(bits)}, not a number of bits", ""


def _rope(config: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    for key in _ROPE_KEYS:
        rope = config.get(key)
        if rope is None or rope == {}:
            continue
        if not isinstance(rope, Mapping):
            yield f"{where}{key} is {shown(rope)}, not an object", _OUT
            continue
        nested = [part for part in rope.values() if isinstance(part, Mapping)]
        for part in nested or [rope]:
            kind = rope_type(part)
            if config.get("auto_map") and kind not in ROPE_TYPES:
                continue  # of the model's own code
            families = _OF_FAMILIES.get(kind)
            family = str(config.get("model_type"))
            if kind not in ROPE_TYPES or (families and not family.startswith(families)):
                known = ", ".join(name for name in ROPE_TYPES if name not in _OF_FAMILIES)
                other = "; 'su' is longrope's old name, with other keys" if kind == "su" else ""
                yield (
                    f"{where}{key} names the unknown type {kind!r:.40}",
                    f"transformers knows {known}{other}",
                )
                continue
            if lacking := [name for name in ROPE_TYPES[kind] if part.get(name) is None]:
                yield f"{where}{key} of type {kind} lacks {' and '.join(lacking)}", "add it"
            for name in ("factor", "rope_theta", "original_max_position_embeddings"):
                number = part.get(name)
                if number is not None and not (
                    isinstance(number, int | float) and not isinstance(number, bool) and number > 0
                ):
                    yield f"{where}{key}.{name} is {shown(number)}, not above 0", "correct it"


def generation_objections(
    generation: Mapping[str, Any], vocabulary: int | None
) -> Iterator[Objection]:
    """Objections to a generation_config.json: values on which loading ends, ids of no token."""
    hint = f"correct it, or delete {_GENERATION}: a job has its own lengths"
    for key in ("max_new_tokens", "max_length", "num_beams"):
        value = generation.get(key)
        if value is not None and (type(value) is not int or (value <= 0 and key != "max_length")):
            yield Objection(_GENERATION, f"{key} is {shown(value)}, not above 0", hint)
    if generation.get("early_stopping") not in (None, True, False, "never"):
        yield Objection(
            _GENERATION, f"early_stopping is {shown(generation['early_stopping'])}", hint
        )
    yield from id_objections(_GENERATION, generation, vocabulary)


def id_objections(
    file: str, values: Mapping[str, Any], vocabulary: int | None
) -> Iterator[Objection]:
    """Objections to ids of special tokens that are no row of the embedding."""
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        value = values.get(key)
        ids = value if isinstance(value, list) else [value]
        for number in ids:
            if number is None or (key == "pad_token_id" and number == -1):
                continue
            if type(number) is not int or number < -1:
                yield Objection(
                    file, f"{key} is {shown(value)}, not a token's number", "correct it"
                )
                break
            # An end beyond the vocabulary never comes; these two are read by the model.
            read = key in ("pad_token_id", "decoder_start_token_id")
            if read and vocabulary is not None and number >= vocabulary:
                yield Objection(
                    file, f"{key} is {number:,}, and vocab_size {vocabulary:,}", "correct it"
                )
                break


@cache
def _listing(*names: str) -> str:
    """Return the text in which transformers lists its names; "" if it is not installed."""
    spec = importlib.util.find_spec("transformers")
    places = (spec.submodule_search_locations or ()) if spec else ()
    text = ""
    for place in places:
        for name in names:
            file = Path(place) / name
            if file.is_file():
                text += file.read_text(encoding="utf-8")
    return text


def own_code(config: Mapping[str, Any]) -> str:
    """Return why a model needs Python code of its own, or a newer transformers; "" if neither."""
    kind = config.get("model_type")
    listed = _listing("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
    if not listed:
        return ""
    if isinstance(kind, str) and f'"{kind}"' in listed:
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


def whole_number(value: object) -> int:
    """Return a configuration's number; 0 if it is none, to which the look objects."""
    return value if type(value) is int else 0


def shown(value: Any) -> str:
    """Return a value of a configuration for a message."""
    return json.dumps(value, default=str)[:60]
