"""Standard output and standard error: the one way to write to them, and no way to die of it.

Two dangers come with every line. The line may not get out: the log lies on a full disk, whoever
read the pipe is gone or has stopped, the descriptor is closed. ``guarded`` streams take such lines
nevertheless, count what is lost, and say so once when there is room again; a measurement never
ends because of what was said about it. A command whose product *is* its output is told instead
(``OutputFailed``). And the line may give orders to the terminal, when it quotes what came from
elsewhere: ``say`` and ``console`` make control characters visible.
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

# Names, reasons, paths and messages come from files, models, nodes and networks that nobody vetted.
# An escape sequence in them could rewrite what a terminal has shown, a bidirectional override could
# let a name read backwards, a carriage return could hide the line before it.

# Cc: control, Cf: format (bidirectional overrides), Cs: lone surrogates, Zl/Zp: line separators.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def visible(text: str) -> str:
    """Spell out control and format characters; newlines and tabs stay."""
    return text if text.isprintable() else _escaped(text.replace("\r\n", "\n"), _spelled)


def visible_json(text: str) -> str:
    """JSON that says the same, with control and format characters as JSON escapes; for JSON alone,
    where they stand in strings and nowhere else."""
    return _escaped(text, _json_escape)


def _escaped(text: str, escape: Callable[[str], str]) -> str:
    """The text with another spelling of what a terminal does not show."""
    lines = text.split("\n")
    return "\n".join(
        line if line.isprintable() else "".join(c if _is_seen(c) else escape(c) for c in line)
        for line in lines
    )


def _is_seen(character: str) -> bool:
    printable = character.isprintable() or character == "\t"
    return printable or unicodedata.category(character) not in _UNSEEN


def _json_escape(character: str) -> str:
    # DEL is ASCII, which ``json`` leaves as it is.
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


#: A pipe that polls as writable takes this much without making its writer wait.
_PIECE_BYTES = select.PIPE_BUF
#: Time that a run waits for a reader of its progress before it goes on without one.
PATIENCE_S = 2.0
#: The same for its tables at the end, when nothing is delayed but its notice of the end.
READER_S = 30.0


class OutputFailed(OSError):
    """Standard output cannot be written, and it is what the command is for."""


class GuardedFile(io.RawIOBase):
    """The file beneath a guarded stream: it takes all that is written, whatever becomes of it.

    Args:
        stream: of which it takes the descriptor, and which it keeps open.
        strict: raise ``OutputFailed`` at the first failure, and drop what comes after it.
        patience_s: how long a reader that takes nothing is waited for; None: for ever.
    """

    def __init__(
        self, stream: TextIO, *, strict: bool = False, patience_s: float | None = None
    ) -> None:
        self._stream, self._fd = stream, stream.fileno()
        self._strict = strict
        self._patience_s = patience_s
        self._stalled = False  # the reader took nothing for that long: do not wait again
        self._last = b"\n"  # byte that got out
        self._notice = b""  # of a loss, as far as it has not got out yet
        self.error: OSError | None = None  # the last one
        self.lost_bytes = 0
        self._lost_since = 0.0

    def write(self, data: Any) -> int:
        """Write, or count as lost.

        Raises:
            OutputFailed: ``strict`` was asked for.
        """
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
        """Say what was lost, if anything was; false while that cannot be said either."""
        if not self._notice and not self.lost_bytes:
            return True
        notice = self._notice or self._losses()
        written = self._put(memoryview(notice))
        if written and not self._notice:  # else it grows until there is room
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
        """Write as much as goes; how many bytes."""
        done = 0
        try:
            while done < len(view):
                self._wait()
                piece = view[done:] if self._patience_s is None else view[done:][:_PIECE_BYTES]
                try:
                    done += os.write(self._fd, piece)
                except BlockingIOError:  # somebody made the terminal that we share non-blocking
                    self._wait(blocked=True)
        except OSError as error:
            self.error = error
        if done:
            self._last = bytes(view[done - 1 : done])
        return done

    def _wait(self, *, blocked: bool = False) -> None:
        """Wait until a write would not block.

        Raises:
            OSError: nobody has read for too long.
        """
        if self._patience_s is None and not blocked:
            return
        limit_s = 0.0 if self._stalled else self._patience_s
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        # A reader that is gone counts as ready too: the write says so.
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
    """A stream to the same file that survives whatever is wrong with it; see ``GuardedFile``.

    A stream without a file beneath, as a test's or a notebook's, is returned as it is.
    """
    if stream is None:  # as Python starts with a closed descriptor
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
        errors="backslashreplace",  # a character that the stream has no bytes for is no failure
        newline="\n",
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )


def loss(stream: TextIO) -> OSError | None:
    """Error that kept text of a guarded stream from getting out; None if all did."""
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    buffer = getattr(stream, "buffer", None)
    error = getattr(getattr(buffer, "raw", buffer), "error", None)
    return error if isinstance(error, OSError) else None


def open_descriptors() -> None:
    """Open standard input, output and error if they are closed: else the next file that is opened,
    a lock or a row, would get their numbers and whatever libraries print."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


@contextlib.contextmanager
def standard_streams(*, working: bool) -> Iterator[None]:
    """Guard standard output and standard error; what Python itself and libraries print of errors
    and warnings has no control characters then.

    Args:
        working: the program has more to do than to print: it loses output, and waits for whoever
            reads it no longer than ``READER_S``. Else the loss of standard output is an error.

    Raises (at the end):
        OutputFailed: standard output could not be written.
    """
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
        if before[0] is not sys.__stdout__:  # else what is printed at the very end is guarded too
            (sys.stdout, sys.stderr, sys.excepthook, threading.excepthook) = before[:4]
            logging.lastResort = before[4]


def say(text: str = "", to: TextIO | None = None, end: str = "\n") -> None:
    """Print text that may hold what comes from elsewhere; the default is standard output.

    Raises:
        OutputFailed: standard output is what the command is for, and cannot be written.
    """
    emit(visible(text) + end, to)


def say_aside(text: str) -> None:
    """Print on standard error, beside the output that a script may be reading."""
    say(text, sys.stderr)


def say_json(value: object, **options: Any) -> None:
    """Print a value as JSON, exactly; ``options`` are those of ``json.dumps``."""
    emit_json(json.dumps(value, **options) + "\n")


def emit_json(text: str, to: TextIO | None = None) -> None:
    """Print JSON, exactly: control characters become JSON's own escapes."""
    emit(visible_json(text), to)


def emit(text: str, to: TextIO | None = None) -> None:
    """Print text of our own making as it is, at once.

    Raises:
        OutputFailed: standard output is what the command is for, and cannot be written.
    """
    stream = sys.stdout if to is None else to
    try:
        stream.write(text)
        stream.flush()
    except OutputFailed:
        raise
    except (OSError, ValueError, RuntimeError, AttributeError):
        pass  # closed, or no stream any more: nothing that is said is worth a run


def console(to: TextIO | None = None, **options: Any) -> Console:
    """A rich console, by default on standard output, in whose texts control characters are visible.

    ``options`` are those of ``rich.console.Console``.
    """
    from rich.console import Console
    from rich.segment import Segment

    class VisibleConsole(Console):
        """Every text passes here, whatever table or panel it stood in."""

        def _render_buffer(self, buffer: Any) -> str:
            return super()._render_buffer(
                segment
                if segment.control or segment.text.isprintable()
                else Segment(visible(segment.text), segment.style)
                for segment in buffer
            )

    return VisibleConsole(file=sys.stdout if to is None else to, **options)


class _VisibleHandler(logging.Handler):
    """The fallback of ``logging``, with visible control characters."""

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
