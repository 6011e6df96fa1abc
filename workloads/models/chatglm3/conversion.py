"""Conversion between ChatGLM3's two layouts on disk.

Names and shapes are checked against config.json first, so a wrong source fails within seconds. Then
tensors stream through one at a time: renamed, the fused query-key-value matrix split or joined,
values copied bit for bit. The result is built aside and renamed, so an existing destination is
complete. Engines that load the other layout get it from the node's cache, keyed by the files.
"""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration, DataMissing
from workloads.data.cache import build_aside, cached_directory, remove_abandoned
from workloads.inspection import weights
from workloads.inspection.checkpoints import read_config, source_files
from workloads.inspection.headers import TensorInfo, describe_tensors
from workloads.models.chatglm3 import layout
from workloads.models.chatglm3.layout import Layout, Sizes
from workloads.models.chatglm3.tokenizer import (
    Piece,
    build_tokenizer,
    check_against_sentencepiece,
    read_pieces,
    write_tokenizer,
)
from workloads.models.embedded import write_files
from workloads.registry import kind_of
from workloads.util.contents import fingerprint

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2 << 30
#: Increment when the written files change: part of the cache's keys.
_RECIPE = 2

#: Called with (bytes done, bytes in total) after every tensor.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Result of a conversion."""

    path: Path
    parameters: int
    bytes: int
    weight_files: list[str]
    tokenizer: bool  # whether the source had a tokenizer.model to build one from


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    config: Mapping[str, Any]
    sizes: Sizes
    tensors: dict[str, TensorInfo]  # without dropped ones
    pieces: list[Piece] | None
    bytes: int


