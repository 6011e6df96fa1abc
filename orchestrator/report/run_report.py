"""Read the rows of a run, large ones without samples and items, and write the page."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.analysis.flags import raised_by_job
from orchestrator.analysis.hardware import Published, parse_published, published_figures
from orchestrator.analysis.metrics import StepTime, step_times_of
from orchestrator.analysis.selection import newest_final
from orchestrator.analysis.summary import Summary, summarize
from orchestrator.core.errors import StoreError
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.status import RunStatus
from orchestrator.grid.vocabulary import PricesBlock
from orchestrator.report import html
from orchestrator.store import disk, reader
from orchestrator.store import files as run_files
from orchestrator.store.history import read_predictions, slow_checks_of, spread_between_runs
from orchestrator.store.lock import driver_lives
from orchestrator.store.store import Store
from workloads.util.files import SMALL_BYTES, read_text


def write_page(store: Store, summary: Summary, measurements: Sequence[Measurement]) -> Path:
    """Write the page of a run and return its path; raise StoreError on failure."""
    return write_aside(store.path / run_files.REPORT, page_text(store, summary, measurements))


def page_text(store: Store, summary: Summary, measurements: Sequence[Measurement]) -> str:
    """Return the page of a run, reading items of a large one; raise StoreError if unreadable."""

    def with_items(rows: Sequence[Measurement]) -> Sequence[Measurement]:
        if any(row.items or row.image for row in rows):
            return rows
        whole = reader.with_raw(store.tables_path, rows, "items", "image")
        filled = {row.job_id: row for row in whole}
        return [filled.get(row.job_id, row) for row in rows]

    with _without_garbage_collection():
        return html.render(summary, measurements, with_items)


def read_summary(
    store: Store, *, lean: bool = False, published: Sequence[Published] = ()
) -> tuple[Summary, tuple[Measurement, ...]]:
    """Return the summary of a run and its rows, without a lock; raise StoreError if unreadable.

    ``lean`` leaves samples and items out of the rows of a large run; ``published`` are figures to
    compare with, beside those of this package.
    """
    names: list[str] = []
    if lean:
        with contextlib.suppress(OSError):  # no rows, or the reader reports the error
            names = disk.names(store.tables_path)
    if reader.about_how_many(names) > html.ORDINARY_ROWS:
        with _without_garbage_collection():
            summary, measurements = _summarized(store, published, samples=False)
            if len(measurements) > html.ORDINARY_ROWS:
                return replace(summary, steps=_steps(store, summary)), measurements
    return _summarized(store, published, samples=True)


def read_published(path: Path) -> tuple[Published, ...]:
    """Return the figures of a user's own table; raise StoreError if unreadable."""
    try:
        return parse_published(read_text(path), path.name)
    except (OSError, ValueError) as error:
        raise StoreError(f"--published {path}: {error}") from error


def _summarized(
    store: Store, published: Sequence[Published], *, samples: bool
) -> tuple[Summary, tuple[Measurement, ...]]:
    status = read_status(store)  # before the rows, so that it never counts more of them
    contents = store.read(samples=samples)
    raised = None
    if not samples:
        rows = newest_final(contents.measurements)
        measured = [row for row in rows if row.state is State.SUCCEEDED]
        raw = reader.raw_batches(store.tables_path, measured, "samples", "items")
        raised = raised_by_job(rows, raw)
    summary = summarize(
        contents.measurements,
        [f"{damage.path.name} ({damage.reason})" for damage in contents.damaged],
        status=status,
        silent_s=0.0 if status is None else max(0.0, time.time() - status.at),
        published=(*published_figures(), *published),
        slow_cards=slow_checks_of(store.path),
        runs_differ=spread_between_runs(store.path),
        raised=raised,
        prices=read_prices(store.path),
        predictions=read_predictions(store.path),
    )
    return summary, contents.measurements


def read_prices(run: Path) -> PricesBlock | None:
    """Return the prices of a run's grid file; None if it has none, or cannot be read."""
    import yaml

    try:
        grid = yaml.safe_load(disk.read(run / run_files.GRID, SMALL_BYTES))
        return PricesBlock.model_validate(grid["prices"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None


def _steps(store: Store, summary: Summary) -> tuple[StepTime, ...]:
    trained = {
        row.job_id: row
        for row in summary.rows
        if row.state is State.SUCCEEDED and row.metrics.loss_first is not None
    }
    if not trained:
        return ()
    steps = {
        row.job_id: replace(step, row=trained[row.job_id])
        for row in reader.with_raw(store.tables_path, trained.values(), "samples")
        for step in step_times_of([row])
    }
    return tuple(steps[job_id] for job_id in trained if job_id in steps)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block: over 100,000 rows it costs a fifth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def read_status(store: Store) -> RunStatus | None:
    """Return the last status of the run's driver; None if missing or unreadable."""
    try:
        status = RunStatus.from_json(disk.read(store.path / run_files.STATUS, SMALL_BYTES).decode())
    except (OSError, ValueError):
        return None
    return current_status(status, store.path)


def current_status(status: RunStatus, run: Path) -> RunStatus:
    """Return the status, without what no longer holds if the driver has died."""
    if not status.finished and driver_lives(run) is False:
        return status.without_driver()
    return status


def write_aside(path: Path, content: str | bytes | Iterable[str]) -> Path:
    """Replace ``path`` atomically by new content; raise StoreError on failure."""
    if not path.name or "\0" in str(path):
        raise StoreError(f"{str(path)!r} does not name a file to write")
    if os.path.lexists(path) and not os.path.isfile(path):  # a device would be replaced, for one
        raise StoreError(f"cannot write {path}: it exists and is not a regular file")
    try:
        disk.make_directory(path.parent)
    except OSError as error:
        raise disk.write_error(path, error) from error
    if isinstance(content, str):
        content = content.encode()
    data = content if isinstance(content, bytes) else (text.encode() for text in content)
    return disk.replace_file(path.parent, path.name, data)
