"""File system calls for rows, and atomic files.

Only this module touches files of rows; tests replace its calls by a faulty disk (``tests/night``).
A file is written under a name that readers ignore, synced and renamed, then its directory is
synced: a crash leaves the old state or the new.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.errors import StoreError, StoreFull
from workloads.util import files

#: Size limit of a file of rows; the largest are compacted ones. Smaller files have own limits.
LARGEST_BYTES = 2 * 2**30
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
#: Error codes of transient failures (``may_pass``).
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT)


# ---------------------------------------------------------------- calls

#: Open a new file for writing, replacing any file or link of this name; return its handle.
create = files.create
write = os.write
sync = os.fsync
close = os.close
rename = os.rename
remove = os.unlink
names = os.listdir
#: Return whether a name is taken, also by a dangling link.
is_there = os.path.lexists


def create_new(path: Path) -> int:
    """Open a new file for writing and return its handle; FileExistsError if the name is taken."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def has_name(handle: int, path: Path) -> bool:
    """Return whether an open file still has its name, by link count or, without one, by path."""
    return os.fstat(handle).st_nlink > 0 or is_there(path)


def make_directory(path: Path) -> None:
    """Make a directory, and those above it, unless it is there."""
    path.mkdir(parents=True, exist_ok=True)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a power failure."""
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that sync names anyway
            raise
    finally:
        os.close(handle)


def read(path: Path, limit_bytes: int = LARGEST_BYTES, *, follow: bool = True) -> bytes:
    """Read a regular file; OSError for other kinds (which may not end), links unless ``follow``,
    and files above the limit."""
    return files.read_bytes(path, limit_bytes=limit_bytes, follow=follow)


def may_be_ordinary(path: Path) -> bool:
    """Return whether a name may be that of a regular file; True for a dangling link."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return True


# ---------------------------------------------------------------- whole files


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damaged file or line of results; ``passing``: only unreadable, so maybe valid later."""

    path: Path
    reason: str
    passing: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def may_pass(error: OSError) -> bool:
    """Return whether a read failure is transient and says nothing of the file."""
    return error.errno in _PASSING


def digest(data: bytes) -> str:
    """The part of the SHA-256 that stands in names of files and before lines of logs."""
    return hashlib.sha256(data).hexdigest()[:16]


def write_durably(
    directory: Path, name: str, data: bytes, allowed: Callable[[], object] = lambda: None
) -> Path:
    """Create or replace ``directory/name``; on return it survives a power failure. ``allowed`` is
    called before the rename and may raise StoreError.

    Raises StoreFull if no space is left, else StoreError; the directory is as it was.
    """
    aside, target = directory / f".{name}.partial", directory / name
    try:
        try:
            _write(aside, data, synced=True)
            allowed()
            rename(aside, target)
        except (OSError, StoreError):
            with contextlib.suppress(OSError):
                remove(aside)
            raise
        sync_directory(directory)
    except OSError as error:
        raise write_error(target, error) from error
    return target


def replace_file(directory: Path, name: str, data: bytes | Iterable[bytes]) -> Path:
    """Replace a file (page, status) by data or its parts atomically, without syncing it."""
    aside = directory / f".{name}.{os.getpid()}.aside"
    try:
        _write(aside, data, synced=False)
        rename(aside, directory / name)
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove(aside)
        if not isinstance(error, OSError):
            raise
        raise write_error(directory / name, error) from error
    return directory / name


def write_error(path: Path, error: OSError) -> StoreError:
    """Convert an error of the file system to the store's: ``StoreFull`` where no space is left."""
    kind = StoreFull if error.errno in _NO_SPACE else StoreError
    return kind(f"cannot write {path}: {error.strerror or error}")


def write_all(handle: int, data: bytes) -> None:
    """Write data to an open file: a disk that fills up makes a write short before it fails."""
    view = memoryview(data)
    while view:
        view = view[write(handle, view) :]


def set_aside(path: Path, quarantine: Path) -> Path:
    """Move a file into the quarantine, under a name that is free there."""
    make_directory(quarantine)
    target, number = quarantine / path.name.lstrip("."), 1
    while is_there(target):
        target = quarantine / f"{path.name.lstrip('.')}.{number}"
        number += 1
    rename(path, target)
    sync_directory(quarantine)
    sync_directory(path.parent)
    return target


def valid_name(name: str, what: str) -> str:
    """Return a safe file or directory name; StoreError if empty, too long, hidden or unsafe."""
    if is_valid_name(name):
        return name
    raise StoreError(
        f"{what} {name!r} cannot name a directory or file: use letters, digits, '_', '-', '+' and "
        "'.', beginning with a letter or digit, 120 bytes at most"
    )


def is_valid_name(name: str) -> bool:
    """Return whether a name is as ``valid_name`` wants it."""
    return bool(re.fullmatch(r"[\w][\w.+-]*", name)) and len(name.encode()) <= 120


def _write(path: Path, data: bytes | Iterable[bytes], *, synced: bool) -> None:
    handle = create(path)
    try:
        for part in [data] if isinstance(data, bytes) else data:
            write_all(handle, part)
        if synced:
            sync(handle)
    finally:
        close(handle)
