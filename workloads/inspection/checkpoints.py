"""Files of a model's directory, read without loading the model: kind, configuration, tokenizer,
weight files. What is wrong with one is an ``Objection``, or an ``UnusableFile`` that carries it."""

from __future__ import annotations

import codecs
import json
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from workloads.base import DataMissing
from workloads.inspection.process import stage
from workloads.util import files

#: Index of a pipeline, whose models have a directory each.
PIPELINE_INDEX = "model_index.json"
#: (Index of shards, single file), in transformers' order.
_WEIGHT_FILES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
#: Ending of an encrypted weight file (``encryption.py``).
PROTECTED = ".protected"
#: Endings of the files beside the weights.
TEXT_FILES = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".md"})
#: Limits of such a file, and of a configuration or an index of shards: several times the largest.
SIDE_FILE_BYTES, _LISTING_BYTES = 256 * files.MIB, 64 * files.MIB
_SHARD = re.compile(r"[^/]+\.(safetensors|bin)")
_NUMBERED = re.compile(r".+-(?P<number>\d+)-of-(?P<count>\d+)(\.safetensors|\.bin)")
#: Remedy for a damaged file.
FETCH = "fetch it again (with Git LFS: git lfs pull)"


class Objection(NamedTuple):
    """A fault of a file in a model's directory, and the remedy."""

    file: str
    reason: str
    hint: str = ""


class UnusableFile(DataMissing):
    """A file that no library can use; the arguments are its path, the reason and the remedy."""

    def __init__(self, file: Path, reason: str, hint: str = "") -> None:
        super().__init__(file, reason, hint)
        self.objection = Objection(file.name, reason, hint)

    def __str__(self) -> str:
        file, reason, hint = self.args
        return f"{file} {reason.removeprefix('it ')}" + (f"; {hint}" if hint else "")


def read_object(file: Path, limit_bytes: int = SIDE_FILE_BYTES) -> dict[str, Any] | None:
    """Return a file's JSON object, None if there is no such file; raises UnusableFile."""
    if not os.path.isfile(file):
        return None
    stage(str(file))
    try:
        data = files.read_bytes(file, limit_bytes=limit_bytes)
        value = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        size = f"{file.stat().st_size:,} bytes"
        raise UnusableFile(
            file, f"it cannot be read as JSON ({size}): {text:.200}", FETCH
        ) from error
    if data.startswith(codecs.BOM_UTF8):
        reason = "it begins with a byte order mark, which libraries refuse"
        raise UnusableFile(file, reason, "save it without one")
    if not isinstance(value, dict):
        raise UnusableFile(file, f"it holds a {type(value).__name__}, not an object", FETCH)
    return value


# ---------------------------------------------------------------- configuration and tokenizer


def read_config(directory: Path) -> dict[str, Any]:
    """Return a directory's config.json; raises DataMissing, also as ``refuse_odd_files``."""
    if not os.path.lexists(directory):
        raise DataMissing(f"there is no directory {directory}")
    if not os.path.isdir(directory):
        raise DataMissing(f"{directory} is a file; a model is a directory with a config.json")
    refuse_odd_files(directory, directory.stat().st_mtime_ns)
    if (config := read_object(directory / "config.json", _LISTING_BYTES)) is not None:
        return config
    _refuse_no_files(directory, "config.json")
    other = _instead(directory)
    raise DataMissing(
        f"{directory} has no config.json, so it is not a model's directory "
        + (f"but {other}" if other else f"(nor has it a pipeline's {PIPELINE_INDEX})")
    )


@lru_cache(maxsize=64)
def refuse_odd_files(directory: Path, _changed_at_ns: int) -> None:
    """Raise DataMissing for pipes, devices and huge text files, on which loaders would hang; once
    for a directory that has not changed."""
    try:
        entries = [entry for entry in sorted(directory.iterdir()) if entry.exists()]
    except OSError:
        return  # reported by the actual read
    for entry in entries:  # without broken links: reported as missing if they are needed
        if entry.is_dir():
            continue
        try:
            with files.opened(entry) as content:
                size = content.seek(0, os.SEEK_END)
        except PermissionError:
            continue
        except OSError as error:
            raise DataMissing(f"{entry} cannot be read: {error.strerror}") from error
        if entry.suffix in TEXT_FILES and size > SIDE_FILE_BYTES:
            raise DataMissing(
                f"{entry} cannot be read: {size:,} bytes are too many for a {entry.suffix}"
            )


def _refuse_no_files(directory: Path, *names: str) -> None:
    """Raise DataMissing if a name is there and leads to no file: a broken link, a directory."""
    for path in (directory / name for name in names):
        if os.path.lexists(path) and not path.is_file():
            reason = files.no_file(path) or "it is a directory, not a file"
            raise DataMissing(f"{path} cannot be read: {reason}")


def side_files(directory: Path) -> list[Path]:
    """Return a directory's configurations and tokenizer files."""
    return [
        file
        for file in sorted(directory.iterdir())
        if file.suffix in (".json", ".model", ".txt", ".jinja")
        and not file.name.endswith(".index.json")
        and file.is_file()
    ]


# ---------------------------------------------------------------- weight files: are all there?


def protected_files(directory: Path) -> list[Path]:
    """Return a directory's encrypted weight files, by name."""
    return sorted(directory.glob(f"*.safetensors{PROTECTED}"))


