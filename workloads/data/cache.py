"""The node's cache of artefacts made once: converted models, embedded models, samples.

The root is ``NIGHTGRID_CACHE`` (default ``~/.cache/nightgrid``). Workers race for the same key and
may be killed at any time, so a directory is built aside under a file lock, flushed and renamed: a
name that exists is complete. Keys include the recipe's version, so nothing stale is read.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from weakref import WeakSet

from workloads.base import DataMissing

_LOCK_POLL_S = 0.2
#: Open lock files. Forked children close them: else they would hold the locks after this process
#: was killed.
_LOCK_FILES: WeakSet[IO[str]] = WeakSet()
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def _close_inherited() -> None:
    for handle in list(_LOCK_FILES):
        handle.close()


os.register_at_fork(after_in_child=_close_inherited)


def cache_root() -> Path:
    """Return the cache directory, created if missing; raises DataMissing if not writable."""
    root = Path(os.environ.get("NIGHTGRID_CACHE") or "~/.cache/nightgrid")
    try:
        root = root.expanduser()
        root.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(root, os.W_OK) else "is not writable"
    except OSError as error:
        problem = f"cannot be made ({error.strerror})"
    except RuntimeError:
        problem = f"cannot be made (there is no home directory {root.parts[0]})"
    if problem:
        raise DataMissing(
            f"the cache directory {root} {problem}; "
            "set NIGHTGRID_CACHE to a directory that can be written to"
        )
    return root


def cached_directory(key: str, build: Callable[[Path], None]) -> Path:
    """Return the directory of ``key``, filled by ``build(empty_directory)`` if missing.

    Safe across processes: one builds, the others wait. If ``build`` raises, nothing is kept.
    """
    if not _KEY.fullmatch(key):
        raise ValueError(f"cache key {key!r}: letters, digits, '.', '_' and '-' only")
    final = cache_root() / key
    if final.is_dir():
        return final
    with file_lock(final.with_name(f".{key}.lock")):
        if not final.is_dir():  # another process may have built it while we waited
            remove_abandoned(final)
            try:
                build_aside(final, build)
            except OSError:
                if not final.is_dir():  # else another built it where there are no locks
                    raise
    return final


def build_aside(final: Path, build: Callable[[Path], None], *, replace: bool = False) -> None:
    """Fill a directory beside ``final``, flush it, and rename it to ``final`` in one step.

    ``replace`` removes an existing ``final`` once ``build`` has succeeded; else it is an OSError.
    """
    aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.building-", dir=final.absolute().parent))
    old = aside.with_name(aside.name.replace(".building-", ".replaced-"))
    try:
        with _locked_directory(aside):
            build(aside)
            for path in (aside, *aside.rglob("*")):
                # mkdtemp and safetensors create private files; a cache is shared.
                path.chmod(0o755 if path.is_dir() else 0o644)
            flush_tree(aside)
            if replace and final.exists():
                final.rename(old)
            aside.rename(final)
    except BaseException:
        if old.exists() and not final.exists():
            old.rename(final)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    _flush(final.absolute().parent)


def remove_abandoned(final: Path) -> None:
    """Remove what killed builders of ``final`` left; an interrupted replacement is undone."""
    beside, name = final.absolute().parent, f".{glob.escape(final.name)}"
    for old in beside.glob(f"{name}.replaced-*"):
        building = old.with_name(old.name.replace(".replaced-", ".building-"))
        with _locked_directory(building) as locked:
            if building.exists() and not locked:
                continue
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(final)
    for leftover in beside.glob(f"{name}.building-*"):
        with _locked_directory(leftover) as locked:
            if locked:
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked_directory(directory: Path) -> Iterator[bool]:
    """Try to lock a directory itself; yield True on success (file systems differ)."""
    descriptor, locked = -1, False
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    try:
        yield locked
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """Make every file below ``directory`` durable before a rename publishes it."""
    for path in (*directory.rglob("*"), directory):
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the system drops it when the process dies.

    Goes on without one where the file system has none: who comes second builds in vain.
    """
    with open(path, "a") as handle:
        _LOCK_FILES.add(handle)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def try_lock(path: Path, patience_s: float = 0.0) -> IO[str] | None:
    """Return a file locked until it is closed; None if others hold it beyond ``patience_s``."""
    handle = open(path, "a")  # noqa: SIM115 - the lock lasts until the caller closes it
    _LOCK_FILES.add(handle)
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= until:
                handle.close()
                return None
            time.sleep(_LOCK_POLL_S)
        except OSError:  # the file system has no locks
            break
    return handle
