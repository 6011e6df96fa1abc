"""Files of a model's directory, read without loading the model: kind, configuration, tokenizer,
weight files and their headers. Torch is imported only for ``.bin`` files and tensor values."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.base import DataMissing
from workloads.util import files

if TYPE_CHECKING:
    pass

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
#: Limit of such a file, and of an index: ten times the largest tokenizers.
SIDE_FILE_BYTES = 256 * files.MIB
#: Files of which one makes a tokenizer.
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt"),
    *("sentencepiece.bpe.model", "spm.model", "tekken.json", "tiktoken.model", "source.spm"),
)
_MODEL_FILES = (".json", ".model", ".safetensors", PROTECTED, ".bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointKind:
    """Classes and family that a checkpoint declares."""

    architecture: str  # class that it was saved from, or the pipeline's
    model_type: str = ""  # transformers' family name
    encoder_decoder: bool = False
    pipeline: bool = False  # several models


def kind_of(content: Mapping[str, Any]) -> CheckpointKind:
    """Return a checkpoint's kind by its config.json, or a pipeline's by its model_index.json."""
    if is_pipeline_index(content):
        return CheckpointKind(architecture=str(content["_class_name"]), pipeline=True)
    named = content.get("architectures")
    first = named[0] if isinstance(named, list) and named else content.get("model_type")
    return CheckpointKind(
        architecture=str(first or "unknown"),
        model_type=str(content.get("model_type") or ""),
        encoder_decoder=content.get("is_encoder_decoder") is True,
    )


def is_pipeline_index(content: Mapping[str, Any]) -> bool:
    """Tell a model_index.json from a config.json by its parts, [library, class] each."""
    parts = ("scheduler", "unet", "transformer", "vae")
    return "_class_name" in content and any(isinstance(content.get(p), list) for p in parts)


# ---------------------------------------------------------------- configuration and tokenizer


def read_config(directory: Path) -> dict[str, Any]:
    """Return a directory's config.json; raises DataMissing, also as ``refuse_odd_files``."""
    if not os.path.lexists(directory):
        raise DataMissing(f"there is no directory {directory}")
    if not os.path.isdir(directory):
        raise DataMissing(f"{directory} is a file; a model is a directory with a config.json")
    if not os.path.isfile(directory / "config.json"):
        other = _instead(directory)
        raise DataMissing(
            f"{directory} has no config.json, so it is not a model's directory "
            + (f"but {other}" if other else f"(nor has it a pipeline's {PIPELINE_INDEX})")
        )
    return _read_object(directory / "config.json")


def read_pipeline_index(directory: Path) -> dict[str, Any] | None:
    """Return a pipeline's model_index.json; None if there is none. Raises as ``read_config``."""
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
    """Return a file's text, cached: a dozen rules of a plan read it."""
    refuse_odd_files(file.parent)
    return files.read_text(file)


def _changed(path: Path) -> tuple[int, ...]:
    """Return a key that changes when a file or a directory's entries do."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def refuse_odd_files(directory: Path) -> None:
    """Raise DataMissing for pipes, devices and huge text files, on which loaders would hang."""
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return  # reported by the actual read
    for entry in entries:
        try:
            status = entry.stat()
        except OSError:
            continue  # a broken link: reported as missing if it is needed
        if stat.S_ISDIR(status.st_mode):
            continue
        try:
            with files.opened(entry):
                pass
        except PermissionError:
            continue
        except OSError as error:
            raise DataMissing(f"{entry} cannot be read: {error.strerror}") from error
        if entry.suffix in TEXT_FILES and status.st_size > SIDE_FILE_BYTES:
            size = f"{status.st_size:,} bytes"
            raise DataMissing(f"{entry} cannot be read: {size} are too many for a {entry.suffix}")


def side_files(directory: Path) -> list[Path]:
    """Return a directory's configurations and tokenizer files."""
    return [
        file
        for file in sorted(directory.iterdir())
        if file.suffix in (".json", ".model", ".txt", ".jinja")
        and not file.name.endswith(".index.json")
        and file.is_file()
    ]


def has_tokenizer(directory: Path) -> bool:
    """Tell if a model's directory has any tokenizer file."""
    return any((directory / name).is_file() for name in _TOKENIZERS)


def no_tokenizer(directory: str, kind: CheckpointKind) -> tuple[str, str]:
    """Return the message for a missing tokenizer, and the remedy."""
    glm = kind.model_type in ("glm", "chatglm")
    return f"{directory} has no tokenizer", (
        "put ChatGLM3's tokenizer.model beside its weights and convert again"
        if glm
        else "put tokenizer.json, or the files it is made of, of the model's own repository there"
    )


