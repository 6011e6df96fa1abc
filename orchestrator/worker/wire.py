"""Values as bytes between the processes of one run, and nowhere else: driver, agents and workers.

The one place where anything is unpickled. These bytes come through Ray, or through a socket pair
between a process and its parent, from processes that may run code here anyway (docs/security.md).
Results, files of others and downloads are never read so.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import struct
from collections.abc import Iterable, Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")

_SIZE = struct.Struct("=Q")  # before each message: both ends are on one host
_PIECE_BYTES, _MOST_BYTES = 1 << 16, 1 << 20  # of one read


def pickled(value: Any) -> bytes:
    """Pickle a value for ``unpickled`` in another process of the run."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpickled(data: bytes | memoryview) -> Any:
    """Return the value of which ``pickled`` made these bytes.

    Raises:
        Exception: of many kinds: the other process is of another version.
    """
    return pickle.loads(data)


def compact(kind: type[T]) -> type[T]:
    """Have records of a dataclass pickled as the values that make them: a decorator. By default a
    frozen record is pickled, and made again, one field at a time and in Python.

    Raises:
        TypeError: it has a single value, or cannot be made of values in their order.
    """
    declared = fields(kind)  # type: ignore[arg-type]
    if len(declared) < 2 or any(each.kw_only or not each.init for each in declared):
        raise TypeError(f"{kind.__name__} is not made of several values in their order")
    values_of = attrgetter(*(each.name for each in declared))

    def reduced(record: T) -> tuple[type[T], Any]:
        return kind, values_of(record)

    kind.__reduce__ = reduced  # type: ignore[assignment,method-assign]
    return kind


class Channel:
    """One end of a socket pair, for whole messages. What has come together is read in one call of
    the system, and what is sent together is written in one. One thread at a time may send, and one
    thread receives."""

    def __init__(self, handle: int) -> None:
        """``handle`` is the descriptor of the socket, and is closed here."""
        self._handle = handle
        self._readable = select.poll()
        self._readable.register(handle, select.POLLIN)
        self._read = bytearray()
        self._at = 0  # where in it the next message begins

    def send(self, *messages: Any) -> None:
        """Send messages.

        Raises:
            OSError: nobody receives any more.
        """
        left = memoryview(b"".join(_framed(messages)))
        while left:
            left = left[os.write(self._handle, left) :]

    def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError: the other end is closed.
            OSError: it was closed before all was read there.
        """
        self._wait_for(_SIZE.size)
        (size,) = _SIZE.unpack_from(self._read, self._at)
        self._wait_for(_SIZE.size + size)
        start = self._at + _SIZE.size
        self._at = start + size
        try:
            with memoryview(self._read) as read, read[start : self._at] as message:
                return unpickled(message)
        finally:
            if not self.has_read:  # a large message would be kept until the next one came
                self._read, self._at = bytearray(), 0

    @property
    def has_read(self) -> bool:
        """Return whether more was read than was received: at least a part of a message."""
        return self._at < len(self._read)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait so long for something to come, a message or the end; whether it has."""
        return self.has_read or bool(self._readable.poll(timeout_s * 1000.0))

    def close(self) -> None:
        """Close this end."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()

    def _wait_for(self, size: int) -> None:
        """Read until there are so many bytes of the next message."""
        while (lacking := size - (len(self._read) - self._at)) > 0:
            data = os.read(self._handle, min(max(lacking, _PIECE_BYTES), _MOST_BYTES))
            if not data:
                raise EOFError
            del self._read[: self._at]
            self._at = 0
            self._read += data


def _framed(messages: Iterable[Any]) -> Iterator[bytes]:
    for message in messages:
        data = pickled(message)
        yield _SIZE.pack(len(data))
        yield data
