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
import inspect
import io
import os
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from orchestrator.analysis.comparison import RunComparison, compare
from orchestrator.analysis.summary import Summary
from orchestrator.core.errors import ExtraMissing
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.plan import Plan
from orchestrator.driver.options import RunOptions
from orchestrator.driver.plan import plan_grid
from orchestrator.driver.run import run_grid
from orchestrator.grid import grid_path
from orchestrator.grid.parser import Grid as GridValue
from orchestrator.grid.parser import grid_of_values, load_grid, parse_grid
from orchestrator.report.export import document, records
from orchestrator.report.query import Answer, query
from orchestrator.report.run_report import read_summary, write_page
from orchestrator.report.text import print_summary
from orchestrator.report.wording import standing
from orchestrator.store.codec import to_table
from orchestrator.store.files import default_address
from orchestrator.store.schema import TIMES
from orchestrator.store.store import Store, find_run
from orchestrator.util import output
from orchestrator.watch.plan_text import print_plan, summary_lines

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa

MOST_LINES = 60  # of a plan in a notebook


class Best(NamedTuple):
    """The fastest setting of one piece of work on one device, and how sure that is."""

    row: Measurement
    label: str  # its settings that differ from others', as the report has them
    verdict: str  # "clear winner", "tied", "not known" or "alone"
    reason: str  # the verdict in the report's words


def load(
    run: str | os.PathLike[str] | None = None, *, results: str | os.PathLike[str] | None = None
) -> Run:
    """Return a finished or running run by name or directory, None: the newest; raises StoreError,
    which lists the existing runs, if there is none."""
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
        return to_table(self.attempts if every else self.rows)

    def records(self, *, every: bool = False) -> list[dict[str, object]]:
        """The rows as plain mappings: the columns of `nightgrid report --format csv`."""
        return records(self.attempts if every else self.rows)

    def to_pandas(self, *, every: bool = False) -> pandas.DataFrame:
        """``records`` as a pandas table, with times as timestamps; raises ExtraMissing without
        pandas."""
        pandas = _library("pandas")
        frame = pandas.DataFrame(self.records(every=every))
        for name in set(frame.columns).intersection(TIMES):
            frame[name] = pandas.to_datetime(frame[name], unit="s", utc=True)
        return frame

    def to_polars(self, *, every: bool = False) -> polars.DataFrame:
        """``records`` as a polars table, with times as timestamps; raises ExtraMissing without
        polars."""
        polars = _library("polars")
        frame = polars.DataFrame(self.records(every=every), infer_schema_length=None, strict=False)
        times = [
            polars.from_epoch(polars.col(name) * 1e6, "us").dt.replace_time_zone("UTC")
            for name in set(frame.columns).intersection(TIMES)
        ]
        return frame.with_columns(times)

    def to_dict(self) -> dict[str, object]:
        """The output of `nightgrid report --json`."""
        return document(self.summary)

    def report(self) -> Path:
        """Write the HTML page and return its path; raises StoreError if not writable."""
        return write_page(self.store, self.summary, self.attempts).resolve()

    def compare(self, before: Run | str | os.PathLike[str], **options: Any) -> RunComparison:
        """Compare ``before`` (a run, or a name for ``load`` beside this run) with this run.

        ``options`` are those of ``comparison.compare``: ``confidence``, ``noise``, ``allow``.
        """
        if not isinstance(before, Run):
            before = load(before, results=self.store.path.parent)
        names = (before.name, self.name)
        return compare(before.rows, self.rows, names=names, **options)

    def query(self, sql: str) -> Answer:
        """Answer SQL over this run, as `nightgrid query` does: ``to_pandas()``, ``to_arrow()``,
        ``records()`` or ``rows``. Raises ExtraMissing without duckdb, QueryError for a refused
        statement."""
        return query(self.store.path.parent, sql, [self.name])

    def __repr__(self) -> str:
        return f"<Run {self.name!r} at {self.path}: {self.summary.verdict}>"

    def _repr_html_(self) -> str:
        """Return what `nightgrid report` prints."""
        console = output.console(io.StringIO(), width=100, highlight=False, force_jupyter=False)
        with console.capture() as capture:
            print_summary(self.summary, console)
        return f"<pre>{escape(capture.get())}</pre>"


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExtraMissing(name, wanted_for="Data frames") from error


