"""The kind of a checkpoint, as the JSON file in its directory tells: nothing is loaded."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration, DataMissing
from workloads.util import files

if TYPE_CHECKING:
    import torch

#: Names the parts of a pipeline of several models; each part has a directory of its own.
PIPELINE_INDEX = "model_index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointKind:
    """Classes and family that a checkpoint declares."""

    architecture: str  # the class that it was saved from, or the pipeline's
    model_type: str = ""  # transformers' name of the family
    encoder_decoder: bool = False
    pipeline: bool = False  # a directory of several models


def kind_of(config: Mapping[str, Any]) -> CheckpointKind:
    """The kind of a checkpoint with this config.json."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else config.get("model_type")
    return CheckpointKind(
        architecture=str(first or "unknown"),
        model_type=str(config.get("model_type") or ""),
        encoder_decoder=config.get("is_encoder_decoder") is True,
    )


def is_pipeline_index(content: Mapping[str, Any]) -> bool:
    """Tell a model_index.json from a config.json: of its parts it names libraries and classes."""
    return "_class_name" in content and isinstance(content.get("scheduler"), list)


def kind_of_pipeline(index: Mapping[str, Any]) -> CheckpointKind:
    """The kind of a pipeline with this model_index.json."""
    return CheckpointKind(architecture=str(index.get("_class_name") or "unknown"), pipeline=True)


# The files of a checkpoint's directory, looked at without loading any: is it all there?

#: Index of shards, and the single file it stands for.
WEIGHT_FILES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
#: Ending of a weight file that only a key opens (``encryption.py``).
PROTECTED = ".protected"
#: Any of them makes a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
#: Endings of what a model has beside its weights.
TEXT_FILES = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".md"})
_INDEX_BYTES = 256 * files.MIB
#: Of what a model's directory has beside its weights: the largest tokenizers have a tenth of it.
_SIDE_FILE_BYTES = 256 * files.MIB


def refuse_odd_files(directory: Path) -> None:
    """Let a model's directory pass that holds files and directories, of sizes that text has: the
    libraries that read it would wait for a pipe, and read a device to its end.

    Raises:
        DataMissing: something in it is no file, or larger than any such file is.
    """
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return  # what is to be read of it says so
    for entry in entries:
        try:
            status = entry.stat()
        except OSError:
            continue  # a link to nowhere: is anything of it needed, that is missing
        if stat.S_ISDIR(status.st_mode):
            continue
        try:
            with files.opened(entry):
                pass
        except PermissionError:
            continue
        except OSError as error:
            raise DataMissing(f"{entry} cannot be read: {error.strerror}") from error
        if entry.suffix in TEXT_FILES and status.st_size > _SIDE_FILE_BYTES:
            size = f"{status.st_size:,} bytes"
            raise DataMissing(f"{entry} cannot be read: {size} are too many for a {entry.suffix}")


