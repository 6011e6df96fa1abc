"""Small file systems that may be filled up."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

FILLER = "filler"
_SMALL_BYTES = 2**28


@contextlib.contextmanager
def small_disk(directory: Path, size_mib: int) -> Iterator[Path | None]:
    """A file system of this size at ``directory``; None where this user may not mount one."""
    directory.mkdir(parents=True, exist_ok=True)
    options = f"size={size_mib}m"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "nightgrid-chaos", str(directory)],
        capture_output=True,
    )
    if mounted.returncode != 0:
        yield None
        return
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def disk_of(path: Path) -> Path | None:
    """The small file system that holds a path; None where it is a file system of the machine's."""
    at = next(each for each in (path, *path.parents) if os.path.ismount(each))
    size = os.statvfs(at)
    return at if size.f_blocks * size.f_frsize < _SMALL_BYTES else None


def fill(disk: Path) -> Path:
    """Take all room of a small file system; the file that holds it, to be removed."""
    filler = disk / FILLER
    for piece in (65536, 1):
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(b"\0" * piece)
    return filler
