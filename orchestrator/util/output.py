"""The only way to write to standard output and error, robust against failures and hostile text.

``guarded`` streams survive a full disk, a closed descriptor, or a reader that is gone or stuck, so
output never ends a measurement; they report what was lost. Commands whose product is their output
get ``OutputFailed``. ``say`` and ``console`` make control characters visible.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import select
import sys
import threading
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# ---------------------------------------------------------------- visible control characters

# Names, reasons, paths and messages are untrusted: escape sequences could rewrite the terminal,
# bidirectional overrides reverse a name, a carriage return hide a line.

# Cc: control, Cf: format (bidirectional overrides), Cs: lone surrogates, Zl/Zp: line separators.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def visible(text: str) -> str:
    """Spell out control and format characters; newlines and tabs stay."""
    return text if text.isprintable() else _escaped(text.replace("\r\n", "\n"), _spelled)


def visible_json(text: str) -> str:
    """Replace control and format characters in JSON by JSON escapes."""
    # ``json`` leaves DEL as it is.
    return _escaped(text, lambda c: "\\u007f" if c == "\x7f" else json.dumps(c)[1:-1])


def _escaped(text: str, escape: Callable[[str], str]) -> str:
    lines = text.split("\n")
    return "\n".join(
        line if line.isprintable() else "".join(c if _is_seen(c) else escape(c) for c in line)
        for line in lines
    )


def _is_seen(character: str) -> bool:
    printable = character.isprintable() or character == "\t"
    return printable or unicodedata.category(character) not in _UNSEEN


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


#: A pipe that polls as writable takes this much without blocking.
_PIECE_BYTES = select.PIPE_BUF
#: Seconds that a run waits for a stuck reader of its progress.
PATIENCE_S = 2.0
#: Seconds that it waits at the end, when only its exit is delayed.
READER_S = 30.0


class OutputFailed(OSError):
    """Standard output cannot be written, and it is the command's product."""


class GuardedFile(io.RawIOBase):
    """Raw file of a guarded stream: accepts all writes, whatever happens to them.

    The descriptor is that of ``stream``, which stays open. With ``strict``, raise ``OutputFailed``
    at the first failure. ``patience_s`` limits the wait for a stuck reader; None: no limit.
    """

    def __init__(
        self, stream: TextIO, *, strict: bool = False, patience_s: float | None = None
    ) -> None:
        self._stream, self._fd = stream, stream.fileno()
        self._strict = strict
        self._patience_s = patience_s
        self._stalled = False  # the reader was stuck for that long: do not wait again
        self._last = b"\n"  # last byte written
        self._notice = b""  # rest of a notice of loss
        self.error: OSError | None = None  # the last one
        self.lost_bytes = 0
        self._lost_since = 0.0

    def write(self, data: Any) -> int:
        """Write, or count as lost; raise OutputFailed in strict mode."""
        view = memoryview(data).cast("B")
        if self._strict:
            if self.error is None and self._put(view) < len(view):
                assert self.error is not None
                raise OutputFailed(self.error.errno, self.error.strerror)
            return len(view)
        written = self._put(view) if self._report_losses() else 0
        if written < len(view):
            if not self.lost_bytes:
                self._lost_since = time.time()
            self.lost_bytes += len(view) - written
        return len(view)

    def _report_losses(self) -> bool:
        """Report lost output; return False if that fails too."""
        if not self._notice and not self.lost_bytes:
            return True
        notice = self._notice or self._losses()
        written = self._put(memoryview(notice))
        if written and not self._notice:  # otherwise the notice is updated until there is room
            self.lost_bytes = 0
        if written:
            self._notice = notice[written:]
        return written == len(notice)

    def _losses(self) -> bytes:
        since, now = (
            time.strftime("%H:%M:%S", time.localtime(t)) for t in (self._lost_since, time.time())
        )
        why = self.error.strerror if self.error is not None else "unknown"
        line_break = "" if self._last == b"\n" else "\n"
        notice = f"{self.lost_bytes:,} bytes of output lost from {since} to {now}: {why}"
        return f"{line_break}[{notice}]\n".encode()

    def _put(self, view: memoryview) -> int:
        done = 0
        try:
            while done < len(view):
                self._wait()
                piece = view[done:] if self._patience_s is None else view[done:][:_PIECE_BYTES]
                try:
                    done += os.write(self._fd, piece)
                except BlockingIOError:  # another process made the shared terminal non-blocking
                    self._wait(blocked=True)
        except OSError as error:
            self.error = error
        if done:
            self._last = bytes(view[done - 1 : done])
        return done

    def _wait(self, *, blocked: bool = False) -> None:
        """Wait until a write would not block; raise OSError if the reader is stuck."""
        if self._patience_s is None and not blocked:
            return
        limit_s = 0.0 if self._stalled else self._patience_s
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        # A reader that is gone counts as ready: the write fails.
        self._stalled = not poll.poll(None if limit_s is None else 1000 * limit_s)
        if self._stalled:
            raise OSError(errno.EAGAIN, "its reader is too slow")

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """The descriptor, for child processes."""
        return self._fd

    def isatty(self) -> bool:
        """Return whether a terminal shows it."""
        return os.isatty(self._fd)


