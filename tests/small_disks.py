"""Real file systems of a few kilobytes or megabytes, for tests of what happens when they are
full."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

#: What ``fill`` fills a file system with.
FILLER = "filler"
_SMALL_BYTES = 2**28


@contextlib.contextmanager
def mounted_disk(directory: Path, size_bytes: int) -> Iterator[Path | None]:
    """A file system of this size at ``directory``; None where this process may not mount one."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "nightgrid-test", str(directory)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextlib.contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of this size at ``directory``; skips the test where none may be mounted."""
    with mounted_disk(directory, size_bytes) as disk:
        if disk is None:
            pytest.skip("this process may not mount a file system")
        yield disk


def disk_of(path: Path) -> Path | None:
    """The small file system that holds a path; None where it is a file system of the machine's."""
    at = next(each for each in (path, *path.parents) if os.path.ismount(each))
    size = os.statvfs(at)
    return at if size.f_blocks * size.f_frsize < _SMALL_BYTES else None


def fill(disk: Path) -> Path:
    """Leave no byte of a small file system; returns the file that holds it all, to be removed."""
    filler = disk / FILLER
    for piece in (65536, 1):
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(b"\0" * piece)
    return filler
