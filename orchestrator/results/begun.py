"""Log of the attempts that have begun: tells the next driver which ones a dead driver had running.

    <sha256[:16]> <the attempt's note, from which its row is made should its driver die: notes.py>

Lines are appended in one write before their attempts begin. Nothing is written when the attempt
ends, since its row tells that; a log that has grown long is replaced by one of the attempts that
still run. The death of the driver can tear the last line only, and then its attempt has not begun.
Nothing is synced: a power failure may take lines, and then nobody has heard of their attempts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from orchestrator.core.errors import SchemaMismatch, StoreError, StoreFull
from orchestrator.core.measurement import Measurement
from orchestrator.results import disk, fragments
from orchestrator.results.notes import Note, row_of

LONG_BYTES = 2**20
_LARGEST_BYTES = 256 * 2**20  # of a foreign one: ours is replaced when it has grown long


class BegunLog:
    """The log of one driver, which starts it from scratch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[str, bytes] = {}  # of attempts that run, by attempt id
        self._changing = threading.Lock()  # rows may be written beside the loop that begins
        self._handle: int | None = None  # None: the file is not there, or not as it should be
        self._bytes = 0  # of the file

    def begin(self, notes: Sequence[Note]) -> None:
        """Note attempts. Notes that found no room are made up for by the next ones.

        Raises:
            StoreFull: no space is left.
            StoreError: they cannot be written.
        """
        lines = {note.attempt_id: _line(note.text) for note in notes}
        data = b"".join(lines.values())
        with self._changing:
            self._lines |= lines
            if self._handle is None or self._bytes + len(data) > self._most_bytes():
                self._replace()
            else:
                self._append(self._handle, data)

    def end(self, attempt_ids: Iterable[str]) -> None:
        """These attempts have their rows, or are not to have one."""
        with self._changing:
            for attempt_id in attempt_ids:
                self._lines.pop(attempt_id, None)

    def close(self, *, ours: bool) -> None:
        """End the log. Its file goes unless it has attempts without a row, or is not ours any
        more."""
        there = self._handle is not None
        self._close()
        if ours and there and not self._lines:
            with contextlib.suppress(OSError):
                disk.remove(self.path)

    def _most_bytes(self) -> int:
        if self._bytes < LONG_BYTES:
            return LONG_BYTES
        return max(LONG_BYTES, 2 * sum(map(len, self._lines.values())))

    def _replace(self) -> None:
        self._close()
        data = b"".join(self._lines.values())
        fragments.replace_file(self.path.parent, self.path.name, data)
        try:
            self._handle, self._bytes = disk.open_to_append(self.path), len(data)
        except OSError as error:
            raise StoreError(f"cannot open {self.path}: {error.strerror or error}") from error

    def _append(self, handle: int, data: bytes) -> None:
        try:
            written = disk.write(handle, data)
        except OSError as error:
            self._close()
            raise fragments.write_error(self.path, error) from error
        self._bytes += written
        if written < len(data):  # nothing may follow a torn line
            self._close()
            raise StoreFull(f"cannot write {self.path}: {written} of {len(data)} bytes found room")

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                disk.close(handle)


def read_begun(path: Path) -> tuple[list[Measurement], str]:
    """The rows of the attempts that have begun, and why some of them cannot be read, if so.

    Raises:
        OSError: the log is there and cannot be read.
        SchemaMismatch: a newer version wrote it.
    """
    try:
        data = disk.read(path, _LARGEST_BYTES)
    except FileNotFoundError:
        return [], ""
    *lines, _torn = data.split(b"\n")
    found, reason = [], ""
    for number, line in enumerate(lines, start=1):
        checksum, _, text = line.partition(b" ")
        try:
            if checksum.decode("ascii") != fragments.digest(text):
                raise StoreError("its checksum is another")
            found.append(row_of(text.decode()))
        except SchemaMismatch:
            raise
        except (StoreError, ValueError) as error:
            reason = f"line {number}: {error}"
    return found, reason


def _line(text: str) -> bytes:
    data = text.encode()
    return fragments.digest(data).encode() + b" " + data + b"\n"