Shown = TypeVar("Shown", "Grid", "ShownPlan")


def _as(kind: type[Shown], value: GridValue | Plan) -> Shown:
    return kind(**{field.name: getattr(value, field.name) for field in fields(value)})


class ShownPlan(Plan):
    """A plan that a notebook shows as `nightgrid plan` prints it, of a large one the beginning."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        printed = io.StringIO()
        print_plan(self, printed)
        lines = printed.getvalue().splitlines(keepends=True)
        if len(lines) > MOST_LINES:
            lines = [*lines[:MOST_LINES], "…\n", "\n".join(summary_lines(self))]
        return f"<pre>{escape(''.join(lines))}</pre>"


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

    def plan(self, **options: Any) -> ShownPlan:
        """Decide what a run would do with every job; starts and writes nothing.

        Options are those of ``run``; without ``emulate`` it plans for one server of eight cards of
        each kind.

        Raises:
            GridError: these nodes can never give a job its cards.
            ClusterError: the nodes are invalid.
            StoreError: earlier rows cannot be read.
        """
        return _as(ShownPlan, plan_grid(self, _options(**options))[0])


def _options(**given: Any) -> RunOptions:
    """Return the options that ``run`` was given, with paths, times and lists as they are kept."""
    values: dict[str, Any] = {
        name: tuple(one) if isinstance(one, list) else one for name, one in given.items()
    }
    if given.get("results") is not None:
        values |= {"results": Path(given["results"]), "results_named": True}
    if given.get("key_file") is not None:
        values["key_file"] = Path(given["key_file"]).absolute()
    if isinstance(ends_at := given.get("ends_at"), datetime):
        values["ends_at"] = ends_at.timestamp()
    return RunOptions(**{name: one for name, one in values.items() if one is not None})


def run(grid: Grid | str | os.PathLike[str], **options: Any) -> Run:
    """Measure the jobs of a grid that have no result yet, as `nightgrid run` does.

    Blocks until the run is over. In a notebook the first interrupt lets running jobs end, the
    second stops them; measured rows are kept. Failed jobs raise nothing: see ``Run.ok``.

    Args:
        grid: a grid, the path of its file, or the name of one that comes with Nightgrid.
        options: the fields of ``orchestrator.driver.options.RunOptions``, which explains them:
            ``emulate="2x8"``, ``name="tuesday"``, ``retry_failed=True``. ``results`` and
            ``key_file`` may be texts, and ``ends_at`` a ``datetime``.

    Raises:
        GridError: the grid is refused; ``problems`` lists everything wrong.
        ClusterError: there are no usable cards.
        StoreError: results cannot be read or written, or another driver holds the run.
        KeyboardInterrupt: a third interrupt ended it at once.
        TypeError: there is no such option.
    """
    copied = {"results_named": True} if options.get("results_address") else {}
    chosen = _options(**{"results_address": default_address(), **options, **copied})
    source = grid if isinstance(grid, GridValue) else grid_path(os.fspath(grid))
    outcome = run_grid(source, chosen, (lambda _: None) if chosen.quiet else print)
    if not outcome.result.finished:
        raise KeyboardInterrupt(f"{outcome.result.reason}; run it again to go on from here")
    return Run(outcome.store, plan=outcome.plan)


#: What a notebook completes and ``help`` shows.
_NOT_HERE = ("supervisor", "results_named")
_PARAMETERS = inspect.signature(RunOptions).parameters.values()
run.__signature__ = inspect.signature(run).replace(  # type: ignore[attr-defined]
    parameters=[
        inspect.signature(run).parameters["grid"],
        *(one for one in _PARAMETERS if one.name not in _NOT_HERE),
    ]
)
