"""Records of dataset files and hub datasets, each with its place for messages.

Files are streamed, so that memory holds a record and not a file. A damaged file is refused with the
place: leaving out what cannot be parsed would make two runs on "the same" data differ. No torch:
plans read what jobs will read.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from workloads.base import BadConfiguration, DataMissing
from workloads.util import files

#: Longer records are refused: likely a wrong file.
MAX_LINE_BYTES = 16 * files.MIB
#: Limit of a file that is one JSON object with the list of records inside, which is read at once.
MAX_OBJECT_BYTES = 256 * files.MIB
CHUNK_BYTES = files.MIB
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_ARROW = (".parquet", ".arrow")
#: File endings of datasets, and those that may follow them; upper case is as good.
ENDINGS = (".json", ".jsonl", ".ndjson", *_ARROW, *_SEPARATORS)
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
#: Files of an AdvertiseGen directory, in merge order.
ADVERTISEGEN_FILES = ("train.json", "dev.json")
#: What tools write beside data: datasets' save_to_disk, and downloads from the hub.
_BESIDE_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
#: What their ``map`` caches there.
_CACHED = re.compile(r"cache-[0-9a-f]{8,}.*\.arrow")
_SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}
#: Directories below a dataset's that are looked into, and most files of a dataset.
_DEPTH, _MOST_FILES = 3, 10_000

#: A place, such as ``file:line``, and its record.
Placed = tuple[str, Any]


class BadExample(BadConfiguration):
    """An example does not have the shape of its file; retrying on another node does not help."""


def ending_of(path: Path) -> str:
    """The ending that says what a file holds, in lower case and without that of a compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def records(path: Path, split: str = "train") -> Iterator[Placed]:
    """Yield the records of a file, or of a directory's files of a split; see ``data_files``. Raises
    DataMissing, and BadConfiguration for what is malformed (BadExample) or ambiguous."""
    try:
        for file in data_files(path, split) if path.is_dir() else [path]:
            yield from _records(file)
    except OSError as error:
        raise DataMissing(
            f"cannot read {error.filename or path}: {error.strerror or error}"
        ) from error


def data_files(directory: Path, split: str = "train") -> list[Path]:
    """Return a directory's data files in order: AdvertiseGen's two, or the split of those named by
    splits (the only one if there is no other and ``split`` is train), or all, if of one kind.

    Hidden files and those that tools leave beside data are none; if the directory itself has no
    data file, directories below it are looked into. Raises DataMissing without a data file, and
    BadConfiguration without such a split, for files of several kinds or datasets, and where train
    is wanted and only others are named by splits.
    """
    merged = [directory / n for n in ADVERTISEGEN_FILES if (directory / n).is_file()]
    if merged and split == "train" and all(map(_advertisegen, merged)):
        return merged
    there = _nearest(directory)
    if not there:
        raise DataMissing(
            f"dataset directory {directory} has neither {' nor '.join(ADVERTISEGEN_FILES)}, nor "
            f"another data file ({', '.join(ENDINGS)})"
        )
    by_split: dict[str, list[Path]] = {}
    for file in there:
        parts = reversed(file.relative_to(directory).parts)
        words = (word for part in parts for word in re.split(r"[^a-z]+", part.lower()))
        if name := next((_SPLITS[word] for word in words if word in _SPLITS), ""):
            by_split.setdefault(name, []).append(file)
    wanted = _SPLITS.get(split, split)
    named = sum(map(len, by_split.values()))
    if wanted == "train" and wanted not in by_split and 0 < named < len(there):
        names = ", ".join(file.name for file in there[:5])
        raise BadConfiguration(
            f"dataset directory {directory} has files with and without a split in their names "
            f"({names}); name one of them"
        )
    if wanted == "train" and len(by_split) == 1:
        wanted = next(iter(by_split))
    if by_split and wanted not in by_split:
        raise BadConfiguration(
            f"dataset directory {directory} has no split {split!r}; write split: "
            f"{' or '.join(sorted(by_split))}"
        )
    if not by_split and wanted != "train":
        raise BadConfiguration(
            f"dataset directory {directory} has no split {split!r}: none of its files is named "
            "after one; leave split out"
        )
    chosen = by_split.get(wanted, there)
    if len({ending_of(file) for file in chosen}) > 1:
        names = ", ".join(file.name for file in chosen[:5])
        raise BadConfiguration(
            f"dataset directory {directory} has files of several kinds ({names}); name one of them"
        )
    if len(parents := sorted({file.parent.name for file in chosen})) > 1:
        raise BadConfiguration(
            f"dataset directory {directory} has several datasets ({', '.join(parents[:5])}); name "
            "one of its directories"
        )
    return chosen


