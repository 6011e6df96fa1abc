"""Lines of JSON with a checksum: the log of the last seconds' rows, and the attempt journal.

    <sha256[:16] of the row> <the row as JSON, see codec.py>\\n

A row is safe when its line is synced (``RowLog.append``); every few seconds the lines become a
Parquet file, and the log goes. Files of logs are

    rows/.rows-<writer>-<n>.jsonl        plain readers skip a name with a point

No name is used twice, and a writer never goes on in a log that another one left, nor after a failed
write: it creates a new one. So a row may stand in two logs, or in a log and in Parquet; readers
know a row by its identity (``reader.ROW_KEY``) and take it once. A crash can tear the last line,
which was never confirmed as safe; any other line that does not match its checksum is damaged.

The attempt journal (``begun.log``) has the same lines: for each attempt that runs now the row that
it gets should its driver die. It is replaced before attempts begin and not synced: a power failure
may take lines, and then nobody has heard of their attempts.
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
    """Tell if a file of this name is a log of rows."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a log: a row, or bytes that are none.

    Attributes:
        data: the line, without its end.
        row: in it; None for a damaged line.
        reason: why it is damaged.
    """

    data: bytes
    row: Row | None = None
    reason: str = ""


def line_with(row: Row) -> bytes:
    """The line of a row, checksum and end included."""
    data = line_of(row)
    return b"%s %s\n" % (disk.digest(data).encode(), data)


def lines_in(data: bytes) -> Iterator[Line]:
    """The lines of a log, less a torn one at its end.

    Raises:
        SchemaMismatch: a newer version wrote them.
    """
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
    """The logs that one writer appends to, one after the other; each is created at its first row.

    Two threads may use it: one appends while another puts the rows of ended logs into Parquet.

    Args:
        directory: of the run's rows.
        writer: 16 hexadecimal digits that no other writer has; drawn if left out.
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
        """Write rows at the end; when this returns, they survive a power failure. After an error
        they may stand there or not, and can be appended again.

        Raises:
            StoreFull: no space is left.
            StoreError: anything else the file system says.
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
        """End the log; the names in its directory, to none of which this writer adds anything.

        Raises:
            OSError: the directory cannot be listed.
        """
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
        """End a log that could not be written or synced: it is not to be trusted with more. One
        without any safe row is removed, else a full disk would get another one at each try."""
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
    """The journal of one driver, which starts it from scratch. The file is replaced whole each time
    that attempts begin: it has those that run then, a few kilobytes each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[str, bytes] = {}  # of attempts that run, by attempt id
        self._changing = threading.Lock()  # rows may be written beside the loop that begins
        self._written = False

    def begin(self, rows: Iterable[Row]) -> None:
        """Write down attempts that begin, by the rows that they get should this process die. Lines
        that find no room are in the file with the next ones.

        Raises:
            StoreFull: no space is left.
            StoreError: they cannot be written.
        """
        with self._changing:
            self._lines |= {str(row["attempt_id"]): line_with(row) for row in rows}
            data = b"".join(self._lines.values())
            disk.replace_file(self.path.parent, self.path.name, data)
            self._written = True

    def end(self, attempt_ids: Iterable[str]) -> None:
        """These attempts have their rows, or are not to have one."""
        with self._changing:
            for attempt_id in attempt_ids:
                self._lines.pop(attempt_id, None)

    def close(self, *, ours: bool) -> None:
        """End the journal. Its file goes unless it has attempts without a row, or is not ours any
        more."""
        if ours and self._written and not self._lines:
            with contextlib.suppress(OSError):
                disk.remove(self.path)


def read_journal(path: Path) -> list[Line]:
    """The lines of a journal; none if there is no such file.

    Raises:
        OSError: it is there and cannot be read.
        SchemaMismatch: a newer version wrote it.
    """
    try:
        return list(lines_in(disk.read(path, _LARGEST_BYTES)))
    except FileNotFoundError:
        return []