def mask_token(directory: Path) -> str | None:
    """Return the mask token in a tokenizer's files, "" if they name none; None without files."""
    token = None
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (directory / name).is_file() and not token:
            token = _mask_token(directory / name)
    return token


def _mask_token(file: Path) -> str:
    try:
        token = json.loads(file.read_text(encoding="utf-8")).get("mask_token")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(token.get("content") or "") if isinstance(token, dict) else str(token or "")


# ---------------------------------------------------------------- weight files: are all there?


def protected_files(directory: Path) -> list[Path]:
    """Return a directory's encrypted weight files, by name."""
    return sorted(directory.glob(f"*.safetensors{PROTECTED}"))


def weight_files(directory: Path, *, protected: bool = False) -> list[Path]:
    """Return a checkpoint's weight files in transformers' order; ``protected`` allows encrypted.

    Raises:
        DataMissing: there are none, or a shard of the index is missing.
    """
    if present := protected_files(directory):
        if protected:
            return _protected_weights(directory, present)
        raise DataMissing(
            f"the weights in {directory} are protected, and are read here in the clear only"
        )
    for index, single in _WEIGHT_FILES:
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
    if not (os.path.isfile(index) and os.path.isfile(single)):
        return ""
    others = [name for name in index_shards(index) if name != single.name]
    if not others:
        return ""
    return (
        f"there are {single.name} and {index.name}, which names {len(others)} other files: "
        "libraries differ in which they read"
    )


def _protected_weights(directory: Path, present: list[Path]) -> list[Path]:
    """Return exactly the encrypted files that make up the model."""
    index, single = _WEIGHT_FILES[0]
    sharded = os.path.isfile(directory / index)
    names = index_shards(directory / index) if sharded else [single]
    needed = [directory / f"{name}{PROTECTED}" for name in names]
    for file in sorted({*needed} ^ {*present}):
        if file not in present:
            raise DataMissing(f"{directory} lacks {file.name}: copy it again")
        listing = index if sharded else single
        raise DataMissing(f"{file} is no part of this model: {listing} has no such file")
    return needed


def index_shards(index_file: Path) -> list[str]:
    """Return the sorted file names of an index of shards; raises DataMissing if malformed."""
    try:
        text = files.read_text(index_file, limit_bytes=SIDE_FILE_BYTES)
        names = sorted(set(json.loads(text)["weight_map"].values()))
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


def source_files(directory: Path) -> list[Path]:
    """Return weight files, or a complete numbered set without an index; raises DataMissing."""
    try:
        return weight_files(directory)
    except DataMissing:
        if any(directory.glob("*.index.json")):
            raise
        for suffix in (".safetensors", ".bin"):
            numbered = re.compile(rf"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\{suffix}")
            listed = [(f, numbered.fullmatch(f.name)) for f in sorted(directory.glob("*-of-*"))]
            shards = {file: match for file, match in listed if match}
            if not shards:
                continue
            first = next(iter(shards.values()))
            there = {int(match["number"]) for match in shards.values()}
            count = int(first["count"])
            if missing := set(range(1, count + 1)) - there:
                raise DataMissing(
                    f"{directory} lacks weight files {sorted(missing)} of {count} "
                    f"({first['stem']}-…{suffix})"
                ) from None
            return list(shards)
        raise


def fingerprint(directory: Path) -> str:
    """Return a digest of a model's path and its files' names, sizes and times."""
    digest = hashlib.sha256(str(directory.resolve()).encode())
    for name, file in _model_files(directory):
        status = file.stat()
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def content_digest(directory: Path) -> str:
    """Return a digest of the content of a model's files, equal on all nodes. Reads all of them."""
    digest = hashlib.sha256()
    for name, file in _model_files(directory):
        digest.update(f"{name} {file.stat().st_size}\n".encode())
        with file.open("rb") as content:
            while block := content.read(files.MIB):
                digest.update(block)
    return digest.hexdigest()[:16]


def _model_files(directory: Path) -> list[tuple[str, Path]]:
    """Return the files of a model, or of a pipeline's models, by relative name."""
    several = read_pipeline_index(directory) is not None
    paths = directory.glob("**/*" if several else "*")
    models = sorted(path for path in paths if path.suffix in _MODEL_FILES and path.is_file())
    return [(file.relative_to(directory).as_posix(), file) for file in models]