def _advertisegen(file: Path) -> bool:
    """Tell AdvertiseGen's files by the columns of the first record; others use its names, too."""
    _, record = next(_records(file), ("", None))
    return record is None or (isinstance(record, dict) and {"content", "summary"} <= record.keys())


def _nearest(directory: Path) -> list[Path]:
    """The data files of a directory, or of those below it at the least depth that has any."""
    level = [directory]
    for _ in range(_DEPTH + 1):
        there: list[Path] = []
        below: list[Path] = []
        for parent in level:
            with os.scandir(parent) as entries:
                for entry in entries:
                    if entry.name.startswith((".", "_")) or entry.name in _BESIDE_DATA:
                        continue
                    if _CACHED.fullmatch(entry.name):
                        continue
                    path = Path(entry.path)
                    if entry.is_dir():
                        below.append(path)
                    elif ending_of(path) in ENDINGS:
                        there.append(path)
            if len(there) + len(below) > _MOST_FILES:
                raise BadConfiguration(
                    f"{directory} holds more than {_MOST_FILES:,} files and directories; name the "
                    "dataset's own"
                )
        if there:
            return sorted(there)
        level = sorted(below)
    return []


def _records(path: Path) -> Iterator[Placed]:
    ending = ending_of(path)
    if ending in _ARROW:
        yield from _arrow(path)
        return
    try:
        with _content(path) as content:
            beginning = content.peek(4096)[:4096]
            if kind := files.other_kind(beginning):
                raise BadExample(f"{path}: it is {kind}")
            encoding = _encoding_of(beginning)
            if ending in _SEPARATORS:
                yield from _table(path, content, encoding, _SEPARATORS[ending])
                return
            first = beginning.decode(encoding, "ignore").lstrip("\ufeff \t\r\n")[:1]
            if first == "[":
                yield from _json_list(path, _pieces(path, content, encoding))
            elif first in ("{", "") or ending in ENDINGS:
                yield from _json_lines(path, content, encoding)
            else:
                raise BadExample(
                    f"{path}: its name ends in none of {', '.join(ENDINGS)}, and it is no JSON"
                )
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.filename:  # of the file, not of its content
            raise
        raise BadExample(f"{path}: damaged, or not compressed as its name says: {error}") from error


@contextmanager
def _content(path: Path) -> Iterator[io.BufferedReader]:
    """A file's bytes, without its compression."""
    with ExitStack() as stack:
        raw: BinaryIO = stack.enter_context(files.opened(path))
        match path.suffix.lower():
            case ".gz":
                raw = cast("BinaryIO", stack.enter_context(gzip.GzipFile(fileobj=raw)))
            case ".bz2":
                raw = cast("BinaryIO", stack.enter_context(bz2.BZ2File(raw)))
            case ".xz":
                raw = cast("BinaryIO", stack.enter_context(lzma.LZMAFile(raw)))
            case ".zst":
                import pyarrow

                raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
        if isinstance(raw, io.BufferedReader):
            yield raw
        else:
            yield stack.enter_context(io.BufferedReader(cast("io.RawIOBase", raw)))


