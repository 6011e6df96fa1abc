"""A ChatGLM3 checkpoint in its original layout -> one that ``GlmForCausalLM`` loads natively.

Names and shapes are checked against config.json before anything is written, so a wrong or
incomplete source costs seconds. Then tensors stream through one at a time: renamed, and the fused
query-key-value matrix cut into its three. The result is built beside its destination and renamed
at the end: a destination that exists is whole. Values are copied bit for bit.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workloads.base import BadConfiguration, DataMissing
from workloads.data.cache import build_aside, cached_directory, remove_abandoned
from workloads.models.chatglm3 import layout
from workloads.models.chatglm3.layout import Sizes
from workloads.models.chatglm3.tokenizer import (
    Piece,
    build_tokenizer,
    check_against_sentencepiece,
    read_pieces,
    write_tokenizer,
)
from workloads.models.checkpoints import (
    PROTECTED,
    Shard,
    ShardWriter,
    TensorInfo,
    architecture_of,
    inspect,
    open_shard,
    read_config,
    read_pipeline_index,
    source_files,
)

if TYPE_CHECKING:
    import torch

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
    if not layout.is_original(config):
        native = architecture_of(config) == "GlmForCausalLM"
        raise BadConfiguration(
            f"{source} is {architecture_of(config)}, not ChatGLM3 in its original layout"
            + ("; it is native already and needs no conversion" if native else "")
        )
    sizes = layout.sizes_of(config)
    files = source_files(source)
    stored = inspect(files)
    tensors = {name: t for name, t in stored.items() if not layout.is_dropped(name)}
    _check_tensors(source, tensors, sizes)
    return _Source(
        config=config, sizes=sizes, files=files, tensors=tensors, pieces=_pieces(source, sizes)
    )


def _check_tensors(source: Path, tensors: Mapping[str, TensorInfo], sizes: Sizes) -> None:
    expected = layout.original_shapes(sizes)
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
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise DataMissing(
            f"{source} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}; "
            "a weight file is missing or of another model"
        )
    surplus = [name for name in tensors if name not in expected]
    if surplus:
        raise BadConfiguration(
            f"{source} holds {len(surplus)} tensors that ChatGLM3 with these sizes does not have, "
            f"first {surplus[0]}"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise BadConfiguration(
                f"{tensors[name].file}: {name} has shape {list(tensors[name].shape)}; "
                f"config.json makes it {list(shape)}"
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


def _write(
    source: _Source, aside: Path, destination: Path, shard_bytes: int, progress: Progress
) -> Converted:
    writer = ShardWriter(aside, shard_bytes)
    parameters = 0
    for file in source.files:
        shard = open_shard(file)
        for name in shard.names():
            if layout.is_dropped(name):
                continue
            tensor = shard.tensor(name)
            for part in layout.native_parts(name, source.sizes):
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
    config = layout.from_original_config(source.config, len(pieces) if pieces else None)
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


# A converted ChatGLM3 back into its original layout, for a library that is fast on that one.
#
# ``conversion.py`` the other way round: names as published, and query, key and value rows in one
# matrix again. Values are copied bit for bit, one tensor at a time.

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def restore_into(source: Path, directory: Path) -> None:
    """Write the original layout of the converted model in ``source`` into an empty directory.

    Raises:
        DataMissing: weights are missing or truncated.
        BadConfiguration: it is another model's.
    """
    config = read_config(source)
    if architecture_of(config) != "GlmForCausalLM":
        raise BadConfiguration(f"{source} is {architecture_of(config)}, not a converted ChatGLM3")
    sizes = native_sizes(config)
    tensors = _Tensors(source)
    writer = ShardWriter(directory, SHARD_BYTES)
    for name in layout.original_shapes(sizes):
        parts = [tensors.read(part.name) for part in layout.native_parts(name, sizes)]
        writer.add(name, _joined(parts))
    writer.finish()
    text = json.dumps(original_config(config, sizes), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    copy_tokenizer(source, directory)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """The tokenizer is the same in both layouts."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def native_sizes(config: Mapping[str, Any]) -> Sizes:
    """The sizes in a config.json of the native class.

    Raises:
        BadConfiguration: a field is missing.
    """
    try:
        return Sizes(
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config["head_dim"]),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
        )
    except KeyError as error:
        raise BadConfiguration(f"config.json has no {error.args[0]!r}") from None


