"""Lines of JSON with a checksum: the log of the last seconds' rows, and the attempt journal.

    <sha256[:16] of the row> <the row as JSON, see codec.py>\\n

A row is safe when its line is synced; every few seconds the lines of ``rows/.rows-<writer>-<n>
.jsonl`` (plain readers skip dot files) move to a Parquet file. After a failed write a new log is
created, so a row may be in two files (``reader.ROW_KEY``). A crash can tear the last line, which
was never confirmed; any other checksum mismatch is damage.

The attempt journal (``begun.log``) has per running attempt the row that it gets if its driver dies.
It is replaced before attempts begin and not synced: a power failure may lose it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
import secrets
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.core.errors import SchemaMismatch
from orchestrator.store import disk
from orchestrator.store.codec import MAPS, from_table, line_of, row_in, row_of
from orchestrator.store.schema import RAW_TYPES, refuse_newer

_LOG = logging.getLogger("nightgrid.store")
_NAME = re.compile(r"\.rows-[0-9a-f]{16}-\d{1,9}\.jsonl")
_OLDER_NAME = re.compile(r"\.appended-(?:[0-9a-f]{16}-)?\d{1,9}\.arrows")
_LARGEST_BYTES = 256 * 2**20  # of a foreign journal

Row = Mapping[str, Any]


def is_log(name: str) -> bool:
    """Return whether this is the name of a log of rows, of this version or an earlier one."""
    return bool(_NAME.fullmatch(name) or _OLDER_NAME.fullmatch(name))


def rows_in_log(name: str, data: bytes) -> Iterator[Line]:
    """The lines of a log of this name, damaged ones included; may raise SchemaMismatch."""
    return _lines_in_older(data) if _OLDER_NAME.fullmatch(name) else lines_in(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a log, without its newline: its row, or the reason why it is damaged."""

    data: bytes
    row: Row | None = None
    reason: str = ""


def line_with(row: Row) -> bytes:
    """The line of a row, checksum and end included."""
    data = line_of(row)
    return b"%s %s\n" % (disk.digest(data).encode(), data)


def lines_in(data: bytes) -> Iterator[Line]:
    """Lines of a log without a torn last one; SchemaMismatch if a newer version wrote them."""
    *lines, _torn = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        checksum, _, text = line.partition(b" ")
        try:
            if checksum.decode("ascii", "replace") != disk.digest(text):
                raise ValueError("it does not match its checksum")
            yield Line(data=line, row=row_in(text))
        except SchemaMismatch:
            raise
        except (ValueError, RecursionError) as error:
            yield Line(data=line, reason=f"line {number}: {error}")


class RowLog:
    """The successive logs of one writer, each created at its first row; thread-safe.

    ``writer`` is 16 unique hexadecimal digits, drawn if left out.
    """

    def __init__(self, directory: Path, writer: str = "") -> None:
        self._directory = directory
        self._writer = writer or secrets.token_hex(8)
        self._number = 0  # of the newest log
        self._changing = threading.Lock()
        self._handle: int | None = None
        self._path = directory
        self._has_rows = False  # the log of now has rows that are safe

    def append(self, rows: Iterable[Row]) -> Path:
        """Append rows, which survive a power failure on return; repeat after an error.

        Raises StoreFull if no space is left, StoreError for other file system errors.
        """
        data = b"".join(map(line_with, rows))
        with self._changing:
            try:
                handle = self._new_log() if self._handle is None else self._handle
                disk.write_all(handle, data)
                disk.sync(handle)
                if not disk.has_name(handle, self._path):
                    raise OSError("it was removed by somebody else, with every row in it")
            except OSError as error:
                self._give_up()
                raise disk.write_error(self._path, error) from error
            self._has_rows = True
            return self._path

    def rotate(self) -> list[str]:
        """Close the log; return all names in its directory, now unchanging. May raise OSError."""
        with self._changing:
            if self._handle is not None and not disk.has_name(self._handle, self._path):
                _LOG.error("%s was removed by somebody else, with its rows", self._path)
            self._close()
            return sorted(disk.names(self._directory))

    def close(self) -> None:
        """End the log."""
        with self._changing:
            self._close()

    def _new_log(self) -> int:
        """A new log, open; its name survives a power failure."""
        self._number += 1
        self._path = self._directory / f".rows-{self._writer}-{self._number}.jsonl"
        self._handle, self._has_rows = disk.create_new(self._path), False
        disk.sync_directory(self._directory)
        return self._handle

    def _give_up(self) -> None:
        """Close a log after a failed write; remove it if it has no safe row, for full disks."""
        opened = self._handle is not None
        self._close()
        if opened and not self._has_rows:
            with contextlib.suppress(OSError):
                disk.remove(self._path)

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                disk.close(handle)


class AttemptJournal:
    """One driver's journal of running attempts (a few KB each), rewritten whenever some begin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[str, bytes] = {}  # of attempts that run, by attempt id
        self._changing = threading.Lock()  # rows may be written beside the loop that begins
        self._written = False

    def begin(self, rows: Iterable[Row]) -> None:
        """Record starting attempts; after StoreFull or StoreError, the next call writes them."""
        with self._changing:
            self._lines |= {str(row["attempt_id"]): line_with(row) for row in rows}
            data = b"".join(self._lines.values())
            disk.replace_file(self.path.parent, self.path.name, data)
            self._written = True

    def end(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts that have their rows, or need none."""
        with self._changing:
            for attempt_id in attempt_ids:
                self._lines.pop(attempt_id, None)

    def close(self, *, ours: bool) -> None:
        """Remove the journal's file if it is ours and all its attempts have rows."""
        if ours and self._written and not self._lines:
            with contextlib.suppress(OSError):
                disk.remove(self.path)


def read_journal(path: Path) -> list[Line]:
    """Lines of a journal, none if absent; OSError if unreadable, SchemaMismatch if newer."""
    try:
        return list(lines_in(disk.read(path, _LARGEST_BYTES)))
    except FileNotFoundError:
        return []


# ---------------------------------------------------------------- logs of earlier versions

# Killed drivers may have left ``.appended-*.arrows``. A record is columns of several rows as JSON,
# or an Arrow stream (``.arrow`` instead of ``.json``):
#
#     \n<job>-<attempt>-<sha256[:16]>.json <bytes>\n  <JSON>  \n<the same>\n
#
# The checksum includes the name before it.

_MARK = re.compile(
    rb"\n(?P<whose>[A-Za-z0-9_-]{1,100}-)(?P<digest>[0-9a-f]{16})\.(?P<kind>json|arrow) "
    rb"(?P<bytes>\d{1,10})\n"
)


def _lines_in_older(data: bytes) -> Iterator[Line]:
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
