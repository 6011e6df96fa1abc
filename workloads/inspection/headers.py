"""Headers of weight files: names, shapes and types of tensors, without their values.

A ``.safetensors`` file begins with the length of a JSON header (8 bytes, little-endian), the header
with each tensor's type, shape and place, and then the values without a gap. A ``.bin`` file is a
zip archive with a pickle of names and shapes, read here by an unpickler that knows five names. A
file that says something else is named for what it is.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from workloads.base import BadConfiguration, DataMissing
from workloads.inspection.checkpoints import FETCH, UnusableFile
from workloads.inspection.process import stage
from workloads.util import files

#: Limit of a header, as in the safetensors library.
HEADER_BYTES = 100_000_000
_PICKLE_BYTES = 64 * files.MIB
#: Most tensors and dimensions that a file may declare.
_MOST_TENSORS, _MOST_DIMENSIONS = 1_000_000, 16
_ZIP = b"pk\x03\x04"
#: In the first bytes, in lower case, of what torch before 1.6 saved.
_BEFORE_1_6 = b"l\xfc\x9cf\xf9 j\xa8p\x19"
#: First bytes, in lower case, of what is no weight file -> what it is, and the remedy.
_OTHER_WEIGHTS = (
    (b"gguf", "a GGUF file: name the model that it was made from, in safetensors"),
    (b"\x89hdf", "an HDF5 file of Keras: convert it to safetensors"),
    (_ZIP, "a file of torch.save: call it pytorch_model.bin"),
)
_NAMES = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint", "C": "complex"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A weight file's entry of one tensor, without its values."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # torch's name, e.g. "float16"

    @property
    def bytes(self) -> int:
        """Bytes of its values, by the number of bits in its type's name (bool has 8)."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


def describe_tensors(weights: Iterable[Path]) -> dict[str, TensorInfo]:
    """Return every tensor's header in weight files, by name; no values are read. Raises as
    ``read_header``, and BadConfiguration if two files hold the same tensor."""
    tensors: dict[str, TensorInfo] = {}
    for file in weights:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise BadConfiguration(f"{tensors[name].file} and {file} both hold {name}")
            tensors[name] = tensor
    return tensors


class OldFormat(DataMissing):
    """A file in the format before torch 1.6, which libraries load and nothing here reads."""


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a weight file by name, in file order. Raises DataMissing for a damaged
    file, and OldFormat."""
    size = 0
    stage(str(file))
    try:
        with files.opened(file) as content:  # refuses anything but regular files
            content.seek(0, 2)
            size = content.tell()
            content.seek(0)
            beginning = content.read(32).lower()
            content.seek(0)
            if size == 0:
                raise ValueError("it is empty")
            if not beginning.strip(b"\0"):
                raise ValueError("it begins with zeros, as a file does whose copy was interrupted")
            if file.suffix == ".safetensors" or not beginning.startswith(_ZIP):
                own = (what for magic, what in _OTHER_WEIGHTS if beginning.startswith(magic))
                if kind := next(own, "") or files.other_kind(beginning):
                    raise ValueError(f"it is {kind}")
            if file.suffix == ".safetensors":
                return _safetensors_header(file, content, size)
            if zipfile.is_zipfile(content):
                return _zip_header(file, content)
            if beginning.startswith(_ZIP):
                raise ValueError("it is a zip archive without its end")
            if _BEFORE_1_6 in beginning:
                raise OldFormat(f"{file} is in the format before torch 1.6: load it and save it")
            raise ValueError("it is no file of torch.save")
    except OldFormat:
        raise
    except Exception as error:  # arbitrary bytes make the libraries raise anything
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UnusableFile(file, f"it cannot be read ({size:,} bytes): {why}", FETCH) from error


def _safetensors_header(file: Path, content: BinaryIO, size: int) -> dict[str, TensorInfo]:
    length = int.from_bytes(content.read(8), "little")
    if size < 10 or not 2 <= length <= size - 8:
        raise ValueError(f"its header would be {length:,} bytes long")
    if length > HEADER_BYTES:
        raise ValueError(f"its header of {length:,} bytes is longer than {HEADER_BYTES:,}")
    header = json.loads(content.read(length), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    if len(header) > _MOST_TENSORS:
        raise ValueError(f"its header names {len(header):,} tensors")
    tensors = {name: _declared(file, name, entry) for name, entry in header.items()}
    places = sorted((*header[name]["data_offsets"], name) for name in header)
    end = 0
    for start, stop, name in places:
        if start != end:
            wrong = "overlaps another tensor" if start < end else "leaves a gap before it"
            raise ValueError(f"{name} {wrong}")
        if stop - start != tensors[name].bytes:
            raise ValueError(f"{name} has {stop - start:,} bytes and needs {tensors[name].bytes:,}")
        end = stop
    if end != size - 8 - length:
        raise ValueError(f"its tensors take {end:,} bytes, and it has {size - 8 - length:,}")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("its header names a tensor twice")
    return values


def _declared(file: Path, name: str, entry: Any) -> TensorInfo:
    try:
        shape, stored = tuple(entry["shape"]), str(entry["dtype"])
        start, stop = entry["data_offsets"]
        if len(shape) > _MOST_DIMENSIONS or len(stored) > 20:
            raise ValueError
        if any(type(number) is not int or number < 0 for number in (*shape, start, stop)):
            raise ValueError
    except (TypeError, ValueError, LookupError) as error:
        raise ValueError(f"its entry of {name:.80} is not that of a tensor") from error
    plain = re.fullmatch(r"(F|BF|I|U|C)(\d+)", stored)
    dtype = f"{_NAMES[plain[1]]}{plain[2]}" if plain else stored.lower()
    return TensorInfo(file=file, shape=shape, dtype=dtype)


# ---------------------------------------------------------------- files of torch.save


class _Stored(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


_KINDS = "Double Float Half BFloat16 Long Int Short Char Byte Bool Untyped"
_TYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint8"
#: Storage of torch -> type of its values.
_STORAGES = dict(zip(_KINDS.split(), _TYPES.split(), strict=True))


class _Names(pickle.Unpickler):
    """Reads the pickle of a dictionary of tensors; any other class is refused, none is built."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, *rest: _Stored(storage, tuple(size))
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *rest: tensor
        if module in ("torch", "torch.storage") and name.removesuffix("Storage") in _STORAGES:
            return _STORAGES[name.removesuffix("Storage")]
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid[1]  # ("storage", type, key, location, size)


def _zip_header(file: Path, content: BinaryIO) -> dict[str, TensorInfo]:
    with zipfile.ZipFile(content) as archive:
        entries = {info.filename.rpartition("/")[2]: info for info in archive.infolist()}
        if "data.pkl" not in entries:
            raise ValueError("it is a zip archive without the data.pkl of torch.save")
        if entries["data.pkl"].file_size > _PICKLE_BYTES:
            raise ValueError(f"its data.pkl is larger than {_PICKLE_BYTES // files.MIB} MiB")
        with archive.open(entries["data.pkl"]) as pickled:
            state = _Names(pickled).load()
    if not isinstance(state, dict) or not all(isinstance(v, _Stored) for v in state.values()):
        raise ValueError("it does not hold a plain dictionary of tensors")
    return {
        str(name): TensorInfo(file=file, shape=stored.shape, dtype=stored.dtype)
        for name, stored in state.items()
    }
