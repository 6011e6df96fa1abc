"""The report: one pure ``Summary`` of a run's rows, printed in several ways.

``summary`` decides what is said; ``terminal``, ``page``, ``markdown`` and ``export`` say it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.analysis.summary import SETTLED, Summary
from orchestrator.core.errors import StoreError
from orchestrator.core.measurement import Measurement
from orchestrator.results import disk, paths
from workloads import files
from workloads.files import SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from orchestrator.analysis.flags import Raised
    from orchestrator.analysis.summary import Summary
    from orchestrator.core.measurement import Measurement
    from orchestrator.results.store import Store
    from orchestrator.results.stored_run import Contents
    from orchestrator.runtime.status import RunStatus


def write_page(store: Store, summary: Summary, measurements: Sequence[Measurement]) -> Path:
    """Write the HTML page of a run beside its rows, and return its path.

    The page replaces an older one in a single step, so a reader never sees half of it.

    Raises:
        StoreError: the page cannot be written.
    """
    return write_aside(store.path / paths.REPORT, page_text(store, summary, measurements))


def page_text(store: Store, summary: Summary, measurements: Sequence[Measurement]) -> str:
    """The HTML page of a run, which reads what a large run's summary was made without.

    Raises:
        StoreError: the rows cannot be read.
    """
    from orchestrator.report.page import render

    def with_items(rows: Sequence[Measurement]) -> Sequence[Measurement]:
        from orchestrator.results.bulk import with_raw

        if any(row.items or row.image for row in rows):
            return rows
        filled = {row.job_id: row for row in with_raw(store, rows, "items", "image")}
        return [filled.get(row.job_id, row) for row in rows]

    with _collecting_later():
        return render(summary, measurements, with_items)


@contextlib.contextmanager
def _collecting_later() -> Iterator[None]:
    """Collect no garbage within the block: rows make none, and looking through a hundred thousand
    of them again and again takes a fifth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def read_summary(store: Store, *, lean: bool = False) -> tuple[Summary, tuple[Measurement, ...]]:
    """The summary of a run, with the rows that it was made from. Takes no lock.

    Args:
        store: the run's.
        lean: leave samples and items out of the rows of a large run, of which there are millions;
            the summary is the same, but for its rows.

    Raises:
        StoreError: the rows cannot be read.
    """
    from orchestrator.results.bulk import about_how_many

    names: list[str] = []
    if lean:
        with contextlib.suppress(OSError):  # then there are no rows, or whoever reads them tells
            names = disk.names(store.tables_path)
    if about_how_many(names) > ORDINARY_ROWS:
        with _collecting_later():
            return _read_large(store)
    return _read(store, store.read)


def _read_large(store: Store) -> tuple[Summary, tuple[Measurement, ...]]:
    from orchestrator.analysis.metrics import step_times_of
    from orchestrator.core.job import State
    from orchestrator.results.bulk import read_lean, with_raw

    summary, measurements = _read(store, lambda: read_lean(store), _raised_from_columns)
    if len(measurements) <= ORDINARY_ROWS:
        return _read(store, store.read)
    trained = {
        row.job_id: row
        for row in summary.rows
        if row.state is State.SUCCEEDED and row.metrics.loss_first is not None
    }
    steps = {}
    for row in with_raw(store, trained.values(), "samples") if trained else ():
        for one in step_times_of([row]):
            steps[row.job_id] = replace(one, row=trained[row.job_id])
    in_order = tuple(steps[job_id] for job_id in trained if job_id in steps)
    return replace(summary, steps=in_order), measurements


def _raised_from_columns(
    store: Store, measurements: Sequence[Measurement]
) -> dict[str, tuple[Raised, ...]]:
    """The flags of rows that were read without samples and items, which are read for it."""
    from orchestrator.analysis.flags import raised_by_job
    from orchestrator.analysis.selection import newest_final
    from orchestrator.core.job import State
    from orchestrator.results.bulk import raw_batches

    rows = newest_final(measurements)
    measured = [row for row in rows if row.state is State.SUCCEEDED]
    return raised_by_job(rows, raw_batches(store, measured, "samples", "items"))