def guarded(
    stream: TextIO | None, *, strict: bool = False, patience_s: float | None = None
) -> TextIO:
    """Return a robust stream to the same file, or the stream itself if it has no file."""
    if stream is None:  # Python's value for a closed descriptor
        return open(os.devnull, "w", encoding="utf-8")
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    try:
        raw = GuardedFile(stream, strict=strict, patience_s=patience_s)
    except (OSError, ValueError, AttributeError):
        return stream
    unbuffered = isinstance(getattr(stream, "buffer", None), io.RawIOBase)
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type,type-var]
        encoding=stream.encoding or "utf-8",
        errors="backslashreplace",  # unencodable characters are no failure
        newline="\n",
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )


def loss(stream: TextIO) -> OSError | None:
    """Return the error that lost text of a guarded stream; None if all was written."""
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    buffer = getattr(stream, "buffer", None)
    error = getattr(getattr(buffer, "raw", buffer), "error", None)
    return error if isinstance(error, OSError) else None


def open_descriptors() -> None:
    """Open closed standard descriptors, lest a later file gets their numbers and library output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


@contextlib.contextmanager
def standard_streams(*, working: bool) -> Iterator[None]:
    """Guard standard output and error, and sanitise errors and warnings of libraries. If
    ``working``, output may be lost, and stuck readers delay by ``READER_S`` at most; otherwise
    OutputFailed is raised at the end if standard output could not be written."""
    open_descriptors()
    before = sys.stdout, sys.stderr, sys.excepthook, threading.excepthook, logging.lastResort
    patience_s = READER_S if working else None
    sys.stdout = guarded(sys.stdout, strict=not working, patience_s=patience_s)
    sys.stderr = guarded(sys.stderr, patience_s=patience_s)
    sys.excepthook = _say_exception
    threading.excepthook = lambda args: _say_exception(
        args.exc_type, args.exc_value, args.exc_traceback
    )
    logging.lastResort = _VisibleHandler(logging.WARNING)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    finally:
        if before[0] is not sys.__stdout__:  # otherwise output at exit is guarded too
            (sys.stdout, sys.stderr, sys.excepthook, threading.excepthook) = before[:4]
            logging.lastResort = before[4]


def say(text: str = "", to: TextIO | None = None, end: str = "\n") -> None:
    """Print untrusted text, by default to standard output; may raise OutputFailed."""
    emit(visible(text) + end, to)


def say_aside(text: str) -> None:
    """Print on standard error, apart from output that scripts read."""
    say(text, sys.stderr)


def say_json(value: object, **options: Any) -> None:
    """Print a value as JSON; ``options`` are those of ``json.dumps``."""
    emit_json(json.dumps(value, **options) + "\n")


def emit_json(text: str, to: TextIO | None = None) -> None:
    """Print JSON with control characters as JSON escapes."""
    emit(visible_json(text), to)


def emit(text: str, to: TextIO | None = None) -> None:
    """Print trusted text and flush; raise OutputFailed if output is the product and fails."""
    stream = sys.stdout if to is None else to
    try:
        stream.write(text)
        stream.flush()
    except OutputFailed:
        raise
    except (OSError, ValueError, RuntimeError, AttributeError):
        pass  # closed or gone: output is never worth a run


def console(to: TextIO | None = None, **options: Any) -> Console:
    """Return a rich console with visible control characters; ``options`` as for ``Console``."""
    from rich.console import Console
    from rich.segment import Segment

    class VisibleConsole(Console):
        """Sanitise all segments, whatever table or panel they are from."""

        def _render_buffer(self, buffer: Any) -> str:
            return super()._render_buffer(
                segment
                if segment.control or segment.text.isprintable()
                else Segment(visible(segment.text), segment.style)
                for segment in buffer
            )

    return VisibleConsole(file=sys.stdout if to is None else to, **options)


class _VisibleHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Print a record on standard error."""
        try:
            say_aside(self.format(record))
        except Exception:
            self.handleError(record)


def _say_exception(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    with contextlib.suppress(Exception):
        say_aside("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))
