"""Scans that lack no row for the moment, for decisions that cannot be taken back."""

from __future__ import annotations

import stat
from pathlib import Path

from orchestrator.errors import StoreError
from orchestrator.results import paths
from orchestrator.results.scan import Scan


def refuse_unread(scan: Scan, what: str) -> None:
    """Refuse a scan that may lack rows which another look would find.

    Args:
        what: cannot be told by it, for people.

    Raises:
        StoreError: a file cannot be read now.
    """
    for damage in scan.damaged:
        if damage.path in scan.unread and not _is_foreign(damage.path):
            raise StoreError(
                f"{what} cannot be told now: {damage.path}: {damage.reason}. Try again; if it "
                f"stays so, move the file to {scan.directory.with_name(paths.QUARANTINE)}"
            )


def _is_foreign(path: Path) -> bool:
    """Return whether what has the name of a file is a directory, a pipe or a device: no row is in
    it, however often it is read."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False
