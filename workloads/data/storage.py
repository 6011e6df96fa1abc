"""Speed of the storage under a directory: what a job can read from there, and how fast.

One large file and many small ones are written beneath the directory until they are durable, dropped
from the page cache as far as the kernel lets them be, and read again; then they are removed. Each
part ends at its time limit, so a slow network share takes no longer than a fast disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from workloads.util import files

LARGE_BYTES = 256 * files.MIB
SMALL_FILES, SMALL_FILE_BYTES = 2000, 4096
LIMIT_S = 5.0  # of each part
_PIECE = os.urandom(4 * files.MIB)  # which no file system compresses away

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpeed:
    """Rates measured beneath a directory; each covers what its part did in its time."""

    directory: str
    write_bytes_per_s: float  # of one file, until it was durable
    read_bytes_per_s: float
    files_written_per_s: float  # of 4 KiB, each until it was durable
    files_read_per_s: float  # opened, read, closed
    operations_per_s: float  # asking a file's size, renaming, removing
    large_bytes: int  # that were written, before the time was over
    small_files: int
    #: Whether the kernel could be told to forget what was written. If not, reading may have come
    #: from memory.
    cache_dropped: bool


def measure(
    directory: Path,
    *,
    large_bytes: int,
    small_files: int,
    limit_s: float = LIMIT_S,
    clock: Clock = time.perf_counter,
) -> StorageSpeed:
    """Measure the storage under a directory, in which nothing is left behind.

    Args:
        directory: where the data lies; needs room for ``large_bytes``.
        large_bytes, small_files: what to write at most.
        limit_s: seconds that each of the five parts may take.
        clock: seconds.

    Raises:
        OSError: the directory is not there, cannot be written, or is full.
    """
    aside = Path(tempfile.mkdtemp(prefix=".nightgrid-probe-", dir=directory))
    try:
        large = aside / "large"
        written, write_s = _timed(
            clock, lambda ends: _write_large(large, large_bytes, ends), limit_s
        )
        dropped = _forgotten([large])
        read, read_s = _timed(clock, lambda over: _read_large(large, over), limit_s)
        names = (aside / f"{number:06}" for number in range(small_files))
        small: list[Path] = []
        _, small_s = _timed(clock, lambda over: _write_small(names, small, over), limit_s)
        dropped = _forgotten(small) and dropped
        opened, opened_s = _timed(clock, lambda over: _read_small(small, over), limit_s)
        done, done_s = _timed(clock, lambda over: _operate(small, over), limit_s)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return StorageSpeed(
        directory=str(directory),
        write_bytes_per_s=written / write_s,
        read_bytes_per_s=read / read_s,
        files_written_per_s=len(small) / small_s,
        files_read_per_s=opened / opened_s,
        operations_per_s=done / done_s,
        large_bytes=written,
        small_files=len(small),
        cache_dropped=dropped,
    )


def _timed(
    clock: Clock, part: Callable[[Callable[[], bool]], int], limit_s: float
) -> tuple[int, float]:
    """Work that a part got done, and its seconds; it asks whether its time is over."""
    began = clock()
    done = part(lambda: clock() - began >= limit_s)
    return done, max(clock() - began, 1e-9)


def _write_large(file: Path, size: int, over: Callable[[], bool]) -> int:
    written = 0
    with file.open("xb", buffering=0) as out:
        while written < size and not (written and over()):
            written += out.write(_PIECE[: size - written])
        os.fsync(out.fileno())
    return written


def _read_large(file: Path, over: Callable[[], bool]) -> int:
    read = 0
    with file.open("rb", buffering=0) as content:
        while (piece := content.read(len(_PIECE))) and not (read and over()):
            read += len(piece)
    return read


def _write_small(names: Iterable[Path], made: list[Path], over: Callable[[], bool]) -> int:
    for name in names:
        with name.open("xb", buffering=0) as out:
            out.write(_PIECE[:SMALL_FILE_BYTES])
            os.fsync(out.fileno())
        made.append(name)
        if over():
            break
    return len(made)


def _read_small(names: list[Path], over: Callable[[], bool]) -> int:
    for number, name in enumerate(names, start=1):
        name.read_bytes()
        if over():
            return number
    return len(names)


def _operate(names: list[Path], over: Callable[[], bool]) -> int:
    """Ask the size of each file, rename and remove it: three operations."""
    for number, name in enumerate(names, start=1):
        name.stat()
        moved = name.rename(name.with_suffix(".moved"))
        moved.unlink()
        if over():
            return 3 * number
    return 3 * len(names)


def _forgotten(paths: list[Path]) -> bool:
    """Tell the kernel to forget what it keeps of files in memory; False where it cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            return False
        finally:
            os.close(handle)
    return True
