"""The rows of a run from Python: tables, report and comparison with another run.

What `nightgrid report`, `compare` and `query` do, on the same objects. Importing this loads neither
torch nor Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import ExtraMissing
from orchestrator.core.job import State
from orchestrator.core.plan import Plan
from orchestrator.watch.plan_text import html_table

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa

    from orchestrator.analysis.comparison import RunComparison
    from orchestrator.analysis.summary import Summary
    from orchestrator.core.measurement import Measurement
    from orchestrator.report.query import Answer
    from orchestrator.store.store import Store

MOST_ROWS_SHOWN = 20


def load(
    run: str | os.PathLike[str] | None = None, *, results: str | os.PathLike[str] | None = None
) -> Run:
    """An earlier run, or one that is under way: by name, by its directory, or the newest.

    Raises:
        StoreError: there is no such run; the message lists those that exist.
    """
    from orchestrator.store.store import find_run

    return Run(find_run(run, Path(results) if results is not None else None))


class Run:
    """The rows of one run, as they were when first asked for; ``load`` again for newer ones."""

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
    def states(self) -> Mapping[State, int]:
        """Count the jobs that ended in each state."""
        return self.summary.counts

    @property
    def ok(self) -> bool:
        """Return whether every job has an answer: measured, or known not to fit or not to exist
        here."""
        return not self.summary.unsettled and self.summary.underway is None

    def table(self, *, every: bool = False) -> pa.Table:
        """The rows with all columns of docs/schema.md, raw samples included.

        Args:
            every: all attempts instead of the newest final row of each job.
        """
        from orchestrator.store.codec import to_table

        return to_table(self.attempts if every else self.rows)

    def records(self, *, every: bool = False) -> list[dict[str, object]]:
        """The rows as plain mappings: the columns of `nightgrid report --format csv`."""
        from orchestrator.report.export import records

        return records(self.attempts if every else self.rows)

    def to_pandas(self, *, every: bool = False) -> pandas.DataFrame:
        """``records`` as a pandas table.

        Raises:
            ExtraMissing: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ExtraMissing("pandas", extra="notebook", wanted_for="Data frames") from error
        return pandas.DataFrame(self.records(every=every))

    def to_polars(self, *, every: bool = False) -> polars.DataFrame:
        """``records`` as a polars table.

        Raises:
            ExtraMissing: polars is not installed.
        """
        try:
            import polars
        except ImportError as error:
            raise ExtraMissing("polars", extra="notebook", wanted_for="Data frames") from error
        records = self.records(every=every)
        return polars.DataFrame(records, infer_schema_length=None, strict=False)

    def to_dict(self) -> dict[str, object]:
        """The output of `nightgrid report --json`."""
        from orchestrator.report.export import document

        return document(self.summary)

    def report(self) -> Path:
        """Write the HTML page and return its path.

        Raises:
            StoreError: it cannot be written.
        """
        from orchestrator.report.run_report import write_page

        return write_page(self.store, self.summary, self.attempts).resolve()

    def compare(self, before: Run | str | os.PathLike[str], **options: Any) -> RunComparison:
        """Compare ``before`` with this run: what became slower or faster.

        Args:
            before: a run, or what ``load`` takes, looked for where this run lies.
            options: of ``comparison.compare``: ``confidence``, ``noise``, ``allow``.
        """
        from orchestrator.analysis.comparison import compare

        if not isinstance(before, Run):
            before = load(before, results=self.store.path.parent)
        names = (before.name, self.name)
        return compare(before.rows, self.rows, names=names, **options)

    def query(self, sql: str) -> Answer:
        """Answer SQL over this run, as `nightgrid query` does.

        Raises:
            ExtraMissing: duckdb is not installed.
            QueryError: the statement is refused.
        """
        from orchestrator.report.query import query

        return query(self.store.path.parent, sql, [self.name])

    def __repr__(self) -> str:
        return f"<Run {self.name!r} at {self.path}: {self.summary.verdict}>"

    def _repr_html_(self) -> str:
        """HTML for a notebook: the verdict, what is not real, and the first rows."""
        from orchestrator.report.wording import plus_minus
        from orchestrator.util.format import number, one_line

        said = [f"<b>{escape(self.name)}</b>: {escape(self.summary.verdict)}"]
        for banner in self.summary.banners:
            said.append(f"{escape(banner.name)} in {banner.count:,} of {banner.of:,} rows")
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
            said.append(f"the first {MOST_ROWS_SHOWN} of {len(self.rows):,} jobs:")
        return f"<p>{'<br>'.join(said)}</p>" + html_table(
            ("model", "cards", "setting", "state", "throughput, or why not", ""), rows
        )
