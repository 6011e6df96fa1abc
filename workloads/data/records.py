"""Records of dataset files: JSON lines, a JSON list, CSV, TSV and Parquet; and of the hub.

A malformed record is an error that names file and line or record, since one that is skipped in
silence would make two runs on "the same" data differ.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads import files
from workloads.base import DataMissing
from workloads.data.shapes import BadExample

#: Lines longer than this many bytes are refused: no example is; a wrong file may be.
MAX_LINE_BYTES = 16 * 1024 * 1024
#: A JSON list is read at once.
MAX_LIST_BYTES = 2 * 1024**3
TABLES = {".csv": ",", ".tsv": "\t"}
#: Endings of files that are data, where a directory or a name has to be told from others.
ENDINGS = (".json", ".jsonl", ".parquet", *TABLES)

#: A record with its place, for messages.
Placed = tuple[str, Any]


def records(path: Path) -> Iterator[Placed]:
    """The records of a file, in order.

    Raises:
        DataMissing: it cannot be read.
        BadExample: a line is no JSON; the table has no columns.
    """
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix in TABLES:
            yield from _table(path)
        elif (first := _first_character(path)) == b"[":
            yield from _json_list(path)
        elif first in (b"{", b"") or path.suffix in ENDINGS:
            yield from _json_lines(path)
        else:
            raise BadExample(
                f"{path}: its name ends in none of {', '.join(ENDINGS)}, and it is no JSON"
            )
    except OSError as error:
        raise DataMissing(f"cannot read {path}: {error.strerror or error}") from error


def _json_lines(path: Path) -> Iterator[Placed]:
    with files.opened(path) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), 1):
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise BadExample(f"{where}: line longer than {MAX_LINE_BYTES:,} bytes")
            if line.strip():
                yield where, _json(line, where)


def _json_list(path: Path) -> Iterator[Placed]:
    found = _json(files.read_bytes(path, limit_bytes=MAX_LIST_BYTES), str(path))
    for number, record in enumerate(found, 1):
        yield f"{path}: example {number}", record


def _json(text: bytes, where: str) -> Any:
    wanted = 'one JSON object a line is expected, such as {"content": "…", "summary": "…"}'
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadExample(f"{where}: not UTF-8 (byte {error.start + 1}); {wanted}") from error
    except (ValueError, RecursionError) as error:
        told = str(error)
        if isinstance(error, json.JSONDecodeError) and error.lineno == 1:
            told = f"{error.msg}, column {error.colno}"
        raise BadExample(f"{where}: not JSON ({told}); {wanted}") from error


def _first_character(path: Path) -> bytes:
    with files.opened(path) as content:
        return content.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]


def _parquet(path: Path) -> Iterator[Placed]:
    import pyarrow
    from pyarrow import parquet

    try:
        with files.opened(path) as content, parquet.ParquetFile(content) as table:
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", record
    except pyarrow.ArrowException as error:
        raise BadExample(f"{path}: no Parquet file: {error}") from error


def _table(path: Path) -> Iterator[Placed]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with (
        files.opened(path) as content,
        io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text,
    ):
        comma = TABLES[path.suffix]
        table = csv.DictReader(text, delimiter=comma, strict=True)
        try:
            names = table.fieldnames or ()
            if len(names) == 1 and (other := next((c for c in ";\t,|" if c in names[0]), "")):
                raise BadExample(
                    f"{path}:1: the columns are divided by {other!r}; {path.suffix} wants {comma!r}"
                )
            for record in table:
                where = f"{path}:{table.line_num}"
                if None in record or None in record.values():
                    columns = ", ".join(table.fieldnames or ())
                    raise BadExample(f"{where}: not one value for each of the columns {columns}")
                yield where, record
        except (csv.Error, UnicodeDecodeError) as error:
            told = f"{path}:{table.line_num + 1}: {error}"
            if "unexpected end" in str(error):
                told += '; a field that begins with " ends with one, and "" stands for one inside'
            raise BadExample(told) from error
