"""Scans that lack no row for the moment, for decisions that cannot be taken back."""

from __future__ import annotations

from orchestrator.core.errors import StoreError
from orchestrator.results import paths
from orchestrator.results.scan import Scan


def refuse_unread(scan: Scan, what: str) -> None:
    """Refuse a scan that may lack rows which another look would find.

    Args:
        what: cannot be told by it, for people.

    Raises:
        StoreError: a file cannot be read now.
    """
    for damage in scan.unread:
        raise StoreError(
            f"{what} cannot be told now: {damage.path}: {damage.reason}. Try again; if it "
            f"stays so, move the file to {scan.directory.with_name(paths.QUARANTINE)}"
        )