def has_tokenizer(directory: Path) -> bool:
    """Return whether a model's directory has a tokenizer's files."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def protected_files(directory: Path) -> list[Path]:
    """The protected weight files of a directory, by name."""
    return sorted(directory.glob(f"*.safetensors{PROTECTED}"))


def weight_files(directory: Path, *, protected: bool = False) -> list[Path]:
    """The files that hold a checkpoint's weights, looked for in transformers' order.

    Args:
        directory: the checkpoint.
        protected: whether they may be protected ones (``encryption.py``).

    Raises:
        DataMissing: there are none, or a shard that the index names is not there.
    """
    if protected_files(directory):
        if protected:
            return _protected_weights(directory)
        raise DataMissing(
            f"the weights in {directory} are protected, and are read here in the clear only"
        )
    for index, single in WEIGHT_FILES:
        if os.path.isfile(directory / single):
            return [directory / single]
        if os.path.isfile(directory / index):
            shards = index_shards(directory / index)
            missing = [name for name in shards if not os.path.isfile(directory / name)]
            if missing:
                more = " …" if len(missing) > 3 else ""
                raise DataMissing(
                    f"{directory} lacks {len(missing)} of its {len(shards)} weight files: "
                    f"{', '.join(missing[:3])}{more} (named in {index})"
                )
            return [directory / name for name in shards]
    raise DataMissing(
        f"{directory} has no weights: no model.safetensors, no pytorch_model.bin and no index "
        "of shards"
    )


def _protected_weights(directory: Path) -> list[Path]:
    """The protected files that make up the model: no other, and all of them."""
    index, single = WEIGHT_FILES[0]
    there = os.path.isfile(directory / index)
    names = index_shards(directory / index) if there else [single]
    wanted = [directory / f"{name}{PROTECTED}" for name in names]
    present = protected_files(directory)
    if odd := sorted({*wanted} ^ {*present}):
        missing = odd[0] not in present
        raise DataMissing(
            f"{directory} lacks {odd[0].name}: copy it again"
            if missing
            else f"{odd[0]} is no part of this model: {index if there else single} has no such file"
        )
    return wanted


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a directory.

    Raises:
        DataMissing: it is not there, not a directory, not JSON, or lies beside what no model has.
    """
    if not os.path.lexists(directory):
        raise DataMissing(f"there is no directory {directory}")
    if not os.path.isdir(directory):
        raise DataMissing(f"{directory} is a file; a model is a directory with a config.json")
    if not os.path.isfile(directory / "config.json"):
        raise DataMissing(
            f"{directory} has no config.json, so it is not a model's directory (nor has it a "
            f"{PIPELINE_INDEX}, which names the parts of a pipeline)"
        )
    return _read_object(directory / "config.json")


def read_pipeline_index(directory: Path) -> dict[str, Any] | None:
    """model_index.json of a directory of several models; None where there is none.

    Raises:
        DataMissing: it is not JSON, or lies beside what no model has.
    """
    file = directory / PIPELINE_INDEX
    return _read_object(file) if os.path.isfile(file) else None


