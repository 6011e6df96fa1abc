"""A ChatGLM3 checkpoint in its original layout -> one that ``GlmForCausalLM`` loads natively.

Names and shapes are checked against config.json before anything is written, so a wrong or
incomplete source costs seconds. Then tensors stream through one at a time: renamed, and the fused
query-key-value matrix cut into its three. The result is built beside its destination and renamed
at the end: a destination that exists is whole. Values are copied bit for bit.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.base import BadConfiguration, DataMissing
from workloads.cache import build_aside, remove_abandoned
from workloads.models import chatglm3
from workloads.models.chatglm3 import Sizes
from workloads.models.chatglm3_tokenizer import (
    Piece,
    build_tokenizer,
    check_against_sentencepiece,
    read_pieces,
    write_tokenizer,
)
from workloads.models.checkpoint_files import architecture_of, read_config
from workloads.models.shards import ShardWriter, TensorInfo, inspect, open_shard, source_files

SHARD_BYTES = 2 << 30

#: Called with (bytes done, bytes in all) after every tensor.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Output of a conversion."""

    path: Path
    parameters: int
    bytes: int
    weight_files: list[str]
    tokenizer: bool  # whether the source had a tokenizer.model to build one from


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    config: Mapping[str, Any]
    sizes: Sizes
    files: list[Path]
    tensors: dict[str, TensorInfo]  # without the ones that are dropped
    pieces: list[Piece] | None

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())


def convert(
    source: Path,
    destination: Path,
    *,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Convert ``source`` into the new directory ``destination``.

    Args:
        source: config.json and weights (.bin or safetensors; one file, an index, or a numbered
            set) in the original layout; tokenizer.model beside them if there is one.
        destination: must not exist, unless ``force``, which replaces a model's directory.
        shard_bytes: how much is held in memory and written per file.

    Raises:
        DataMissing: weights are missing or truncated.
        BadConfiguration: the source is not ChatGLM3, or the destination cannot be written.
    """
    destination = Path(destination).expanduser()
    _check_destination(destination, Path(source), force)
    checked = _read_source(Path(source).expanduser())
    _check_disk(destination, checked.bytes)
    remove_abandoned(destination)
    written: list[Converted] = []

    def build(aside: Path) -> None:
        written.append(_write(checked, aside, destination, shard_bytes, progress))

    try:
        build_aside(destination, build, replace=force)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        raise BadConfiguration(f"{destination} cannot be written: {error.strerror}") from error
    return written[0]


def convert_into(source: Path, directory: Path) -> None:
    """Like ``convert``, into a directory that is there and empty.

    Raises:
        DataMissing: weights are missing or truncated.
        BadConfiguration: the source is not ChatGLM3.
    """
    _write(_read_source(source), directory, directory, SHARD_BYTES, lambda done, total: None)


def _read_source(source: Path) -> _Source:
    """Look at everything that will be read, and refuse what will not convert."""
    config = read_config(source)
    if not chatglm3.is_original(config):
        native = architecture_of(config) == "GlmForCausalLM"
        raise BadConfiguration(
            f"{source} is {architecture_of(config)}, not ChatGLM3 in its original layout"
            + ("; it is native already and needs no conversion" if native else "")
        )
    sizes = chatglm3.sizes_of(config)
    files = source_files(source)
    found = inspect(files)
    tensors = {name: t for name, t in found.items() if not chatglm3.is_dropped(name)}
    _check_tensors(source, tensors, sizes)
    return _Source(
        config=config, sizes=sizes, files=files, tensors=tensors, pieces=_pieces(source, sizes)
    )


def _check_tensors(source: Path, found: Mapping[str, TensorInfo], sizes: Sizes) -> None:
    expected = chatglm3.original_shapes(sizes)
    if any("prefix_encoder" in name for name in found):
        raise BadConfiguration(
            f"{source} holds a P-tuning prefix encoder, which the native class has no place for; "
            "convert the base model it was trained from"
        )
    whole = [n for n, t in found.items() if not t.dtype.startswith(("float", "bfloat"))]
    if whole or any(name.endswith("weight_scale") for name in found):
        raise BadConfiguration(
            f"{source} is quantised ({whole[0] if whole else 'weight_scale'} is not a "
            "floating-point tensor); convert the half-precision checkpoint instead"
        )
    missing = [name for name in expected if name not in found]
    if missing:
        raise DataMissing(
            f"{source} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}; "
            "a weight file is missing or of another model"
        )
    surplus = [name for name in found if name not in expected]
    if surplus:
        raise BadConfiguration(
            f"{source} holds {len(surplus)} tensors that ChatGLM3 with these sizes does not have, "
            f"first {surplus[0]}"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise BadConfiguration(
                f"{found[name].file}: {name} has shape {list(found[name].shape)}; "
                f"config.json makes it {list(shape)}"
            )


def _pieces(source: Path, sizes: Sizes) -> list[Piece] | None:
    model_file = source / "tokenizer.model"
    if not model_file.exists():
        return None
    pieces = read_pieces(model_file)
    needed = len(pieces) + len(chatglm3.SPECIAL_TOKENS)
    if needed > sizes.vocabulary:
        raise BadConfiguration(
            f"{model_file} needs {needed} ids and the model has {sizes.vocabulary}; "
            "it belongs to another model"
        )
    check_against_sentencepiece(build_tokenizer(pieces), model_file)
    return pieces


def _write(
    source: _Source, aside: Path, destination: Path, shard_bytes: int, progress: Progress
) -> Converted:
    writer = ShardWriter(aside, shard_bytes)
    parameters = 0
    for file in source.files:
        shard = open_shard(file)
        for name in shard.names():
            if chatglm3.is_dropped(name):
                continue
            tensor = shard.tensor(name)
            for part in chatglm3.native_parts(name, source.sizes):
                writer.add(part.name, tensor[part.start : part.stop].clone())
            parameters += tensor.numel()
            progress(writer.total_bytes, source.bytes)
    names = writer.finish()
    _write_configs(source, aside)
    return Converted(
        path=destination,
        parameters=parameters,
        bytes=writer.total_bytes,
        weight_files=names,
        tokenizer=source.pieces is not None,
    )


def _write_configs(source: _Source, aside: Path) -> None:
    pieces = source.pieces
    config = chatglm3.from_original_config(source.config, len(pieces) if pieces else None)
    embedding = source.tensors["transformer.embedding.word_embeddings.weight"]
    config["torch_dtype"] = embedding.dtype
    if source.config.get("random_weights"):
        config["random_weights"] = True
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (aside / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if pieces:
        write_tokenizer(aside, pieces, config["max_position_embeddings"])


def _check_destination(destination: Path, source: Path, force: bool) -> None:
    if "\0" in f"{source}{destination}":
        raise BadConfiguration("the name of a directory holds a NUL character")
    if destination.resolve() == source.expanduser().resolve():
        raise BadConfiguration("source and destination are the same directory")
    if not destination.exists():
        return
    if not force:
        raise BadConfiguration(f"{destination} exists; choose another, or replace it with --force")
    replaceable = destination.is_dir() and not destination.is_symlink()
    if not replaceable or (
        any(destination.iterdir()) and not (destination / "config.json").is_file()
    ):
        raise BadConfiguration(
            f"{destination} is not a model's directory, so --force will not replace it"
        )


def _check_disk(destination: Path, needed: int) -> None:
    parent = destination.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise BadConfiguration(f"{parent} cannot be made: {error.strerror}") from error
    if free < needed * 1.01:
        raise BadConfiguration(
            f"{destination} needs {needed / 1e9:.1f} GB and {parent} has {free / 1e9:.1f} GB free"
        )
