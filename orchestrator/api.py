"""Nightgrid from Python: ``from nightgrid import Grid, load, run``.

    grid = Grid.from_file("grids/smoke.yaml")
    grid.plan(emulate="2x8")             # what `nightgrid plan` prints
    night = run(grid, emulate="2x8")     # what `nightgrid run` does
    night.best                           # the fastest setting, and whether it has won
    night.to_pandas()                    # one line a job
    night.compare(load("last-week"))     # what `nightgrid compare last-week smoke` says

The commands use the same objects. Importing this loads neither torch nor Ray.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from orchestrator.core.errors import ExtraMissing
from orchestrator.core.job import State
from orchestrator.core.plan import Plan
from orchestrator.grid import grid_path
from orchestrator.grid.parser import Grid as GridValue
from orchestrator.grid.parser import grid_of_values, load_grid, parse_grid
from orchestrator.util.format import number, one_line
from orchestrator.watch.plan_text import html_table, plan_html

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa

    from orchestrator.analysis.comparison import RunComparison
    from orchestrator.analysis.summary import Summary
    from orchestrator.core.measurement import Measurement
    from orchestrator.driver.options import RunOptions
    from orchestrator.report.query import Answer
    from orchestrator.store.store import Store

MOST_ROWS_SHOWN = 20


class Best(NamedTuple):
    """The fastest setting of one piece of work on one device, and how sure that is."""

    row: Measurement
    label: str  # its settings that differ from others', as the report has them
    verdict: str  # "clear winner", "tied", "not known" or "alone"
    reason: str  # the verdict in the report's words


#: Columns of ``records`` with seconds since the epoch.
TIMES = {"recorded_at", "started_at", "ended_at"}


def load(
    run: str | os.PathLike[str] | None = None, *, results: str | os.PathLike[str] | None = None
) -> Run:
    """Return a finished or running run by name or directory, None: the newest; raises StoreError,
    which lists the existing runs, if there is none."""
    from orchestrator.store.store import find_run

    return Run(find_run(run, Path(results) if results is not None else None))


class Run:
    """Rows of one run, read once; ``load`` again for newer ones."""

    def __init__(self, store: Store, *, plan: Plan | None = None) -> None:
        self.store = store
        self.plan = plan  # None for a run that was loaded

    @property
    def name(self) -> str:
        """The run's name."""
        return self.store.run

    @property
    def path(self) -> Path:
        """The run's directory: ``rows/`` has the Parquet files, ``grid.yaml`` the grid."""
        return self.store.path.resolve()

    @cached_property
    def _read(self) -> tuple[Summary, tuple[Measurement, ...]]:
        from orchestrator.report.run_report import read_summary

        return read_summary(self.store)

    @property
    def summary(self) -> Summary:
        """Summary of the report: ``verdict``, ``rankings``, ``tables``, ``causes`` and more."""
        return self._read[0]

    @property
    def rows(self) -> tuple[Measurement, ...]:
        """The newest final row of each job."""
        return self.summary.rows

    @property
    def attempts(self) -> tuple[Measurement, ...]:
        """Every row, failed attempts and earlier invocations included, in order of recording."""
        return self._read[1]

    @property
    def best(self) -> Best | None:
        """The first of the report's rankings: of other work ``summary.rankings`` has others. None
        if nothing can be ranked."""
        from orchestrator.report.wording import standing

        for ranking in self.summary.rankings:
            label = self.summary.chosen(ranking.fastest)
            reason = standing(ranking, self.summary.chosen)
            return Best(ranking.fastest, label, ranking.verdict.value, reason)
        return None

    @property
    def states(self) -> Mapping[State, int]:
        """Count the jobs that ended in each state."""
        return self.summary.counts

    @property
    def ok(self) -> bool:
        """Return whether every job was measured, does not fit or is unsupported here, and at least
        one was measured."""
        summary = self.summary
        return bool(summary.measured) and not summary.unsettled and summary.underway is None

    def table(self, *, every: bool = False) -> pa.Table:
        """Rows with every column of docs/schema.md and raw samples; ``every``: all attempts."""
        from orchestrator.store.codec import to_table

        return to_table(self.attempts if every else self.rows)

    def records(self, *, every: bool = False) -> list[dict[str, object]]:
        """The rows as plain mappings: the columns of `nightgrid report --format csv`."""
        from orchestrator.report.export import records

        return records(self.attempts if every else self.rows)

    def to_pandas(self, *, every: bool = False) -> pandas.DataFrame:
        """``records`` as a pandas table, with times as timestamps; raises ExtraMissing without
        pandas."""
        pandas = _library("pandas")
        frame = pandas.DataFrame(self.records(every=every))
        for name in TIMES & set(frame.columns):
            frame[name] = pandas.to_datetime(frame[name], unit="s", utc=True)
        return frame

    def to_polars(self, *, every: bool = False) -> polars.DataFrame:
        """``records`` as a polars table, with times as timestamps; raises ExtraMissing without
        polars."""
        polars = _library("polars")
        frame = polars.DataFrame(self.records(every=every), infer_schema_length=None, strict=False)
        times = [
            polars.from_epoch(polars.col(name) * 1e6, "us").dt.replace_time_zone("UTC")
            for name in TIMES & set(frame.columns)
        ]
        return frame.with_columns(times)

    def to_dict(self) -> dict[str, object]:
        """The output of `nightgrid report --json`."""
        from orchestrator.report.export import document

        return document(self.summary)

    def report(self) -> Path:
        """Write the HTML page and return its path; raises StoreError if not writable."""
        from orchestrator.report.run_report import write_page

        return write_page(self.store, self.summary, self.attempts).resolve()

    def compare(self, before: Run | str | os.PathLike[str], **options: Any) -> RunComparison:
        """Compare ``before`` (a run, or a name for ``load`` beside this run) with this run.

        ``options`` are those of ``comparison.compare``: ``confidence``, ``noise``, ``allow``.
        """
        from orchestrator.analysis.comparison import compare

        if not isinstance(before, Run):
            before = load(before, results=self.store.path.parent)
        names = (before.name, self.name)
        return compare(before.rows, self.rows, names=names, **options)

    def query(self, sql: str) -> Answer:
        """Answer SQL over this run, as `nightgrid query` does: ``to_pandas()``, ``to_arrow()``,
        ``records()`` or ``rows``. Raises ExtraMissing without duckdb, QueryError for a refused
        statement."""
        from orchestrator.report.query import query

        return query(self.store.path.parent, sql, [self.name])

    def __repr__(self) -> str:
        return f"<Run {self.name!r} at {self.path}: {self.summary.verdict}>"

    def _repr_html_(self) -> str:
        """HTML for a notebook: the verdict, what is not real, and the first rows."""
        from orchestrator.report.wording import plus_minus

        parts = [f"<b>{escape(self.name)}</b>: {escape(self.summary.verdict)}"]
        for banner in self.summary.banners:
            parts.append(f"{escape(banner.name)} in {banner.count:,} of {banner.of:,} rows")
        best = {ranking.winner.job_id for ranking in self.summary.rankings if ranking.winner}
        rows = []
        for row in self.rows[:MOST_ROWS_SHOWN]:
            metrics = row.metrics
            figure = f"{number(metrics.throughput)} {metrics.throughput_unit} {plus_minus(row)}"
            rows.append(
                (
                    row.model,
                    f"{row.cards} × {row.accelerator}",
                    self.summary.chosen(row),
                    str(row.state),
                    figure if metrics.throughput else one_line(row.reason, 80),
                    "best" if row.job_id in best else "",
                )
            )
        more = len(self.rows) - MOST_ROWS_SHOWN
        if more > 0:
            parts.append(f"the first {MOST_ROWS_SHOWN} of {len(self.rows):,} jobs:")
        return f"<p>{'<br>'.join(parts)}</p>" + html_table(
            ("model", "cards", "setting", "state", "throughput, or why not", ""), rows
        )


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExtraMissing(name, wanted_for="Data frames") from error