def _read_object(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(_text(file, *map(_changed, (file, file.parent))))
    except (ValueError, OSError, RecursionError) as error:
        raise DataMissing(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise DataMissing(f"{file} holds a {type(config).__name__}, not an object")
    return config


@lru_cache(maxsize=64)
def _text(file: Path, *_changes: tuple[int, ...]) -> str:
    """The text of a file in a model's directory, read once: a dozen rules of a plan ask for it."""
    refuse_odd_files(file.parent)
    return files.read_text(file)


def _changed(path: Path) -> tuple[int, ...]:
    """Numbers of which one changes when a file is written anew, or an entry of a directory."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def architecture_of(config: dict[str, Any]) -> str:
    """The model class that config.json names, or its model type."""
    return kind_of(config).architecture


def index_shards(index_file: Path) -> list[str]:
    """The file names in an index of shards, sorted.

    Raises:
        DataMissing: the index is not one.
    """
    try:
        weight_map = json.loads(files.read_text(index_file, limit_bytes=_INDEX_BYTES))["weight_map"]
        names = sorted(set(weight_map.values()))
        if not names:
            raise ValueError("it names no file")
        for name in names:
            if not isinstance(name, str) or not name.endswith((".safetensors", ".bin")):
                raise ValueError(f"{name!r:.60} is no weight file")
            if name != os.path.basename(name) or not name.isprintable():
                raise ValueError(f"{name!r:.60} is no file of this directory")
        return names
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataMissing(f"{index_file} is not an index of weight files: {error}") from error


# Weights on disk, read and written shard by shard so that memory stays bounded.
#
# Reading maps a file and hands out one tensor at a time (``.bin`` files through torch's restricted
# unpickler, which runs no code). Writing gathers tensors up to a size, then writes one safetensors
# file. Neither side ever holds the whole model.

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.(bin|safetensors)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A shard's entry of one tensor, without its values."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # torch's name: "float16"
    bytes: int


def source_files(directory: Path) -> list[Path]:
    """The weight files of a directory; a complete numbered set will do where an index is lost.

    Raises:
        DataMissing: there are none, or some of a set are not there.
    """
    try:
        return weight_files(directory)
    except DataMissing:
        numbered = [(f, _NUMBERED.fullmatch(f.name)) for f in sorted(directory.glob("*-of-*"))]
        shards = [(f, match) for f, match in numbered if match]
        if not shards or any(directory.glob("*.index.json")):
            raise
        suffix = ".safetensors" if any(f.suffix == ".safetensors" for f, _ in shards) else ".bin"
        shards = [(f, match) for f, match in shards if f.suffix == suffix]
        count = int(shards[0][1]["count"])
        missing = set(range(1, count + 1)) - {int(match["number"]) for _, match in shards}
        if missing:
            raise DataMissing(
                f"{directory} lacks weight files {sorted(missing)} of {count} "
                f"({shards[0][1]['stem']}-…{suffix})"
            ) from None
        return [f for f, _ in shards]


def inspect(files: list[Path]) -> dict[str, TensorInfo]:
    """Every tensor in the files, by name; no values are read.

    Raises:
        DataMissing: a file is truncated or not a weight file.
        BadConfiguration: two files hold the same tensor.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, tensor in open_shard(file).described():
            if name in tensors:
                raise BadConfiguration(f"{tensors[name].file} and {file} both hold {name}")
            tensors[name] = tensor
    return tensors


class Shard:
    """One open weight file: names, descriptions and tensors."""

    def __init__(self, file: Path, tensors: dict[str, Any], read: Callable[[str], torch.Tensor]):
        self._file, self._tensors, self._read = file, tensors, read

    def described(self) -> Iterator[tuple[str, TensorInfo]]:
        """Name and description of each tensor."""
        for name, (shape, dtype, size) in self._tensors.items():
            yield name, TensorInfo(file=self._file, shape=shape, dtype=dtype, bytes=size)

    def names(self) -> list[str]:
        """The tensors' names, in the file's order."""
        return list(self._tensors)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor; it may be a view into the mapped file."""
        return self._read(name)


def open_shard(file: Path) -> Shard:
    """Open a ``.safetensors`` or ``.bin`` file.

    Raises:
        DataMissing: it is truncated, or not what its name says.
    """
    try:
        with files.opened(file):  # which refuses what is no ordinary file
            pass
        return _open_safetensors(file) if file.suffix == ".safetensors" else _open_bin(file)
    except Exception as error:  # bytes from anywhere make the libraries raise anything
        text = str(error).strip() or type(error).__name__
        size = file.stat().st_size if os.path.isfile(file) else 0
        raise DataMissing(
            f"{file} ({size} bytes) cannot be read: {text.splitlines()[0][:200]}. "
            "It is truncated or not a weight file; fetch it again (with Git LFS: git lfs pull)"
        ) from error


def _open_safetensors(file: Path) -> Shard:
    import safetensors
    from safetensors import safe_open

    try:
        handle = safe_open(str(file), framework="pt")
        described = {}
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            part = handle.get_slice(name)
            dtype = _SAFETENSORS_TYPES.get(part.get_dtype(), str(part.get_dtype()).lower())
            shape = tuple(part.get_shape())
            described[name] = (shape, dtype, math.prod(shape) * _TYPE_BYTES.get(dtype, 1))
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
    return Shard(file, described, handle.get_tensor)


def _open_bin(file: Path) -> Shard:
    import torch

    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        state = torch.load(file, map_location="cpu", weights_only=True)  # pre-1.6 format
    if not isinstance(state, dict) or not all(torch.is_tensor(v) for v in state.values()):
        raise ValueError("it does not hold a plain dictionary of tensors")
    described = {
        name: (
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.numel() * tensor.element_size(),
        )
        for name, tensor in state.items()
    }
    return Shard(file, described, state.__getitem__)


_SAFETENSORS_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
}
_TYPE_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}


class ShardWriter:
    """Writes tensors into safetensors files of at most ``shard_bytes``, and their index."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        self._directory, self._limit = directory, shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor, which must own its memory (a view would keep a whole file alive)."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += size
        self.total_bytes += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        file = self._directory / f"shard-{len(self._shards)}.safetensors"
        save_file(self._pending, file, metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> list[str]:
        """Write what is left and the index; the names of the weight files."""
        if self._pending:
            self._flush()
        count = len(self._shards)
        if count == 1:
            names = ["model.safetensors"]
        else:
            names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for number, name in enumerate(names):
            (self._directory / f"shard-{number}.safetensors").rename(self._directory / name)
        if count > 1:
            placed = zip(self._shards, names, strict=True)
            weight_map = {tensor: name for shard, name in placed for tensor in shard}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        return names
