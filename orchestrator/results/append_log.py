"""The rows of the last seconds: records in one growing file, each synced, until they are Parquet.

A Parquet file of one row takes 2 ms of CPU and a record of it 0.1, so a run's rows go to a log
first, and every few seconds from there into a file that any reader opens (``Store.to_parquet``).

    rows/.appended-<writer>-<n>.arrows        plain readers skip a name with a point

No name is used twice: a writer that was stalled, and a reader that has listed a directory, come
back to a log of that name or to none, never to another one.

A record stands between two copies of a line with its name and length:

    \\n<job>-<attempt>-<sha256[:16]>.json <bytes>\\n  <JSON>  \\n<the same>\\n

It tells the names of its columns (``record.py``), so that no damage elsewhere takes it along; those
that end in ``.arrow`` are Arrow IPC streams, schema included. The name holds
its checksum, and tells whose row a damaged record was; the second copy finds a record whose first
line rotted. A crash can tear the last record only, which nobody was told is safe. A writer never
goes on in a log that another one left, nor after a failed write.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.errors import StoreError
from orchestrator.results import disk, fragments

#: The names of the very first logs told no writer.
_LOG = re.compile(r"\.appended-(?:[0-9a-f]{16}-)?\d{1,9}\.arrows")
_MARK = re.compile(rb"\n(?P<name>[A-Za-z0-9_-]{1,120}\.(?:json|arrow)) (?P<bytes>\d{1,10})\n")


def is_log(name: str) -> bool:
    """Tell if a file of this name is a log of rows."""
    return _LOG.fullmatch(name) is not None


def _mark(name: str, length: int) -> bytes:
    return f"\n{name} {length}\n".encode("ascii")


class AppendLog:
    """The log that one writer appends to; it is begun at the first record.

    Two threads may use it: one appends while another puts the rows of earlier logs into Parquet.

    Args:
        directory: of the run's rows.
        writer: 16 hexadecimal digits that no other log has in its name; drawn if left out.
    """

    def __init__(self, directory: Path, writer: str = "") -> None:
        self._directory = directory
        self._writer = writer or secrets.token_hex(8)
        self._number = 0  # of the newest log
        self._ended: set[str] = set()  # names of logs that are this writer's to remove
        self._changing = threading.Lock()
        self._handle: int | None = None
        self._path = directory
        self._bytes = 0  # of the records that are safe
        #: Of records whose append failed and that may stand: each log, and its length without.
        self._doubtful: dict[str, list[tuple[Path, int]]] = {}

    def append(self, name: str, data: bytes) -> Path:
        """Write a record at the end; when this returns, it survives a power failure.

        Raises:
            StoreFull: no space is left; the log is as it was.
            StoreError: anything else the file system says.
        """
        mark = _mark(name, len(data))
        whole = b"".join((mark, data, mark))
        with self._changing:
            try:
                handle = self._begun() if self._handle is None else self._handle
                fragments.write_all(handle, whole)
                disk.sync(handle)
                if not disk.has_name(handle, self._path):
                    raise OSError("it was removed by somebody else, with every row in it")
            except OSError as error:
                self._give_up(name)
                raise fragments.write_error(self._path, error) from error
            self._bytes += len(whole)
            self._doubtful.pop(name, None)
            return self._path

    def doubts(self, name: str) -> bool:
        """Return whether the append of a record failed, and taking it back as well."""
        return name in self._doubtful

    def take_back(self, name: str) -> None:
        """See that a record whose append failed stands in no log.

        Raises:
            StoreError: that cannot be done now.
        """
        with self._changing:
            for path, length in self._doubtful.get(name, ()):
                try:
                    if disk.is_there(path):
                        _cut(path, length)
                    else:
                        disk.sync_directory(self._directory)
                except OSError as error:
                    why = f"{error.strerror or error}; it may hold rows whose append failed"
                    raise StoreError(f"cannot cut {path} to {length:,} bytes: {why}") from error
            self._doubtful.pop(name, None)

    def take_over(self, names: Iterable[str]) -> None:
        """Answer for all logs there are, which earlier writers have left."""
        with self._changing:
            self._ended = set(names)

    def rotate(self) -> list[str]:
        """End the log; the names of all that this writer answers for, to none of which it adds
        anything."""
        with self._changing:
            self._close()
            return sorted(self._ended)

    def forget(self, name: str) -> None:
        """Answer no longer for a log that is removed."""
        with self._changing:
            self._ended.discard(name)

    def close(self) -> None:
        """End the log."""
        with self._changing:
            self._close()

    def _begun(self) -> int:
        """A new log, open; its name survives a power failure."""
        self._number += 1
        self._path = self._directory / f".appended-{self._writer}-{self._number}.arrows"
        self._handle, self._bytes = disk.create_new(self._path), 0
        disk.sync_directory(self._directory)
        return self._handle

    def _give_up(self, name: str) -> None:
        """Take back what a failed write left, and end the log: what could not be synced once is
        not to be trusted with more."""
        if self._handle is not None:
            try:
                disk.truncate(self._handle, self._bytes)
                disk.sync(self._handle)  # else a power failure brings the record back
            except OSError:
                self._doubtful.setdefault(name, []).append((self._path, self._bytes))
            self._close()
            if not self._bytes:
                with contextlib.suppress(OSError):
                    with contextlib.suppress(FileNotFoundError):
                        disk.remove(self._path)
                    self._ended.discard(self._path.name)

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._ended.add(self._path.name)
            with contextlib.suppress(OSError):
                disk.close(handle)


def _cut(path: Path, length: int) -> None:
    """Cut a file to so many bytes, for good."""
    handle = disk.open_to_append(path)
    try:
        disk.truncate(handle, length)
        disk.sync(handle)
    finally:
        disk.close(handle)


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a log: a sound record, or bytes that are none.

    Attributes:
        name: of the record; empty where nothing tells it.
        data: the record, or the bytes.
        reason: why it is no record; empty for a sound one.
        torn: it is the end of a log whose writer was cut off before it said that the row is safe.
    """

    name: str
    data: bytes
    reason: str = ""
    torn: bool = False


