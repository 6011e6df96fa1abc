"""The private directory of a driver that runs its own Ray: sockets, logs, and the cluster's token.

It is made with a marker (``workloads/owned_directory.py``), so that whoever comes after a killed
driver can tell it from everything else that lies beside it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from workloads.owned_directory import (
    OwnedDirectory,
    abandoned_directories,
    make_owned_directory,
)

_PREFIX = "ng-"
_LONGEST_BASE = 23  # Ray's sockets lie below, and a socket's path has at most 107 characters


def make_private_directory(owner: str, prefix: str = _PREFIX) -> OwnedDirectory:
    """Make this process's directory, of mode 0700, marked with the driver's turn at its run. A
    ``prefix`` of its own begins with the usual one.

    Raises:
        OSError: it cannot be written.
    """
    return make_owned_directory(prefix, base_directories()[0], owner)


def abandoned_private_directories() -> list[OwnedDirectory]:
    """Directories of this user's drivers that were killed, on this boot, in this pid namespace."""
    return [found for base in base_directories() for found in abandoned_directories(_PREFIX, base)]


def base_directories() -> list[Path]:
    """Directories in which they are made, the one for this process first."""
    base, usual = Path(tempfile.gettempdir()), Path("/tmp")
    return [base, usual] if base != usual and len(str(base)) <= _LONGEST_BASE else [usual]