def weight_files(directory: Path, *, protected: bool = False) -> list[Path]:
    """Return a checkpoint's weight files in transformers' order; ``protected`` allows encrypted.
    Raises DataMissing if there are none, or a shard of the index is missing."""
    if present := protected_files(directory):
        if not protected:
            raise DataMissing(
                f"the weights in {directory} are protected, and are read here in the clear only"
            )
        index, single = _WEIGHT_FILES[0]
        sharded = os.path.isfile(directory / index)
        shards = index_shards(directory / index) if sharded else [single]
        needed = [directory / f"{name}{PROTECTED}" for name in shards]
        for file in sorted({*needed} ^ {*present}):
            if file not in present:
                raise DataMissing(f"{directory} lacks {file.name}: copy it again")
            listing = index if sharded else single
            raise DataMissing(f"{file} is no part of this model: {listing} has no such file")
        return needed
    for index, single in _WEIGHT_FILES:
        if os.path.isfile(directory / single):
            return [directory / single]
        if os.path.isfile(directory / index):
            shards = index_shards(directory / index)
            if missing := [name for name in shards if not os.path.isfile(directory / name)]:
                names = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
                lacks = f"{directory} lacks {len(missing)} of its {len(shards)} weight files"
                raise DataMissing(f"{lacks}: {names} (named in {index})")
            return [directory / name for name in shards]
        _refuse_no_files(directory, single, index)
    other = _instead(directory)
    raise DataMissing(
        f"{directory} has no weights: no model.safetensors, no pytorch_model.bin and no index "
        "of shards" + (other and f"; it is {other}")
    )


#: Files of directories that are nearly models -> what they are, and what to write instead.
_NEARLY = (
    ("adapter_config.json", "an adapter (PEFT): name its base as `model:`, and it as `adapter:`"),
    ("checkpoint-*/config.json", "a trainer's output: name one of its checkpoint-… directories"),
    ("snapshots/*/config.json", "a repository of the hub's cache: name its org/name instead"),
    ("*/config.json", "a directory that holds models: name the one that is meant"),
    ("*.gguf", "a GGUF model: name the model that it was made from, in safetensors"),
    ("consolidated*", "Mistral's or Meta's own layout: name its Hugging Face repository instead"),
    ("*.distcp", "a distributed checkpoint of torch: convert it with dcp_to_torch_save"),
    ("pytorch_model_fsdp_*", "shards of FSDP: `accelerate merge-weights` makes model.safetensors"),
    ("global_step*", "a DeepSpeed checkpoint: its zero_to_fp32.py makes pytorch_model.bin"),
    ("*.nemo", "a NeMo model: convert it to Hugging Face's layout"),
    ("tf_model.h5", "a TensorFlow model: save it in safetensors, loaded with from_tf=True"),
    ("flax_model*.msgpack", "a Flax model: save it in safetensors, loaded with from_flax=True"),
    ("*.onnx", "an exported ONNX graph: name the model that it was made from"),
    ("openvino_model.xml", "an exported OpenVINO graph: name the model that it was made from"),
    ("weights*.npz", "an MLX model: name the model that it was converted from"),
    ("*.ckpt", "a Lightning checkpoint: save_pretrained() of its module makes a model's directory"),
    ("*.engine", "a TensorRT engine: name the model that it was made from"),
    ("*.incomplete", "an interrupted download: fetch it again"),
    ("*.part", "an interrupted download: fetch it again"),
    ("*-of-*.safetensors", "shards without their index: fetch model.safetensors.index.json, too"),
    ("*-of-*.bin", "shards without their index: fetch pytorch_model.bin.index.json, too"),
    ("*.safetensors", "weights under a name that no library looks for: call it model.safetensors"),
    ("*.pt*", "a file of torch.save under its own name: save_pretrained() makes model.safetensors"),
    ("*.bin", "weights under a name that no library looks for: call it pytorch_model.bin"),
)


def _instead(directory: Path) -> str:
    """Return what a directory is that is nearly a model's, with a remedy; "" if unknown."""
    for pattern, what in _NEARLY:
        if next(directory.glob(pattern), None) is not None:
            return what
    return ""


def unclear_weights(directory: Path) -> str:
    """Return why it is unclear which weights are meant; "" if it is not."""
    index, single = (directory / name for name in _WEIGHT_FILES[0])
    both = os.path.isfile(index) and os.path.isfile(single)
    others = [name for name in index_shards(index) if name != single.name] if both else []
    what = f"there are {single.name} and {index.name}, which names {len(others)} other files"
    return f"{what}: libraries differ in which they read" if others else ""


def index_shards(index_file: Path) -> list[str]:
    """Return the sorted file names of an index of shards; raises DataMissing if malformed."""
    placed = (read_object(index_file, _LISTING_BYTES) or {}).get("weight_map")
    names = list(placed.values()) if isinstance(placed, dict) else []
    odd = [n for n in names if not (_SHARD.fullmatch(str(n)) and str(n).isprintable())]
    if odd or not names:
        which = f"{odd[0]!r:.60} is no weight file of this directory" if odd else "it names no file"
        raise DataMissing(f"{index_file} is not an index of weight files: {which}")
    return sorted(set(names))


def source_files(directory: Path) -> list[Path]:
    """Return weight files, or a complete numbered set without an index; raises DataMissing."""
    try:
        return weight_files(directory)
    except DataMissing:
        listed = [(_NUMBERED.fullmatch(file.name), file) for file in sorted(directory.iterdir())]
        shards = {int(match["number"]): file for match, file in listed if match}
        if not shards or any(directory.glob("*.index.json")):
            raise
        count = int(next(match["count"] for match, _ in listed if match))
        if missing := sorted(set(range(1, count + 1)) - shards.keys()):
            raise DataMissing(f"{directory} lacks weight files {missing} of {count}") from None
        return [shards[number] for number in sorted(shards)]