def parts_of(data: bytes) -> Iterator[Part]:
    """The parts of a log in their order; those without a reason are sound records."""
    at = 0
    while at < len(data):
        record = _record_at(data, at)
        if record is None:
            record = _next_record(data, at)
            yield from _damaged(data, at, len(data) if record is None else record[0])
            if record is None:
                return
        _, name, begin, end, at = record
        yield Part(name=name, data=data[begin:end])


#: Where a record begins, its name, begin and end of its bytes, and where the next one begins.
_Record = tuple[int, str, int, int, int]


def _record_at(data: bytes, at: int) -> _Record | None:
    """The sound record whose first line stands here."""
    mark = _MARK.match(data, at)
    if mark is None:
        return None
    end = mark.end() + int(mark["bytes"])
    if end > len(data) or not _is_sound(mark, data[mark.end() : end]):
        return None
    after = min(len(data), end + len(mark[0]))
    return at, mark["name"].decode(), mark.end(), end, after


def _next_record(data: bytes, at: int) -> _Record | None:
    """The first sound record behind a place where none begins, known by either of its lines."""
    for mark in _MARK.finditer(data, at + 1):
        begin = mark.start() - int(mark["bytes"])
        if begin > at and _is_sound(mark, data[begin : mark.start()]):
            return begin, mark["name"].decode(), begin, mark.start(), mark.end()
        if record := _record_at(data, mark.start()):
            return record
    return None


def _is_sound(mark: re.Match[bytes], data: bytes) -> bool:
    return fragments.damage_of(mark["name"].decode(), data) is None


def _damaged(data: bytes, begin: int, end: int) -> Iterator[Part]:
    """A part for each record that is named between two places and is not sound."""
    piece = data[begin:end]
    marks = list(_MARK.finditer(piece))
    # With both its lines a record was whole once; and no second one is begun behind a torn one.
    torn = end == len(data) and all(mark.start() == 0 for mark in marks)
    what = "is torn" if torn else "are no sound record"
    reason = f"{len(piece):,} bytes from byte {begin:,} {what}"
    for name in dict.fromkeys(mark["name"].decode() for mark in marks) or ("",):
        yield Part(name=name, data=piece, reason=reason, torn=torn)