def original_config(config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The config.json of the original layout: the published one's fields, with these sizes."""
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    restored: dict[str, Any] = {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "hidden_size": sizes.hidden,
        "num_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "kv_channels": sizes.head_dim,
        "multi_query_attention": True,
        "multi_query_group_num": sizes.kv_heads,
        "ffn_hidden_size": sizes.intermediate,
        "padded_vocab_size": sizes.vocabulary,
        "layernorm_epsilon": config["rms_norm_eps"],
        "rope_ratio": float(theta or 10000.0) / 10000.0,
        "original_rope": True,
        "seq_length": int(config["max_position_embeddings"]),
        "rmsnorm": True,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "apply_query_key_layer_scaling": True,
        "attention_softmax_in_fp32": True,
        "fp32_residual_connection": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cache": True,
        "tie_word_embeddings": False,
        "eos_token_id": config.get("eos_token_id", layout.END_ID),
        "pad_token_id": layout.UNKNOWN_ID,
        "torch_dtype": config.get("torch_dtype") or config.get("dtype") or "float16",
    }
    if config.get("random_weights"):
        restored["random_weights"] = True
    return restored


class _Tensors:
    """All tensors of a checkpoint, by name."""

    def __init__(self, source: Path) -> None:
        self._found = inspect(source_files(source))
        self._open: dict[Path, Shard] = {}
        self._source = source

    def read(self, name: str) -> torch.Tensor:
        """One tensor; it may be a view into the mapped file."""
        if name not in self._found:
            raise DataMissing(f"{self._source} lacks the tensor {name}")
        file = self._found[name].file
        if file not in self._open:
            self._open[file] = open_shard(file)
        return self._open[file].tensor(name)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat(parts) if len(parts) > 1 else parts[0].clone()


# ChatGLM3 lies on disk in one of two layouts, and each engine loads one of them.
#
# transformers' own GLM class loads the *native* layout; optimum-habana is fast on the *original*
# one. The user names a model, in whichever layout it is: the other is made of it when an engine
# asks, and kept in the node's cache as long as the model's files stay the same.

Layout = Literal["native", "original"]

#: Raise when conversion or restoration write something else: it is in the cache's keys.
_RECIPE = 2

_MODEL_FILES = (".json", ".model", ".safetensors", PROTECTED, ".bin")


def layout_of(config: Mapping[str, Any]) -> Layout | None:
    """The layout that a config.json describes; None for every other model, which has only one."""
    if layout.is_original(config):
        return "original"
    return "native" if architecture_of(dict(config)) == "GlmForCausalLM" else None


def in_layout(directory: Path, wanted: Layout) -> Path:
    """A directory that holds this model in the layout that is wanted: itself, or one made of it.

    Raises:
        DataMissing: weights are missing or truncated.
        BadConfiguration: it is a ChatGLM of another kind, which has no counterpart.
    """
    stored = layout_of(read_config(directory))
    if stored is None or stored == wanted:
        return directory
    key = f"chatglm3-{wanted}-{_RECIPE}-{fingerprint(directory)}"
    if wanted == "native":

        def build(to: Path) -> None:
            convert_into(directory, to)
            if not (to / "tokenizer.json").is_file():  # made of tokenizer.model, if there is one
                copy_tokenizer(directory, to)

        return cached_directory(key, build)

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
    from workloads.models.chatglm3.tokenizer import read_pieces, write_tokenizer

    def build(to: Path) -> None:
        pieces = read_pieces(directory / "tokenizer.model")
        write_tokenizer(to, pieces, layout.max_positions(config))
        ends = layout.eos_token_ids(config, layout.sizes_of(config), len(pieces))
        text = json.dumps({"eos_token_id": ends, "pad_token_id": layout.UNKNOWN_ID}, indent=2)
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
