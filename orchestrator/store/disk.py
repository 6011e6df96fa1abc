"""The calls on which the safety of rows rests, and files that are whole or absent.

Nothing else in this package touches files of rows. Each call is one system call or two, so that a
test can put a disk of its own in their place: one that loses what was not synced, gets full, or
flips bits (``tests/night``).

A file is written under a name that readers ignore, synced, and renamed; then its directory is
synced. A crash at any instant leaves the old state or the new.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.errors import StoreError, StoreFull
from workloads.util import files

#: Size limit of a file of rows; the largest are compacted ones. Smaller files have own limits.
LARGEST_BYTES = 2 * 2**30
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
#: Codes of failures that say nothing of the file: see ``may_pass``.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT)


# ---------------------------------------------------------------- calls

#: Open a new file for writing and return its handle; it replaces any file of this name. A link that
#: somebody planted there is replaced, not followed.
create = files.create
write = os.write
sync = os.fsync
close = os.close
rename = os.rename
remove = os.unlink
names = os.listdir
#: Return whether a name is taken, also by a link that leads nowhere.
is_there = os.path.lexists


def create_new(path: Path) -> int:
    """Open a new file for writing and return its handle.

    Raises:
        FileExistsError: something has this name.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def has_name(handle: int, path: Path) -> bool:
    """Return whether an open file can be found by its name. File systems that count no links are
    asked for the name."""
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
    """The content of an ordinary file, and of nothing else that may lie in its place: a pipe would
    be waited for for ever, and a device never ends. ``follow``: it may be a symbolic link.

    Raises:
        OSError: it cannot be read, is no ordinary file, or is larger than the limit.
    """
    return files.read_bytes(path, limit_bytes=limit_bytes, follow=follow)


def may_be_ordinary(path: Path) -> bool:
    """Return whether a name may be that of an ordinary file: not of a directory or a device. A link
    that leads nowhere may lead to one later."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return True


# ---------------------------------------------------------------- whole files


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A file of results, or a line of one, that cannot be trusted, and why.

    Attributes:
        path: of the file, where it lies now.
        passing: another look may find it sound: nothing is known of its bytes.
    """

    path: Path
    reason: str
    passing: bool = False


def may_pass(error: OSError) -> bool:
    """Return whether a failure to read says nothing of the file: another look may find it sound."""
    return error.errno in _PASSING


def digest(data: bytes) -> str:
    """The part of the SHA-256 that stands in names of files and before lines of logs."""
    return hashlib.sha256(data).hexdigest()[:16]


def write_durably(
    directory: Path, name: str, data: bytes, allowed: Callable[[], object] = lambda: None
) -> Path:
    """Create or replace ``directory/name``; on return it survives a power failure.

    Args:
        allowed: called when the data is safe, before it has its name; it raises a StoreError if
            the file must not appear.

    Raises:
        StoreFull: no space is left; the directory is as it was.
        StoreError: anything else the file system says.
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


def replace_file(directory: Path, name: str, data: bytes) -> Path:
    """Replace a file that is only looked at (a page, a status): whole, but not synced."""
    aside = directory / f".{name}.{os.getpid()}.aside"
    try:
        _write(aside, data, synced=False)
        rename(aside, directory / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            remove(aside)
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
    """``name`` if it can safely name a file or directory of results, else an error.

    Raises:
        StoreError: it is empty, too long, hidden, or could lead out of its directory.
    """
    if is_valid_name(name):
        return name
    raise StoreError(
        f"{what} {name!r} cannot name a directory or file: use letters, digits, '_', '-', '+' and "
        "'.', beginning with a letter or digit, 120 bytes at most"
    )


def is_valid_name(name: str) -> bool:
    """Return whether a name is as ``valid_name`` wants it."""
    return bool(re.fullmatch(r"[\w][\w.+-]*", name)) and len(name.encode()) <= 120


def _write(path: Path, data: bytes, *, synced: bool) -> None:
    handle = create(path)
    try:
        write_all(handle, data)
        if synced:
            sync(handle)
    finally:
        close(handle)
