"""Safe access to files whose names or content come from elsewhere.

A path may lead to a pipe, an endless device, a blocking kernel file, a file larger than memory, or
a planted symbolic link. Readers take ordinary files up to a limit; writers never follow a link.
Every refusal is an ``OSError`` with the path and a reason.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import BinaryIO

MIB = 2**20
#: Default limit: for status, options, notes and the like.
SMALL_BYTES = 16 * MIB
_PIECE_BYTES = MIB
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}
#: First bytes of files under another's name -> what they are, and the remedy.
_OTHER_FILES = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file: run `git lfs pull` there"),
    (b"\x1f\x8b\x08", "compressed with gzip (.gz): unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd (.zst): unpack it"),
    (b"BZh", "compressed with bzip2 (.bz2): unpack it"),
    (b"\xfd7zXZ", "compressed with xz (.xz): unpack it"),
    (b"PK\x03\x04", "a ZIP archive (as .xlsx is): unpack it, or save it in another format"),
    (b"<!doctype", "a web page, not the file: fetch it again, with a token if it needs one"),
    (b"<html", "a web page, not the file: fetch it again, with a token if it needs one"),
    (b"SQLite format 3", "an SQLite database: write its table to a file of JSON lines"),
    (b"PAR1", "a Parquet file: let its name end in .parquet"),
    (b"ARROW1", "an Arrow file: let its name end in .arrow"),
)
_Path = str | os.PathLike[str]


def other_kind(beginning: bytes) -> str:
    """Return what a file is, with the remedy, whose first bytes are those of another kind than its
    name says; "" if none is known."""
    start = beginning.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    found = (what for magic, what in _OTHER_FILES if start.startswith(magic.lower()))
    return next(found, "")


def no_file(path: _Path) -> str:
    """Return why a path that exists is neither an ordinary file nor a directory; "" otherwise."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        is_link = os.path.islink(path)
        return f"it is a link to {os.readlink(path)}, which is not there" if is_link else ""
    except OSError as error:
        return "it is a link in a circle" if error.errno == errno.ELOOP else ""
    except ValueError:
        return ""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return ""
    return _not_ordinary(mode)


def read_bytes(path: _Path, *, limit_bytes: int = SMALL_BYTES, follow: bool = True) -> bytes:
    """Read a whole ordinary file (or a link to one if ``follow``); OSError if it cannot be read, is
    not an ordinary file, or is larger than the limit."""
    handle = _open_to_read(path, follow=follow)
    try:
        if os.fstat(handle).st_size > limit_bytes:
            raise _too_large(path, limit_bytes)
        pieces, size = [], 0
        # Count while reading: the file may grow.
        while piece := os.read(handle, min(_PIECE_BYTES, limit_bytes + 1 - size)):
            pieces.append(piece)
            size += len(piece)
            if size > limit_bytes:
                raise _too_large(path, limit_bytes)
        return b"".join(pieces)
    except OSError as error:
        if error.filename is None:  # of a call on a handle
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        os.close(handle)


def read_text(path: _Path, *, limit_bytes: int = SMALL_BYTES) -> str:
    """Read a file of UTF-8 text; raises as ``read_bytes``, and UnicodeDecodeError."""
    return read_bytes(path, limit_bytes=limit_bytes).decode("utf-8")


@contextmanager
def opened(path: _Path, *, follow: bool = True) -> Iterator[BinaryIO]:
    """Open an ordinary file of any size for reading; OSError for any other."""
    with os.fdopen(_open_to_read(path, follow=follow), "rb") as file:
        yield file


def create(path: _Path, mode: int = 0o644) -> int:
    """Create a file for writing, replacing what has its name; return its handle. A link is removed,
    not followed: names may be predictable and directories shared."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for attempt in range(3):
        try:
            return os.open(path, flags, mode)
        except FileExistsError:
            if attempt == 2:  # another process recreates it each time
                raise
            with suppress(FileNotFoundError):
                os.unlink(path)
    raise AssertionError("unreachable")


def open_to_append(path: _Path, mode: int = 0o644, *, create: bool = True) -> int:
    """Open an ordinary file for appending, creating it if need be; return its handle. OSError if it
    is a link, a pipe or a device."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    _refuse(path, follow=False, missing_ok=create)
    handle = _ordinary(_open(path, flags | (os.O_CREAT if create else 0), mode), path)
    os.set_blocking(handle, True)
    return handle


def _open_to_read(path: _Path, *, follow: bool) -> int:
    # Check before opening too: opening some devices has effects.
    _refuse(path, follow=follow, missing_ok=False)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    return _ordinary(_open(path, flags, 0), path)


def _refuse(path: _Path, *, follow: bool, missing_ok: bool) -> None:
    try:
        status = os.stat(path, follow_symlinks=follow)
    except FileNotFoundError:
        if missing_ok:
            return
        raise
    except ValueError as error:  # a NUL or half a character in the name
        raise OSError(errno.EINVAL, f"it is not a file name: {error}", str(path)) from error
    if not stat.S_ISREG(status.st_mode):
        raise _no_ordinary_file(path, status.st_mode)
    if status.st_dev in _kernel_file_systems():
        # They look ordinary and empty; reading one may block or consume messages.
        raise OSError(errno.EINVAL, "it is a file of the kernel, not an ordinary file", str(path))


@cache
def _kernel_file_systems() -> frozenset[int]:
    devices = set()
    for path in ("/proc", "/sys"):
        with suppress(OSError):
            devices.add(os.stat(path).st_dev)
    return frozenset(devices) - {os.stat("/").st_dev}  # /proc may not be mounted


def _open(path: _Path, flags: int, mode: int) -> int:
    try:
        return os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:  # it has just become one
            raise _no_ordinary_file(path, stat.S_IFLNK) from error
        raise


def _ordinary(handle: int, path: _Path) -> int:
    """Return the handle of an ordinary file; close any other and raise."""
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    raise _no_ordinary_file(path, mode)


def _no_ordinary_file(path: _Path, mode: int) -> OSError:
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    return OSError(code, _not_ordinary(mode), str(path))


def _not_ordinary(mode: int) -> str:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return f"it is {kind}, not an ordinary file"


def _too_large(path: _Path, limit_bytes: int) -> OSError:
    limit = f"{limit_bytes / MIB:g} MiB" if limit_bytes >= MIB else f"{limit_bytes:,} bytes"
    return OSError(
        errno.EFBIG, f"it is larger than {limit}, the most that is read of it", str(path)
    )
