"""The directory of a run that was fetched from elsewhere: a copy that is only read.

``fetched.json`` says of which run it is, so that a run of one's own is never mixed with one of the
same name from a cluster. Nor is a copy with which a driver has gone on here: it has made other
files of the rows that it found, and those that a fetch brings would hold them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from orchestrator.core.errors import StoreError
from orchestrator.results import disk, paths
from orchestrator.results.store import Store
from workloads.util import files


def fetched_directory(results: Path, name: str, source: str, told: Mapping[str, object]) -> Path:
    """The directory for a copy of a run, made if it is not there.

    Args:
        name: of the copy.
        source: the address it is fetched from, for people.
        told: what the sender says of the run; ``run_id`` is by what it is known.

    Raises:
        StoreError: a run of one's own, a copy of another one, or one with which a driver has gone
            on, has this name.
    """
    store = Store.open(results, name)
    run_id = str(told.get("run_id") or "")
    known = None
    if disk.is_there(store.path):
        known = fetched_id(store.path)
        if known is None or (run_id and known not in ("", run_id)):
            whose = "a run of this machine" if known is None else "a copy of another run"
            raise StoreError(
                f"{store.path} is {whose}; fetch into another directory (--results DIR) or under "
                "another name (--as NAME)"
            )
        if has_gone_on(store.path):
            raise StoreError(
                f"a driver has gone on with {store.path} here, a copy that was fetched: what comes "
                "now could hold its rows again. Fetch into another directory (--results DIR) or "
                "under another name (--as NAME)"
            )
    if known is None or (run_id and not known):  # a copy begun before its run had an id gets it
        disk.make_directory(store.tables_path)
        text = json.dumps({"run_id": run_id, "from": source})
        store.write_file(paths.FETCHED, text)
    return store.path


def has_gone_on(copy: Path) -> bool:
    """Return whether a driver works on a copy, or has: every driver leaves the id of its run, which
    is never fetched."""
    return any(disk.is_there(copy / name) for name in (paths.RUN_ID, paths.LOCK))


def fetched_id(run: Path) -> str | None:
    """The id of the run of which a directory is a copy; None of one that is none."""
    try:
        known = json.loads(files.read_text(run / paths.FETCHED))
        return str(known["run_id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