Shown = TypeVar("Shown", "Grid", "ShownPlan")


def _as(kind: type[Shown], value: GridValue | Plan) -> Shown:
    return kind(**{field.name: getattr(value, field.name) for field in fields(value)})


class ShownPlan(Plan):
    """A plan that a notebook shows as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return plan_html(self)


class Grid(GridValue):
    """A grid with the ways of reading one, and its plan."""

    __slots__ = ()

    @classmethod
    def from_file(cls, path: Path | str) -> Grid:
        """Read a grid file, or one that comes with Nightgrid by its name; see ``load_grid``."""
        return _as(cls, load_grid(grid_path(str(path))))

    @classmethod
    def from_text(cls, text: str) -> Grid:
        """Read a grid from YAML; raises GridError with the line and column of each problem."""
        return _as(cls, parse_grid(text.encode(), "grid"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Grid:
        """Read a grid from the mappings, lists and plain values of its file; raises GridError with
        the path of each problem."""
        return _as(cls, grid_of_values(values))

    def plan(
        self,
        *,
        emulate: str | None = None,
        name: str | None = None,
        results: Path | str | None = None,
        retry_failed: bool = False,
        force: bool = False,
        key_file: Path | str | None = None,
    ) -> ShownPlan:
        """Decide what a run would do with every job; starts and writes nothing.

        Options are those of ``run``; without ``emulate`` it plans for one server of eight cards of
        each kind.

        Raises:
            GridError: these nodes can never give a job its cards.
            ClusterError: the nodes are invalid.
            StoreError: earlier rows cannot be read.
        """
        from orchestrator.driver.plan import plan_grid

        options = _options(
            results,
            emulate=emulate,
            name=name,
            retry_failed=retry_failed,
            force=force,
            key_file=_absolute(key_file),
        )
        return _as(ShownPlan, plan_grid(self, options)[0])


def _absolute(file: Path | str | None) -> Path | None:
    return None if file is None else Path(file).absolute()


def _options(results: str | os.PathLike[str] | None, **others: Any) -> RunOptions:
    from orchestrator.driver.options import RunOptions

    if results is not None:
        others |= {"results": Path(results), "results_named": True}
    return RunOptions(**others)


def run(
    grid: Grid | str | os.PathLike[str],
    *,
    emulate: str | None = None,
    address: str | None = None,
    in_process: bool = False,
    name: str | None = None,
    overrides: Sequence[str] = (),
    results: str | os.PathLike[str] | None = None,
    results_address: str = "",
    log_to: Sequence[str] = (),
    card_memory_bytes: int | None = None,
    retry_failed: bool = False,
    retry_flagged: bool = False,
    keep_changed: bool = False,
    wait_for_cards: float = 0.0,
    force: bool = False,
    resume: bool = False,
    ends_at: float | datetime | None = None,
    budget: bool = False,
    remote_code: Sequence[str] = (),
    key_file: Path | str | None = None,
    passports: bool = True,
    priority: int = 0,
    quiet: bool = False,
) -> Run:
    """Measure the jobs of a grid that have no result yet, as `nightgrid run` does.

    Blocks until the run is over. In a notebook the first interrupt lets running jobs end, the
    second stops them; measured rows are kept. Failed jobs raise nothing: see ``Run.ok``.

    Args:
        grid: a grid, the path of its file, or the name of one that comes with Nightgrid.
        emulate: emulated cards of this machine, such as ``2x8``; None: a Ray cluster, or this
            machine's own cards.
        address: of the Ray cluster, ``HOST:6379``; None: RAY_ADDRESS, if set.
        in_process: one job at a time in this very process, without Ray.
        name: of the run; an existing one is resumed. None: the grid's.
        overrides: ``PATH=VALUE`` each, set in the grid's file as ``--set`` does.
        results: directory of runs; None: the grid's, else NIGHTGRID_RESULTS, else ``./results``.
        results_address: bucket for a copy, ``s3://BUCKET/PREFIX``.
        log_to: trackers that get every row, ``mlflow`` or ``mlflow=DESTINATION``.
        card_memory_bytes: memory of an emulated card; None: its share of this machine's.
        retry_failed: also run jobs that failed earlier.
        retry_flagged: at the end, measure again earlier rows that something disturbed.
        keep_changed: keep rows although the files of their model or dataset have changed.
        wait_for_cards: seconds to wait for nodes with the cards that the grid asks for.
        force: run everything, measured already or not.
        resume: take the run over from a driver that may only seem dead.
        ends_at: deadline of the report; a number is seconds since the epoch.
        budget: ``ends_at`` is a duration from now and does not move when the clock is set.
        remote_code: models of the grid that may run the Python code they come with.
        key_file: key to models written by ``nightgrid protect``, on every node.
        passports: measure each card's speed before its first job.
        priority: among runs that wait for cards of one cluster; higher goes first.
        quiet: print nothing.

    Raises:
        GridError: the grid is refused; ``problems`` lists everything wrong.
        ClusterError: there are no usable cards.
        StoreError: results cannot be read or written, or another driver holds the run.
        KeyboardInterrupt: a third interrupt ended it at once.
    """
    from orchestrator.driver.run import run_grid
    from orchestrator.store.files import default_address

    options = _options(
        results,
        results_address=results_address or default_address(),
        results_named=bool(results_address),
        log_to=tuple(log_to),
        name=name,
        overrides=tuple(overrides),
        emulate=emulate,
        address=address,
        in_process=in_process,
        card_memory_bytes=card_memory_bytes,
        retry_failed=retry_failed,
        retry_flagged=retry_flagged,
        keep_changed=keep_changed,
        wait_for_cards=wait_for_cards,
        force=force,
        resume=resume,
        ends_at=ends_at.timestamp() if isinstance(ends_at, datetime) else ends_at,
        budget=budget,
        remote_code=tuple(remote_code),
        key_file=_absolute(key_file),
        passports=passports,
        priority=priority,
        quiet=quiet,
    )
    source = grid if isinstance(grid, GridValue) else grid_path(os.fspath(grid))
    outcome = run_grid(source, options, (lambda _: None) if quiet else print)
    if not outcome.result.finished:
        raise KeyboardInterrupt(f"{outcome.result.reason}; run it again to go on from here")
    return Run(outcome.store, plan=outcome.plan)
