"""Speed of the storage under a directory.

One large file and many small ones are written durably, dropped from the page cache where the kernel
allows it, read again and removed. Each part has a time limit, for slow network shares.
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
LIMIT_S = 5.0  # per part
_PIECE = os.urandom(4 * files.MIB)  # incompressible

Clock = Callable[[], float]
Steps = Generator[int, None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpeed:
    """Rates measured beneath a directory, within each part's time limit."""

    directory: str
    write_bytes_per_s: float  # one file, until durable
    read_bytes_per_s: float
    files_written_per_s: float  # 4 KiB each, until durable
    files_read_per_s: float  # opened, read, closed
    operations_per_s: float  # stat, rename, remove
    large_bytes: int  # written within the limit
    small_files: int
    #: False: reads may have been served from memory.
    cache_dropped: bool


def measure(
    directory: Path,
    *,
    large_bytes: int,
    small_files: int,
    limit_s: float = LIMIT_S,
    clock: Clock = time.perf_counter,
) -> StorageSpeed:
    """Measure the storage under a directory with room for ``large_bytes``, leaving nothing behind.

    Each of the five parts takes up to ``limit_s``; raises OSError if not writable or full.
    """

    def timed(steps: Steps) -> tuple[int, float]:
        """Return the sum of the steps within the limit, at least one, and their seconds."""
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
        finally:  # also when the time is over
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
    """Stat, rename and remove each file: three operations."""
    for name in names:
        name.stat()
        name.rename(name.with_suffix(".moved")).unlink()
        yield 3


def _drop_from_cache(paths: list[Path]) -> bool:
    for path in paths:
        with path.open("rb") as content:
            try:
                os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError:
                return False
    return True
