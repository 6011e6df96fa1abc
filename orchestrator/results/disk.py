"""The calls on which the safety of rows rests; nothing else in ``results`` touches their files.

Each is one system call or two, so that a test can put a disk of its own in their place: one that
loses what was not synced, gets full, or flips bits (``tests/night``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from workloads.util import files

#: Size limit of a file of rows; the largest are compacted ones. Smaller files have own limits.
LARGEST_BYTES = 2 * 2**30


def create(path: Path) -> int:
    """Open a new file for writing and return its handle; it replaces any file of this name. A link
    that somebody planted there is replaced, not followed."""
    return files.create(path)


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


def open_to_append(path: Path) -> int:
    """Open a file that is there, and no link, for writing at its end; its handle."""
    return files.open_to_append(path, create=False)


def write(handle: int, data: bytes | memoryview) -> int:
    """Write some of the data; how many bytes."""
    return os.write(handle, data)


def truncate(handle: int, length: int) -> None:
    """Cut an open file to so many bytes."""
    os.ftruncate(handle, length)


def sync(handle: int) -> None:
    """Make the content of a file survive a power failure."""
    os.fsync(handle)


def close(handle: int) -> None:
    """Close a file."""
    os.close(handle)


def rename(source: Path, target: Path) -> None:
    """Give a file another name, in the place of whatever had it."""
    os.rename(source, target)


def remove(path: Path) -> None:
    """Remove a name."""
    os.unlink(path)


def make_directory(path: Path) -> None:
    """Make a directory, and those above it, unless it is there."""
    path.mkdir(parents=True, exist_ok=True)


def make_private_directory(path: Path) -> None:
    """Make a directory that no other user may look into, unless it is there."""
    path.mkdir(mode=0o700, exist_ok=True)


def remove_empty_directory(path: Path) -> None:
    """Remove a directory unless something is in it."""
    with contextlib.suppress(OSError):
        path.rmdir()


def is_ours(path: Path) -> bool:
    """Return whether it is a directory of this user's, and no link to one."""
    try:
        found = path.lstat()
    except (OSError, ValueError):  # a ValueError: a NUL in the name
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


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


def names(directory: Path) -> list[str]:
    """The names in a directory."""
    return os.listdir(directory)


def read(path: Path, limit_bytes: int = LARGEST_BYTES, *, follow: bool = True) -> bytes:
    """The content of an ordinary file, and of nothing else that may lie in its place: a pipe would
    be waited for for ever, and a device never ends. ``follow``: it may be a symbolic link.

    Raises:
        OSError: it cannot be read, is no ordinary file, or is larger than the limit.
    """
    return files.read_bytes(path, limit_bytes=limit_bytes, follow=follow)


def is_there(path: Path) -> bool:
    """Return whether the name is taken, also by a link that leads nowhere."""
    return os.path.lexists(path)


def may_be_ordinary(path: Path) -> bool:
    """Return whether a name may be that of an ordinary file: not of a directory or a device. A link
    that leads nowhere may lead to one later."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return True


def numbers(directory: Path) -> tuple[int, int, int]:
    """The device and inode number of a directory, and the id of its file system."""
    found = os.stat(directory)
    return found.st_dev, found.st_ino, os.statvfs(directory).f_fsid