def _encoding_of(beginning: bytes) -> str:
    """UTF-8, or UTF-16 by its byte-order mark (Excel and PowerShell write it) or without one by its
    first character, which is ASCII in JSON and in most tables."""
    if beginning[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if len(beginning) > 3 and 0 in beginning[:2] and any(beginning[:2]):
        return "utf-16-le" if beginning[0] else "utf-16-be"
    return "utf-8-sig"


def _pieces(path: Path, content: BinaryIO, encoding: str) -> Iterator[str]:
    decoder, read = codecs.getincrementaldecoder(encoding)(), 0
    while data := content.read(CHUNK_BYTES):
        try:
            yield decoder.decode(data)
        except UnicodeDecodeError as error:
            raise BadExample(_not_utf8(str(path), read + error.start)) from error
        read += len(data)


def _lines(path: Path, content: BinaryIO, encoding: str) -> Iterator[bytes]:
    """Yield a file's lines as UTF-8."""
    recoded = encoding != "utf-8-sig"
    text = io.TextIOWrapper(content, encoding=encoding) if recoded else None
    for number in itertools.count(1):
        try:
            if text is None:
                line = content.readline(MAX_LINE_BYTES + 1)
            else:
                line = text.readline(MAX_LINE_BYTES + 1).encode()
        except UnicodeError as error:
            raise BadExample(f"{path}:{number}: not UTF-16: {error}") from error
        if len(line) > MAX_LINE_BYTES:
            raise BadExample(f"{path}:{number}: line longer than {MAX_LINE_BYTES:,} bytes")
        if not line:
            return
        yield line


#: The beginning of a file that is one object around its records.
_AROUND = re.compile(rb'\s*\{\s*"(data|train|rows|examples|instances|items|records)"\s*:\s*\[\s*\{')


def _json_lines(path: Path, content: io.BufferedReader, encoding: str) -> Iterator[Placed]:
    if _AROUND.match(content.peek(4096)[:4096]):
        yield from _in_one_object(path, content.read(MAX_OBJECT_BYTES), str(path))
        return
    lines, name = _lines(path, content, encoding), str(path)
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        where = f"{name}:{number}"
        try:
            record = _json(line, where)
        except BadExample:
            if number > 1 or line.strip(b"\xef\xbb\xbf \t\r\n")[:1] != b"{":
                raise
            whole = bytearray(line)
            for line in lines:
                if len(whole) + len(line) > MAX_OBJECT_BYTES:
                    break
                whole += line
            yield from _in_one_object(path, bytes(whole), where)
            return
        yield where, record


def _in_one_object(path: Path, text: bytes, where: str) -> Iterator[Placed]:
    """The records of a file that is one JSON object with one list of objects, as some tools
    write."""
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        _json(text.split(b"\n", 1)[0], where)  # it is no line either: say so
        _json(text, where)
        raise
    lists = {
        name: entries
        for name, entries in value.items()
        if isinstance(entries, list) and entries and all(isinstance(one, dict) for one in entries)
    }
    if len(lists) != 1:
        raise BadExample(
            f"{path}: one JSON object with {', '.join(map(str, value)):.200}; expected a list of "
            "objects, or one object a line"
        )
    (name,) = lists
    for number, record in enumerate(lists[name], 1):
        yield f"{path}: example {number} of {name!r}", record


_SPACE = re.compile(r"[ \t\r\n]*")


def _json_list(path: Path, pieces: Iterator[str]) -> Iterator[Placed]:
    """The entries of a JSON list, of which memory holds a few pieces at a time."""
    decoder, name = json.JSONDecoder(), str(path)
    text, at, line, number = next(pieces, ""), 0, 1, 0
    at = text.index("[") + 1
    closed = False
    comma = True  # whether an entry may come: after a comma, or at the beginning
    while True:
        begin, at = at, _SPACE.match(text, at).end()  # type: ignore[union-attr]
        line += text.count("\n", begin, at)
        if at == len(text):
            if (piece := next(pieces, None)) is None:
                break
            text, at = piece, 0
            continue
        where = f"{name}:{line}: example {number + 1}"
        if closed:
            raise BadExample(f"{path}:{line}: something stands behind the list")
        if text[at] == "]" and (not comma or not number):
            closed, at = True, at + 1
            continue
        if not comma:
            if text[at] != ",":
                raise BadExample(f"{where}: not JSON (no comma before it)")
            comma, at = True, at + 1
            continue
        problem = ""
        try:
            record, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            end = len(text)
            problem = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        # What ends where the text does may go on, as 1 does in 1e-5. Twice the text each time
        # keeps this linear.
        if len(text) - end < len("e-5") and (piece := next(pieces, None)) is not None:
            text, part, at = text[at:] + piece, len(text) - at, 0
            while len(text) < 2 * part and (piece := next(pieces, None)) is not None:
                text += piece
            if part > MAX_LINE_BYTES:
                raise BadExample(f"{where}: longer than {MAX_LINE_BYTES:,} bytes, or {problem}")
            continue
        if problem:
            raise BadExample(f"{where}: not JSON ({problem})")
        yield where, record
        line += text.count("\n", at, end)
        number, at, comma = number + 1, end, False
    if not closed:
        raise BadExample(f"{path}:{line}: the list does not end; the file is cut off")


def _json(text: bytes, where: str) -> Any:
    expected = 'one JSON object a line is expected, such as {"content": "…", "summary": "…"}'
    try:
        return json.loads(text.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        raise BadExample(f"{_not_utf8(where, error.start)}; {expected}") from error
    except (ValueError, RecursionError) as error:
        message = str(error)
        if isinstance(error, json.JSONDecodeError) and error.lineno == 1:
            message = f"{error.msg}, column {error.colno}"
        raise BadExample(f"{where}: not JSON ({message}); {expected}") from error


def _not_utf8(where: str, byte: int, likely: str = "GBK") -> str:
    remedy = f"save it as UTF-8 (iconv -f {likely} -t UTF-8, say)"
    return f"{where}: not UTF-8 (byte {byte + 1}); {remedy}"


def _arrow(path: Path) -> Iterator[Placed]:
    """Rows of a Parquet file, or of an Arrow file or stream, as ``datasets`` saves."""
    import pyarrow

    try:
        with files.opened(path) as content:
            rows = chain.from_iterable(b.to_pylist() for b in _batches(content, ending_of(path)))
            for number, record in enumerate(rows, 1):
                yield f"{path}: row {number}", record
    except OverflowError as error:
        reason = f"a value is beyond Python's, such as a date after the year 9999 ({error})"
        raise BadExample(f"{path}: {reason}") from error
    except pyarrow.ArrowException as error:
        kind = "Parquet" if ending_of(path) == ".parquet" else "Arrow"
        raise BadExample(f"{path}: no {kind} file: {error}") from error


def _batches(content: BinaryIO, ending: str) -> Iterator[Any]:
    import pyarrow
    from pyarrow import ipc, parquet

    if ending == ".parquet":
        with parquet.ParquetFile(content) as table:
            yield from table.iter_batches(batch_size=1024)
        return
    try:
        stream = ipc.open_stream(content)
    except pyarrow.ArrowInvalid:
        content.seek(0)
        file = ipc.open_file(content)
        yield from map(file.get_batch, range(file.num_record_batches))
    else:
        yield from stream


def _table(path: Path, content: BinaryIO, encoding: str, separator: str) -> Iterator[Placed]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with io.TextIOWrapper(content, encoding=encoding, newline="") as text:
        table = csv.DictReader(text, delimiter=separator, strict=True)
        try:
            table.fieldnames = names = [name.strip() for name in table.fieldnames or ()]
            if len(names) == 1 and (other := next((c for c in ";\t,|" if c in names[0]), "")):
                raise BadExample(
                    f"{path}:1: the columns are divided by {other!r}; {ending_of(path)} wants "
                    f"{separator!r}"
                )
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise BadExample(f"{path}:1: two columns are named {twice!r:.60}; rename one")
            for record in table:
                where = f"{path}:{table.line_num}"
                if None in record or None in record.values():
                    columns = ", ".join(names)
                    raise BadExample(f"{where}: not one value for each of the columns {columns}")
                yield where, record
        except UnicodeDecodeError as error:
            with _content(path) as lines:  # the decoder reads ahead of the table's line
                for number, line in enumerate(lines, 1):
                    try:
                        line.decode(encoding)
                    except UnicodeDecodeError as wrong:
                        where = f"{path}:{number}"
                        raise BadExample(_not_utf8(where, wrong.start, "CP1252")) from error
            raise BadExample(f"{path}: {error}") from error
        except csv.Error as error:
            message = f"{path}:{table.line_num + 1}: {error}"
            if "unexpected end" in str(error):
                message += (
                    '; a field that begins with " ends with one, and "" stands for one inside'
                )
            raise BadExample(message) from error


def hub_records(
    name: str, split: str = "train", revision: str = "", subset: str = ""
) -> Iterator[Placed]:
    """Yield the records of a hub dataset's split, from the local cache or over the network; raises
    DataMissing.

    Code that comes with a dataset is never run: ``datasets`` dropped that in version 4. ``split``
    is in its syntax, such as ``train[:1000]``; "" is the newest ``revision``, and the only
    ``subset`` (configuration).
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        table: Any = datasets.load_dataset(
            name, subset or None, split=split, revision=revision or None
        )
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataMissing(
            f"dataset {name} of the Hugging Face hub, split {split}: {error}; if a path was meant, "
            "there is no such path on this node"
        ) from error
    for number, record in enumerate(table, 1):
        yield f"{name}: example {number}", record
