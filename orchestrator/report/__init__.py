"""The report: one pure ``Summary`` of a run's rows, printed in several ways.

``summary`` decides what is said; ``terminal``, ``page``, ``markdown`` and ``export`` say it.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import StoreError
from orchestrator.results import disk
from workloads import files
from workloads.files import SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.measurement import Measurement
    from orchestrator.report.summary import Summary
    from orchestrator.results.store import Store
    from orchestrator.run_status import RunStatus

PAGE_NAME = "report.html"


def write_report(store: Store) -> Path:
    """Read a run and write its page; see ``write_page``.

    Raises:
        StoreError: the rows cannot be read, or the page cannot be written.
    """
    return write_page(store, *read_summary(store))


def write_page(store: Store, summary: Summary, measurements: Sequence[Measurement]) -> Path:
    """Write the HTML page of a run beside its rows, and return its path.

    The page replaces an older one in a single step, so a reader never sees half of it.

    Raises:
        StoreError: the page cannot be written.
    """
    from orchestrator.report.page import render

    return write_aside(store.path / PAGE_NAME, render(summary, measurements))


def read_summary(store: Store) -> tuple[Summary, tuple[Measurement, ...]]:
    """The summary of a run, with the rows that it was made from. Takes no lock.

    Raises:
        StoreError: the rows cannot be read.
    """
    from orchestrator.reference_data import reference
    from orchestrator.report.effects import workload_defaults
    from orchestrator.report.progress import underway_of
    from orchestrator.report.summary import summarize

    status = read_status(store)  # before the rows, so that it never counts more of them
    contents = store.read()
    summary = summarize(
        contents.measurements,
        [f"{damage.path.name} ({damage.reason})" for damage in contents.damaged],
        underway=underway_of(status, time.time()),
        reference=reference(),
        defaults=workload_defaults,
    )
    return summary, contents.measurements


def read_status(store: Store) -> RunStatus | None:
    """What the run's driver wrote last; None where there is no such word, or none to understand."""
    from orchestrator.run_status import RunStatus

    try:
        return RunStatus.from_json(disk.read(store.path / "status.json", SMALL_BYTES).decode())
    except (OSError, ValueError):
        return None


def write_aside(path: Path, text: str) -> Path:
    """Write ``text`` under a temporary name in the same directory, then rename it to ``path``.

    Raises:
        StoreError: the file cannot be written.
    """
    if not path.name or "\0" in str(path):
        raise StoreError(f"{str(path)!r} is no name of a file to write")
    if os.path.lexists(path) and not os.path.isfile(path):  # a device would be replaced, for one
        raise StoreError(f"cannot write {path}: it is there and no ordinary file")
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(files.create(aside), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(aside, path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return path
