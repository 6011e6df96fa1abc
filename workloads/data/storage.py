"""Speed of the storage under a directory: what a job can read from there, and how fast.

One large file and many small ones are written beneath the directory until they are durable, dropped
from the page cache as far as the kernel lets them be, and read again; then they are removed. Each
part ends at its time limit, so a slow network share takes no longer than a fast disk.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from workloads.util import files

LARGE_BYTES = 256 * files.MIB
SMALL_FILES, SMALL_FILE_BYTES = 2000, 4096
LIMIT_S = 5.0  # of each part
_PIECE = os.urandom(4 * files.MIB)  # which no file system compresses away

Clock = Callable[[], float]
Steps = Generator[int, None, None]


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

    def timed(steps: Steps) -> tuple[int, float]:
        """The sum of the steps that fit into the limit, at least one, and their seconds."""
        began, done = clock(), 0
        with contextlib.closing(steps):
            for size in steps:
                done += size
                if clock() - began >= limit_s:
                    break
        return done, max(clock() - began, 1e-9)

    with tempfile.TemporaryDirectory(prefix=".nightgrid-probe-", dir=directory) as folder:
        large = Path(folder) / "large"
        small = [Path(folder) / f"{number:06}" for number in range(small_files)]
        written, write_s = timed(_write_large(large, large_bytes))
        dropped = _drop_from_cache([large])
        read, read_s = timed(_read_large(large))
        made, make_s = timed(_write_small(small))
        small = small[:made]
        dropped = _drop_from_cache(small) and dropped
        opened, open_s = timed(1 for file in small if file.read_bytes())
        operations, operate_s = timed(_operate(small))
    return StorageSpeed(
        directory=str(directory),
        write_bytes_per_s=written / write_s,
        read_bytes_per_s=read / read_s,
        files_written_per_s=made / make_s,
        files_read_per_s=opened / open_s,
        operations_per_s=operations / operate_s,
        large_bytes=written,
        small_files=made,
        cache_dropped=dropped,
    )


def _write_large(file: Path, size: int) -> Steps:
    with file.open("xb", buffering=0) as out:
        try:
            for start in range(0, size, len(_PIECE)):
                yield out.write(_PIECE[: size - start])
        finally:  # what is written when the time is over is made durable, too
            os.fsync(out.fileno())


def _read_large(file: Path) -> Steps:
    with file.open("rb", buffering=0) as content:
        while piece := content.read(len(_PIECE)):
            yield len(piece)


def _write_small(names: list[Path]) -> Steps:
    for name in names:
        with name.open("xb", buffering=0) as out:
            out.write(_PIECE[:SMALL_FILE_BYTES])
            os.fsync(out.fileno())
        yield 1


def _operate(names: list[Path]) -> Steps:
    """Ask the size of each file, rename and remove it: three operations."""
    for name in names:
        name.stat()
        name.rename(name.with_suffix(".moved")).unlink()
        yield 3


def _drop_from_cache(paths: list[Path]) -> bool:
    """Tell the kernel to forget what it has of files in memory; False where it cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        with path.open("rb") as content:
            try:
                os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError:
                return False
    return True
