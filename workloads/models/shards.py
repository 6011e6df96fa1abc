"""Weights on disk, read and written shard by shard so that memory stays bounded.

Reading maps a file and hands out one tensor at a time (``.bin`` files through torch's restricted
unpickler, which runs no code). Writing gathers tensors up to a size, then writes one safetensors
file. Neither side ever holds the whole model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads import files
from workloads.base import BadConfiguration, DataMissing
from workloads.models.checkpoint_files import weight_files

if TYPE_CHECKING:
    import torch

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
        found = [(f, match) for f, match in numbered if match]
        if not found or any(directory.glob("*.index.json")):
            raise
        suffix = ".safetensors" if any(f.suffix == ".safetensors" for f, _ in found) else ".bin"
        found = [(f, match) for f, match in found if f.suffix == suffix]
        count = int(found[0][1]["count"])
        missing = set(range(1, count + 1)) - {int(match["number"]) for _, match in found}
        if missing:
            raise DataMissing(
                f"{directory} lacks weight files {sorted(missing)} of {count} "
                f"({found[0][1]['stem']}-…{suffix})"
            ) from None
        return [f for f, _ in found]


def inspect(files: list[Path]) -> dict[str, TensorInfo]:
    """Every tensor in the files, by name; no values are read.

    Raises:
        DataMissing: a file is truncated or not a weight file.
        BadConfiguration: two files hold the same tensor.
    """
    found: dict[str, TensorInfo] = {}
    for file in files:
        for name, tensor in open_shard(file).described():
            if name in found:
                raise BadConfiguration(f"{found[name].file} and {file} both hold {name}")
            found[name] = tensor
    return found


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
            described[name] = (shape, dtype, _size(shape, dtype))
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


def _size(shape: tuple[int, ...], dtype: str) -> int:
    count = 1
    for side in shape:
        count *= side
    return count * _TYPE_BYTES.get(dtype, 1)


class ShardWriter:
    """Writes tensors into safetensors files of at most ``shard_bytes``, and their index."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        self._directory, self._limit = directory, shard_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = 0
        self._shards: list[list[str]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor, which must own its memory (a view would keep a whole file alive)."""
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self._limit:
            self._flush()
        self._held[name] = tensor
        self._held_bytes += size
        self.total_bytes += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        file = self._directory / f"shard-{len(self._shards)}.safetensors"
        save_file(self._held, file, metadata={"format": "pt"})
        self._shards.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def finish(self) -> list[str]:
        """Write what is left and the index; the names of the weight files."""
        if self._held:
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
