"""ChatGLM3 lies on disk in one of two layouts, and each engine loads one of them.

transformers' own GLM class loads the *native* layout; optimum-habana is fast on the *original* one.
The user names a model, in whichever layout it is: the other is made of it when an engine asks, and
kept in the node's cache as long as the model's files stay the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from workloads.cache import cached_directory
from workloads.models import chatglm3
from workloads.models.checkpoint_files import (
    PROTECTED,
    architecture_of,
    read_config,
    read_pipeline_index,
)

Layout = Literal["native", "original"]

#: Raise when conversion or restoration write something else: it is in the cache's keys.
_RECIPE = 2

_MODEL_FILES = (".json", ".model", ".safetensors", PROTECTED, ".bin")


def layout_of(config: Mapping[str, Any]) -> Layout | None:
    """The layout that a config.json describes; None for every other model, which has only one."""
    if chatglm3.is_original(config):
        return "original"
    return "native" if architecture_of(dict(config)) == "GlmForCausalLM" else None


def in_layout(directory: Path, wanted: Layout) -> Path:
    """A directory that holds this model in the layout that is wanted: itself, or one made of it.

    Raises:
        DataMissing: weights are missing or truncated.
        BadConfiguration: it is a ChatGLM of another kind, which has no counterpart.
    """
    found = layout_of(read_config(directory))
    if found is None or found == wanted:
        return directory
    key = f"chatglm3-{wanted}-{_RECIPE}-{fingerprint(directory)}"
    if wanted == "native":
        from workloads.models.conversion import convert_into
        from workloads.models.restoration import copy_tokenizer

        def build(to: Path) -> None:
            convert_into(directory, to)
            if not (to / "tokenizer.json").is_file():  # made of tokenizer.model, if there is one
                copy_tokenizer(directory, to)

        return cached_directory(key, build)
    from workloads.models.restoration import restore_into

    return cached_directory(key, lambda to: restore_into(directory, to))


def tokenizer_directory(directory: Path) -> Path:
    """Directory of a model's fast tokenizer: its own, or one made of its SentencePiece model.

    Raises:
        DataMissing: there is neither.
        BadConfiguration: the SentencePiece model is of another kind.
    """
    if (directory / "tokenizer.json").is_file() or not (directory / "tokenizer.model").is_file():
        return directory
    if layout_of(config := read_config(directory)) != "original":
        return directory
    from workloads.models.chatglm3_tokenizer import read_pieces, write_tokenizer

    def build(to: Path) -> None:
        pieces = read_pieces(directory / "tokenizer.model")
        write_tokenizer(to, pieces, chatglm3.max_positions(config))
        ends = chatglm3.eos_token_ids(config, chatglm3.sizes_of(config), len(pieces))
        text = json.dumps({"eos_token_id": ends, "pad_token_id": chatglm3.UNKNOWN_ID}, indent=2)
        (to / "generation_config.json").write_text(text + "\n", encoding="utf-8")

    return cached_directory(f"chatglm3-tokenizer-{_RECIPE}-{fingerprint(directory)}", build)


def fingerprint(directory: Path) -> str:
    """Changes when a file of a model or an adapter does. Names, sizes and times stand for
    gigabytes of weights."""
    seen = hashlib.sha256(str(directory.resolve()).encode())
    for name, file in _model_files(directory):
        facts = file.stat()
        seen.update(f"{name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return seen.hexdigest()[:16]


def content_digest(directory: Path) -> str:
    """Changes when the content of a model's files does: equal copies on all nodes are one model.
    This reads all of them."""
    seen = hashlib.sha256()
    for name, file in _model_files(directory):
        seen.update(f"{name} {file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                seen.update(block)
    return seen.hexdigest()[:16]


def _model_files(directory: Path) -> list[tuple[str, Path]]:
    """The files of a model, or of all models of a pipeline, by their names in its directory."""
    several = read_pipeline_index(directory) is not None
    files = directory.glob("**/*" if several else "*")
    models = sorted(file for file in files if file.suffix in _MODEL_FILES and file.is_file())
    return [(file.relative_to(directory).as_posix(), file) for file in models]
