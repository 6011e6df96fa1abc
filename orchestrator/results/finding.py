"""Finds the run that is meant: by its name, by the path of its directory, or the newest."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.core.errors import StoreError
from orchestrator.results import paths
from orchestrator.results.directory import default_results_dir
from orchestrator.results.store import Store
from orchestrator.results.stored_run import runs

MOST_LISTED = 20


def find_run(run: str | os.PathLike[str] | None = None, results: Path | None = None) -> Store:
    """The store of a run that has been started, for reading.

    Args:
        run: name of a run in ``results``, or the path of a run's directory; None: the newest run.
        results: where runs lie; None: where they go by default.

    Raises:
        StoreError: there is no such run, or none at all; the message lists those that exist.
    """
    if run is not None and os.path.isdir(os.path.join(run, paths.ROWS)):
        path = Path(os.path.realpath(run))
        return Store.existing(path.parent, path.name)
    results = results or default_results_dir()
    known = existing_runs(results)
    name = known[0] if run is None else os.fspath(run)
    if name not in known:
        listed = "\n".join(f"    {one}" for one in known[:MOST_LISTED])
        more = len(known) - MOST_LISTED
        rest = f"\n    and {more} more" if more > 0 else ""
        raise StoreError(f"there is no run {name!r} in {results}. Newest first:\n{listed}{rest}")
    return Store.existing(results, name)


def existing_runs(results: Path) -> list[str]:
    """Names of the runs in a results directory, the one written last first.

    Raises:
        StoreError: there is none; the message says how to come by one.
    """
    known = runs(results)
    if not known:
        what = "there are no runs in" if os.path.isdir(results) else "there is no directory"
        raise StoreError(
            f"{what} {results}. Start a run with `nightgrid run GRID`, or say where runs are with "
            "--results DIR or NIGHTGRID_RESULTS."
        )
    return known