def convert(
    source: Path,
    destination: Path,
    *,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Convert ``source`` into the new directory ``destination``, replaced if it is a model's and
    ``force`` is set.

    The source has config.json, weights (.bin or safetensors; one file, an index, or a numbered set)
    and, if available, tokenizer.model. A written file has ``shard_bytes``, held in memory. Raises
    DataMissing for weights that are missing or truncated, and BadConfiguration if the source is not
    ChatGLM3, or the destination cannot be written.
    """
    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    _check_destination(destination, source, force)
    checked = _read_source(source)
    _check_disk(destination, checked.bytes)
    remove_abandoned(destination)
    names: list[str] = []
    try:
        build_aside(
            destination,
            lambda aside: names.extend(_write_native(checked, aside, shard_bytes, progress)),
            replace=force,
        )
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        raise BadConfiguration(f"{destination} cannot be written: {error.strerror}") from error
    return Converted(
        path=destination,
        parameters=sum(map(math.prod, layout.original_shapes(checked.sizes).values())),
        bytes=checked.bytes,
        weight_files=names,
        tokenizer=checked.pieces is not None,
    )


def in_layout(directory: Path, wanted: Layout) -> Path:
    """Return this model's directory in the ``wanted`` layout, converted into the cache if needed.
    Raises DataMissing for incomplete weights, BadConfiguration for another ChatGLM."""
    stored = layout.layout_of(read_config(directory))
    if stored is None or stored == wanted:
        return directory

    def build(to: Path) -> None:
        if wanted == "original":
            restore_into(directory, to)
        else:
            _write_native(_read_source(directory), to)
        if not (to / "tokenizer.json").is_file():  # else built from tokenizer.model
            for name in ("tokenizer.json", "tokenizer_config.json"):  # alike in both layouts
                if (directory / name).is_file():
                    shutil.copyfile(directory / name, to / name)

    return cached_directory(f"chatglm3-{wanted}-{_RECIPE}-{fingerprint(directory)}", build)


def tokenizer_directory(directory: Path) -> Path:
    """Return the directory of a fast tokenizer, built if needed; raises as ``read_pieces``."""
    if (directory / "tokenizer.json").is_file() or not (directory / "tokenizer.model").is_file():
        return directory
    config = read_config(directory)
    if layout.layout_of(config) is None:
        return directory

    def build(to: Path) -> None:
        pieces = read_pieces(directory / "tokenizer.model")
        original = layout.is_original(config)
        native = layout.from_original_config(config, len(pieces)) if original else config
        write_tokenizer(to, pieces, native["max_position_embeddings"])
        ends = {"eos_token_id": native["eos_token_id"], "pad_token_id": layout.UNKNOWN_ID}
        write_files(to, {"generation_config.json": ends})

    return cached_directory(f"chatglm3-tokenizer-{_RECIPE}-{fingerprint(directory)}", build)


# ---------------------------------------------------------------- what is read


def _read_source(source: Path) -> _Source:
    """Read all headers of the source and refuse what cannot be converted."""
    config = read_config(source)
    if not layout.is_original(config):
        architecture = kind_of(config).architecture
        native = "; it is native already and needs no conversion"
        raise BadConfiguration(
            f"{source} is {architecture}, not ChatGLM3 in its original layout"
            f"{native if architecture == 'GlmForCausalLM' else ''}"
        )
    sizes = layout.sizes_of(config)
    stored = describe_tensors(source_files(source))
    # Left out: what is computed from the config.
    redundant = "rotary_pos_emb.inv_freq"
    tensors = {name: t for name, t in stored.items() if not name.endswith(redundant)}
    _check_tensors(source, tensors, sizes)
    return _Source(
        config=config,
        sizes=sizes,
        tensors=tensors,
        pieces=_pieces(source, sizes),
        bytes=sum(tensor.bytes for tensor in tensors.values()),
    )


def _check_tensors(source: Path, tensors: Mapping[str, TensorInfo], sizes: Sizes) -> None:
    if any("prefix_encoder" in name for name in tensors):
        raise BadConfiguration(
            f"{source} holds a P-tuning prefix encoder, which the native class has no place for; "
            "convert the base model it was trained from"
        )
    whole = [n for n, t in tensors.items() if not t.dtype.startswith(("float", "bfloat"))]
    if whole or any(name.endswith("weight_scale") for name in tensors):
        raise BadConfiguration(
            f"{source} is quantised ({whole[0] if whole else 'weight_scale'} is not a "
            "floating-point tensor); convert the half-precision checkpoint instead"
        )
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    found = weights.difference(layout.original_shapes(sizes), shapes)
    weights.require_loaded(found, str(source))
    if found.unexpected:
        raise BadConfiguration(
            f"{source} holds {len(found.unexpected)} tensors that ChatGLM3 with these sizes does "
            f"not have, first {found.unexpected[0]}"
        )


def _pieces(source: Path, sizes: Sizes) -> list[Piece] | None:
    model_file = source / "tokenizer.model"
    if not model_file.exists():
        return None
    pieces = read_pieces(model_file)
    needed = len(pieces) + len(layout.SPECIAL_TOKENS)
    if needed > sizes.vocabulary:
        raise BadConfiguration(
            f"{model_file} needs {needed} ids and the model has {sizes.vocabulary}; "
            "it belongs to another model"
        )
    check_against_sentencepiece(build_tokenizer(pieces), model_file)
    return pieces


def _check_destination(destination: Path, source: Path, force: bool) -> None:
    if "\0" in f"{source}{destination}":
        raise BadConfiguration("the name of a directory holds a NUL character")
    if destination.resolve() == source.resolve():
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


# ---------------------------------------------------------------- what is written


def _write_native(
    source: _Source,
    directory: Path,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """Write a converted model into an empty directory; return its weight files' names."""
    tensors, read = source.tensors, _reader(source.tensors)
    parts = {
        native: (name, rows)
        for name in tensors
        for native, rows in layout.native_parts(name, source.sizes).items()
    }

    def make(native: str) -> torch.Tensor:
        name, rows = parts[native]
        return read(name)[rows].clone()

    sizes = {
        native: tensors[name].bytes // tensors[name].shape[0] * (rows.stop - rows.start)
        for native, (name, rows) in parts.items()
    }
    names = _write_shards(directory, sizes, make, shard_bytes, progress)
    pieces = source.pieces
    config = layout.from_original_config(source.config, len(pieces) if pieces else None)
    embedding = source.tensors["transformer.embedding.word_embeddings.weight"]
    config["torch_dtype"] = embedding.dtype
    if source.config.get("random_weights"):
        config["random_weights"] = True
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_files(directory, {"config.json": config, "generation_config.json": generation})
    if pieces:
        write_tokenizer(directory, pieces, config["max_position_embeddings"])
    return names


def restore_into(source: Path, directory: Path) -> None:
    """Write the original layout of the converted model in ``source`` into an empty directory."""
    import torch

    config = read_config(source)
    restored, sizes = layout.original_config(config), layout.native_sizes(config)
    tensors = describe_tensors(source_files(source))
    read = _reader(tensors)
    parts = {name: list(layout.native_parts(name, sizes)) for name in layout.original_shapes(sizes)}
    if missing := [part for names in parts.values() for part in names if part not in tensors]:
        raise DataMissing(f"{source} lacks the tensor {missing[0]}")
    _write_shards(
        directory,
        {name: sum(tensors[part].bytes for part in names) for name, names in parts.items()},
        lambda name: torch.cat([read(part) for part in parts[name]]),
        SHARD_BYTES,
    )
    write_files(directory, {"config.json": restored})


def _reader(tensors: Mapping[str, TensorInfo]) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a tensor by name, possibly as a view; each file opens once."""
    import torch
    from safetensors import safe_open

    @cache
    def values_of(file: Path) -> Any:
        if file.suffix == ".safetensors":
            return safe_open(str(file), framework="pt").get_tensor
        # By the restricted unpickler, which runs no code.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True).__getitem__

    return lambda name: values_of(tensors[name].file)(name)


def _write_shards(
    directory: Path,
    sizes: Mapping[str, int],
    make: Callable[[str], torch.Tensor],
    shard_bytes: int,
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """Write safetensors of up to ``shard_bytes`` and an index; ``sizes`` are in bytes by name."""
    from safetensors.torch import save_file

    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    count, done, total = len(shards), 0, sum(sizes.values())
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
        content = {}
        for name in shard:
            content[name] = make(name)
            weight_map[name] = file
            done += sizes[name]
            progress(done, total)
        save_file(content, directory / file, metadata={"format": "pt"})
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_files(directory, {"model.safetensors.index.json": index})
    return sorted(set(weight_map.values()))