def _read(
    store: Store,
    read: Callable[[], Contents],
    raise_flags: Callable[[Store, Sequence[Measurement]], dict[str, tuple[Raised, ...]]]
    | None = None,
) -> tuple[Summary, tuple[Measurement, ...]]:
    from orchestrator.analysis.hardware import reference
    from orchestrator.analysis.summary import summarize, underway_of
    from orchestrator.results.passports import slow_cards_of, spread_between_runs

    status = read_status(store)  # before the rows, so that it never counts more of them
    contents = read()
    summary = summarize(
        contents.measurements,
        [f"{damage.path.name} ({damage.reason})" for damage in contents.damaged],
        underway=underway_of(status, time.time()),
        reference=reference(),
        slow_cards=slow_cards_of(store.path),
        runs_differ=spread_between_runs(store.path),
        planned=status.total if status is not None else None,
        raised=raise_flags(store, contents.measurements) if raise_flags else None,
    )
    return summary, contents.measurements


def read_status(store: Store) -> RunStatus | None:
    """Last status of the run's driver; None where there is none, or none that can be read."""
    from orchestrator.runtime.status import RunStatus

    try:
        status = RunStatus.from_json(disk.read(store.path / paths.STATUS, SMALL_BYTES).decode())
    except (OSError, ValueError):
        return None
    return as_it_stands(status, store.path)


def as_it_stands(status: RunStatus, run: Path) -> RunStatus:
    """The last status of a run's driver, without what is not true any more if that has died."""
    from orchestrator.results.lock import driver_lives

    if not status.finished and driver_lives(run) is False:
        return status.without_driver()
    return status


def write_aside(path: Path, content: str | bytes | Iterable[str]) -> Path:
    """Write text, whole or in parts, or bytes: under a temporary name in the same directory, which
    is then renamed to ``path``.

    Raises:
        StoreError: the file cannot be written.
    """
    if not path.name or "\0" in str(path):
        raise StoreError(f"{str(path)!r} does not name a file to write")
    if os.path.lexists(path) and not os.path.isfile(path):  # a device would be replaced, for one
        raise StoreError(f"cannot write {path}: it exists and is not a regular file")
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(files.create(aside), "wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                texts = [content] if isinstance(content, str) else content
                file.writelines(text.encode("utf-8") for text in texts)
        os.replace(aside, path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return path


# The part of a run that its page shows: all of an ordinary run, and of a larger one as much.
#
# A page of a hundred thousand rows would take minutes to make, and a phone could not open it. The
# figures at its top count all rows; its tables and its list of rows are cut, and the page says what
# is left out and where it is. Rows without an answer come first, since they are what one looks for.

#: Runs of up to so many jobs are shown whole.
ORDINARY_ROWS = 10_000
#: Limits for a larger run: tables, winners and causes, with the rows of the first tables linked.
MOST_TABLES = 300
MOST_WINNERS = 300
MOST_CAUSES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Numbers of the things that a page does not show."""

    rows: int = 0
    tables: int = 0
    winners: int = 0
    causes: int = 0


def shown_of(summary: Summary) -> tuple[Summary, tuple[Measurement, ...], LeftOut]:
    """The summary as the page prints it, the rows that it lists, and what is left out."""
    if len(summary.rows) <= ORDINARY_ROWS:
        return summary, summary.rows, LeftOut()
    tables = summary.tables[:MOST_TABLES]
    rows = _first(
        (row for row in summary.rows if row.state not in SETTLED),
        (row for table in tables for row in table.cells.values()),
        summary.rows,
    )
    shown = replace(
        summary,
        tables=tables,
        contests=summary.contests[:MOST_WINNERS],
        causes=summary.causes[:MOST_CAUSES],
    )
    left_out = LeftOut(
        rows=len(summary.rows) - len(rows),
        tables=len(summary.tables) - len(tables),
        winners=len(summary.contests) - len(shown.contests),
        causes=len(summary.causes) - len(shown.causes),
    )
    listed = {row.job_id for row in rows}
    return shown, tuple(row for row in summary.rows if row.job_id in listed), left_out


def _first(*groups: Iterable[Measurement]) -> list[Measurement]:
    """The first rows of the groups, each once."""
    chosen: dict[str, Measurement] = {}
    for group in groups:
        for row in group:
            if len(chosen) == ORDINARY_ROWS:
                return list(chosen.values())
            chosen.setdefault(row.job_id, row)
    return list(chosen.values())
