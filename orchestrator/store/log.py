"""Lines of JSON with a checksum: the log of the last seconds' rows, and the attempt journal.

    <sha256[:16] of the row> <the row as JSON, see codec.py>\\n

A row is safe when its line is synced; every few seconds the lines of ``rows/.rows-<writer>-<n>
.jsonl`` (plain readers skip dot files) move to a Parquet file. After a failed write a new log is
created, so a row may be in two files (``reader.ROW_KEY``). A crash can tear the last line, which
was never confirmed; any other checksum mismatch is damage.

The attempt journal (``begun.log``) has per running attempt the row that it gets if its driver dies.
It is replaced before attempts begin and not synced: a power failure may lose it. A dead driver's
stays until the next one has the rows of outcomes that nodes kept.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.core.errors import SchemaMismatch
from orchestrator.store import disk
from orchestrator.store.codec import line_of, row_in

_LOG = logging.getLogger("nightgrid.store")
_NAME = re.compile(r"\.rows-[0-9a-f]{16}-\d{1,9}\.jsonl")
_LARGEST_BYTES = 256 * 2**20  # of a foreign journal

Row = Mapping[str, Any]


def is_log(name: str) -> bool:
    """Return whether this is the name of a log of rows."""
    return bool(_NAME.fullmatch(name))


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
