"""The files of a checkpoint's directory, looked at without loading any: is it all there?"""

from __future__ import annotations

import json
import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import Any

from workloads import files
from workloads.base import DataMissing
from workloads.models.checkpoint_kind import PIPELINE_INDEX, kind_of

#: Index of shards, and the single file it stands for.
WEIGHT_FILES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
#: Ending of a weight file that only a key opens (``protection.py``).
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
            found = entry.stat()
        except OSError:
            continue  # a link to nowhere: is anything of it needed, that is missing
        if stat.S_ISDIR(found.st_mode):
            continue
        try:
            with files.opened(entry):
                pass
        except PermissionError:
            continue
        except OSError as error:
            raise DataMissing(f"{entry} cannot be read: {error.strerror}") from error
        if entry.suffix in TEXT_FILES and found.st_size > _SIDE_FILE_BYTES:
            size = f"{found.st_size:,} bytes"
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
        protected: whether they may be protected ones (``protection.py``).

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
    found = protected_files(directory)
    if odd := sorted({*wanted} ^ {*found}):
        missing = odd[0] not in found
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
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


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
