"""Compiled code of cards that is kept on a node's own disk, from one night to the next.

Compiling a model for a card may take longer than measuring it, so a device whose software keeps
what it compiled gets a directory for that, by the software and the card that made it: code of
another release, or for another card, is never found. It lies on a local disk under
``NIGHTGRID_COMPILED`` (default ``~/.cache/nightgrid-compiled``) and outlives Ray. The software
itself keeps each directory below ``NIGHTGRID_COMPILED_MIB``; those that nobody has used for a month
are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from workloads.base import BadConfiguration

DIRECTORY, SIZE = "NIGHTGRID_COMPILED", "NIGHTGRID_COMPILED_MIB"
_SIZE_MIB = 8192
UNUSED_S = 30 * 86_400.0


def compiled_directory(made_by: str) -> str | None:
    """Directory for code of this software and card, made if need be; None where it cannot be.

    ``made_by`` has versions and card in words; empty: nothing is compiled that could be kept.
    """
    if not made_by:
        return None
    root = Path(os.environ.get(DIRECTORY) or "~/.cache/nightgrid-compiled").expanduser()
    directory = root / re.sub(r"[^A-Za-z0-9._+-]+", "-", made_by)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.utime(directory)
        _remove_unused(root, directory.stat().st_mtime)
    except OSError:
        return None  # code is compiled anew, no more
    return str(directory.absolute())


def size_mib() -> int:
    """Size limit of each directory of a kind of process, in MiB.

    Raises:
        BadConfiguration: ``NIGHTGRID_COMPILED_MIB`` is no whole number above 0.
    """
    told = os.environ.get(SIZE, "")
    if told and (not told.isdecimal() or int(told) < 1):
        raise BadConfiguration(f"{SIZE}={told!r} is not a size; give a whole number of MiB from 1")
    return int(told or _SIZE_MIB)


def _remove_unused(root: Path, now: float) -> None:  # as the disk's own clock has it
    """Remove directories of releases and cards that no process has been started with for long."""
    for directory in root.iterdir():
        with contextlib.suppress(OSError):
            old = now - directory.stat().st_mtime > UNUSED_S
            if old and directory.is_dir() and not directory.is_symlink():
                shutil.rmtree(directory, ignore_errors=True)
