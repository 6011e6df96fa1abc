"""Records of dataset files and hub datasets, each with its place for messages.

A malformed record is an error: skipping it silently would make two runs on "the same" data differ.
No torch: plans read the first records.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from workloads.base import BadConfiguration, DataMissing
from workloads.util import files

#: Longer lines are refused: likely a wrong file.
MAX_LINE_BYTES = 16 * files.MIB
#: Limit of a JSON list, which is read at once.
MAX_LIST_BYTES = 2 * 1024**3
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
#: File endings of datasets.
ENDINGS = (".json", ".jsonl", ".parquet", *_SEPARATORS)
#: Files of an AdvertiseGen directory, in merge order.
ADVERTISEGEN_FILES = ("train.json", "dev.json")

#: A place, such as ``file:line``, and its record.
Placed = tuple[str, Any]


class BadExample(BadConfiguration):
    """An example does not have the shape of its file; retrying on another node does not help."""


def records(path: Path) -> Iterator[Placed]:
    """Yield the records of a file, of AdvertiseGen's files, or of a directory's one kind of file.

    Raises:
        DataMissing: it cannot be read, or the directory has no such file.
        BadConfiguration: malformed (BadExample), or the directory has several kinds of files.
    """
    try:
        for file in _data_files(path) if path.is_dir() else [path]:
            yield from _records(file)
    except OSError as error:
        raise DataMissing(
            f"cannot read {error.filename or path}: {error.strerror or error}"
        ) from error


def _data_files(directory: Path) -> list[Path]:
    if merged := [directory / n for n in ADVERTISEGEN_FILES if (directory / n).is_file()]:
        return merged
    there = sorted(file for file in directory.iterdir() if file.suffix in ENDINGS)
    if not there:
        raise DataMissing(
            f"dataset directory {directory} has neither {' nor '.join(ADVERTISEGEN_FILES)}, nor "
            f"another data file ({', '.join(ENDINGS)})"
        )
    if len({file.suffix for file in there}) > 1:
        names = ", ".join(file.name for file in there[:5])
        raise BadConfiguration(
            f"dataset directory {directory} has files of several kinds ({names}); name one of them"
        )
    return there


def _records(path: Path) -> Iterator[Placed]:
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix in _SEPARATORS:
        return _table(path)
    with files.opened(path) as content:
        first = content.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if first == b"[":
        return _json_list(path)
    if first in (b"{", b"") or path.suffix in ENDINGS:
        return _json_lines(path)
    raise BadExample(f"{path}: its name ends in none of {', '.join(ENDINGS)}, and it is no JSON")


def _json_lines(path: Path) -> Iterator[Placed]:
    with files.opened(path) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), 1):
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise BadExample(f"{where}: line longer than {MAX_LINE_BYTES:,} bytes")
            if line.strip():
                yield where, _json(line, where)


def _json_list(path: Path) -> Iterator[Placed]:
    content = _json(files.read_bytes(path, limit_bytes=MAX_LIST_BYTES), str(path))
    for number, record in enumerate(content, 1):
        yield f"{path}: example {number}", record


def _json(text: bytes, where: str) -> Any:
    expected = 'one JSON object a line is expected, such as {"content": "…", "summary": "…"}'
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadExample(f"{where}: not UTF-8 (byte {error.start + 1}); {expected}") from error
    except (ValueError, RecursionError) as error:
        message = str(error)
        if isinstance(error, json.JSONDecodeError) and error.lineno == 1:
            message = f"{error.msg}, column {error.colno}"
        raise BadExample(f"{where}: not JSON ({message}); {expected}") from error


def _parquet(path: Path) -> Iterator[Placed]:
    import pyarrow
    from pyarrow import parquet

    try:
        with files.opened(path) as content, parquet.ParquetFile(content) as table:
            batches = table.iter_batches(batch_size=1024)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, record in enumerate(rows, 1):
                yield f"{path}: row {number}", record
    except pyarrow.ArrowException as error:
        raise BadExample(f"{path}: no Parquet file: {error}") from error


def _table(path: Path) -> Iterator[Placed]:
    csv.field_size_limit(MAX_LINE_BYTES)
    separator = _SEPARATORS[path.suffix]
    with (
        files.opened(path) as content,
        io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text,
    ):
        table = csv.DictReader(text, delimiter=separator, strict=True)
        try:
            names = table.fieldnames or ()
            if len(names) == 1 and (other := next((c for c in ";\t,|" if c in names[0]), "")):
                raise BadExample(
                    f"{path}:1: the columns are divided by {other!r}; {path.suffix} wants "
                    f"{separator!r}"
                )
            for record in table:
                where = f"{path}:{table.line_num}"
                if None in record or None in record.values():
                    columns = ", ".join(names)
                    raise BadExample(f"{where}: not one value for each of the columns {columns}")
                yield where, record
        except (csv.Error, UnicodeDecodeError) as error:
            message = f"{path}:{table.line_num + 1}: {error}"
            if "unexpected end" in str(error):
                message += (
                    '; a field that begins with " ends with one, and "" stands for one inside'
                )
            raise BadExample(message) from error


def hub_records(
    name: str, split: str = "train", revision: str = "", subset: str = ""
) -> Iterator[Placed]:
    """Yield the records of a hub dataset's split, from the local cache or over the network.

    Code that comes with a dataset is never run: ``datasets`` dropped that in version 4.

    Args:
        split: in the syntax of ``datasets``, such as ``train[:1000]``.
        revision: a branch, tag or commit; "" is the newest.
        subset: its configuration; "" if it has only one.

    Raises:
        DataMissing: it cannot be loaded.
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
