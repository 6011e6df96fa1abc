"""Reader of earlier versions' logs (``.appended-*.arrows``), left only by killed drivers.

A record is columns of several rows as JSON, or an Arrow stream (``.arrow`` instead of ``.json``):

    \\n<job>-<attempt>-<sha256[:16]>.json <bytes>\\n  <JSON>  \\n<the same>\\n

The checksum includes the name before it.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from orchestrator.store import disk
from orchestrator.store.codec import MAPS, from_table, row_of
from orchestrator.store.log import Line, Row
from orchestrator.store.schema import RAW_TYPES, refuse_newer

_LOG = re.compile(r"\.appended-(?:[0-9a-f]{16}-)?\d{1,9}\.arrows")
_MARK = re.compile(
    rb"\n(?P<whose>[A-Za-z0-9_-]{1,100}-)(?P<digest>[0-9a-f]{16})\.(?P<kind>json|arrow) "
    rb"(?P<bytes>\d{1,10})\n"
)


def is_older_log(name: str) -> bool:
    """Return whether this is the name of an earlier version's log."""
    return _LOG.fullmatch(name) is not None


def lines_in_older(data: bytes) -> Iterator[Line]:
    """Convert an older log to current lines, damaged ones included; may raise SchemaMismatch."""
    at = sound_until = 0
    while mark := _MARK.search(data, at):
        end = mark.end() + int(mark["bytes"])
        record = data[mark.end() : end]
        if end > len(data) or disk.digest(mark["whose"] + record).encode() != mark["digest"]:
            at = mark.start() + 1
            continue
        if mark.start() > sound_until:
            yield Line(data=data[sound_until : mark.start()], reason=f"byte {sound_until:,}")
        at = sound_until = min(len(data), end + len(mark[0]))
        try:
            rows = _rows_in_json(record) if mark["kind"] == b"json" else _rows_in_stream(record)
            for row in rows:
                yield Line(data=record, row=row)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            yield Line(data=record, reason=f"a record of an earlier version: {error!r:.200}")
    rest = data[sound_until:]
    if any(mark.start() for mark in _MARK.finditer(rest)):  # else it is torn, and was never safe
        yield Line(data=rest, reason=f"byte {sound_until:,}")


def _rows_in_stream(data: bytes) -> list[Row]:
    import pyarrow as pa

    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        table = stream.read_all()
    table.validate(full=True)
    return [row_of(measurement) for measurement in from_table(table)]


def _rows_in_json(data: bytes) -> list[Row]:
    """Rows of a record of columns; SchemaMismatch if newer, other errors if it is invalid."""
    record = json.loads(data)
    refuse_newer(record["schema_version"], "a record")
    columns = record["columns"]
    rows: list[dict[str, Any]] = [{} for _ in columns["job_id"]]
    for name, column in columns.items():
        values = _raw_column(column) if name in RAW_TYPES else column
        for row, value in zip(rows, values, strict=True):
            if value is not None:
                row[name] = dict(value) if name in MAPS else value
    return list(rows)


def _raw_column(column: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Raw values of each row: their fields stand as columns of all rows' values."""
    fields = {
        name: _lists(values) if isinstance(values, dict) else values
        for name, values in column["values"].items()
    }
    records = zip(*fields.values(), strict=True)
    return [
        [
            {name: value for name, value in zip(fields, values, strict=True) if value is not None}
            for values in islice(records, count)
        ]
        for count in column["counts"]
    ]


def _lists(packed: Mapping[str, Any]) -> list[list[float]]:
    """Lists of numbers that were written together as base64 of little-endian doubles."""
    data = base64.b64decode(packed["doubles"])
    numbers = iter(struct.unpack(f"<{len(data) // 8}d", data))
    return [list(islice(numbers, count)) for count in packed["counts"]]
