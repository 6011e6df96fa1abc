"""Files whose names or content come from elsewhere, opened without a surprise.

A path may lead to a pipe (whose opening waits for a writer), a device that never ends, a kernel
file that waits for messages, a file larger than memory, or a symbolic link that was planted
where we are about to write. Readers here take ordinary files up to a limit; writers never follow a
link. Every refusal is an ``OSError`` with the path and a reason, as if the system had said so.
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
#: Limit for files that people write and programs keep beside results: status, options, notes.
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
_Path = str | os.PathLike[str]


def read_bytes(path: _Path, *, limit_bytes: int = SMALL_BYTES, follow: bool = True) -> bytes:
    """Read a whole ordinary file.

    Args:
        path: the file.
        limit_bytes: the most that it may hold.
        follow: whether it may be a symbolic link.

    Raises:
        OSError: it cannot be read, is no ordinary file, or is larger than the limit.
    """
    handle = _open_to_read(path, follow=follow)
    try:
        if os.fstat(handle).st_size > limit_bytes:
            raise _too_large(path, limit_bytes)
        pieces, size = [], 0
        # A file may grow meanwhile: what comes is counted.
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
    """Read an ordinary file of UTF-8 text.

    Raises:
        OSError: as ``read_bytes``.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, limit_bytes=limit_bytes).decode("utf-8")


@contextmanager
def opened(path: _Path, *, follow: bool = True) -> Iterator[BinaryIO]:
    """Open an ordinary file of any size, to be read piece by piece.

    Raises:
        OSError: it cannot be opened, or is no ordinary file.
    """
    with os.fdopen(_open_to_read(path, follow=follow), "rb") as file:
        yield file


def create(path: _Path, mode: int = 0o644) -> int:
    """Create a file in the place of whatever has its name, and open it for writing; its handle.

    A link of this name is removed and its target stays as it is: the name may be predictable and
    its directory one that others write to.

    Raises:
        OSError: it cannot be created.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for attempt in range(3):
        try:
            return os.open(path, flags, mode)
        except FileExistsError:
            if attempt == 2:  # another process makes it again each time
                raise
            with suppress(FileNotFoundError):
                os.unlink(path)
    raise AssertionError("unreachable")


def open_to_append(path: _Path, mode: int = 0o644, *, create: bool = True) -> int:
    """Open an ordinary file, which is created if need be, for writing at its end; its handle.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe or a device.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    _refuse(path, follow=False, missing_ok=create)
    handle = _ordinary(_open(path, flags | (os.O_CREAT if create else 0), mode), path)
    os.set_blocking(handle, True)
    return handle


def _open_to_read(path: _Path, *, follow: bool) -> int:
    # Looked at before it is opened as well: the opening of some devices has effects.
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
        # They call themselves ordinary and empty; reading one may wait, or take messages away.
        raise OSError(errno.EINVAL, "it is a file of the kernel, not an ordinary file", str(path))


@cache
def _kernel_file_systems() -> frozenset[int]:
    devices = set()
    for path in ("/proc", "/sys"):
        with suppress(OSError):
            devices.add(os.stat(path).st_dev)
    return frozenset(devices) - {os.stat("/").st_dev}  # an empty /proc that nothing is mounted on


def _open(path: _Path, flags: int, mode: int) -> int:
    try:
        return os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:  # it has just become one
            raise _no_ordinary_file(path, stat.S_IFLNK) from error
        raise


def _ordinary(handle: int, path: _Path) -> int:
    """The handle, if it is of an ordinary file; else it is closed."""
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    raise _no_ordinary_file(path, mode)


def _no_ordinary_file(path: _Path, mode: int) -> OSError:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    return OSError(code, f"it is {kind}, not an ordinary file", str(path))


def _too_large(path: _Path, limit_bytes: int) -> OSError:
    limit = f"{limit_bytes / MIB:g} MiB" if limit_bytes >= MIB else f"{limit_bytes:,} bytes"
    return OSError(
        errno.EFBIG, f"it is larger than {limit}, the most that is read of it", str(path)
    )
