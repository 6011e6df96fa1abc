"""SQL over all runs of a results directory, by DuckDB (the extra ``query``).

    rows      one row per attempt, all columns of docs/schema.md but the raw ones, and ``flags``
    jobs      of these, the newest final row of each job in each run
    samples   one row per timed batch, with its run and job
    items     one row per prompt of the last complete repeat, likewise

Rows are read and verified by Nightgrid's reader, also while a run writes. The database is in memory
without file access, so queries change nothing. Times are UTC without a time zone.
"""

from __future__ import annotations

import datetime
import decimal
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.analysis.flags import raised_on
from orchestrator.core.errors import ExtraMissing, QueryError
from orchestrator.store.codec import measurements_of
from orchestrator.store.reader import read_rows
from orchestrator.store.schema import column_names, schema
from orchestrator.store.store import existing_runs, find_run

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

#: Rows whose flags are derived in one batch.
_TOGETHER = 1024
#: Refused statements, by DuckDB's names.
_CHANGES = frozenset({"ALTER", "DELETE", "DROP", "INSERT", "MERGE_INTO", "UPDATE"})
_KEYS = "run, invocation_id, attempt_id, job_id, final"
_VIEWS = {
    "rows": "CREATE VIEW rows AS SELECT * EXCLUDE (samples, items) FROM measurements",
    "jobs": "CREATE VIEW jobs AS SELECT * FROM rows WHERE final QUALIFY row_number() "
    "OVER (PARTITION BY run, job_id ORDER BY recorded_at DESC NULLS LAST) = 1",
    "samples": f"CREATE VIEW samples AS SELECT {_KEYS}, unnest(s) FROM "
    f"(SELECT {_KEYS}, unnest(samples) AS s FROM measurements)",
    "items": f"CREATE VIEW items AS SELECT {_KEYS}, unnest(i) FROM "
    f"(SELECT {_KEYS}, unnest(items) AS i FROM measurements)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Columns and rows of a query's result, as plain Python values."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    damaged: tuple[str, ...] = ()  # files that could not be read

    def records(self) -> list[dict[str, Any]]:
        """Return one mapping per row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table."""
        import pyarrow as pa

        values = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        return pa.Table.from_arrays(list(map(pa.array, values)), names=list(self.columns))

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas table; raises ExtraMissing without pandas."""
        try:
            import pandas  # noqa: F401 - pyarrow needs it
        except ImportError as error:
            raise ExtraMissing("pandas", wanted_for="Data frames") from error
        return self.to_arrow().to_pandas()


def query(results: Path, sql: str, runs: Sequence[str] = ()) -> Answer:
    """Run one statement over all runs, or over those named.

    Raises:
        ExtraMissing: duckdb is not installed.
        StoreError: there are no runs, or one cannot be read.
        QueryError: the database rejects the statement; the message is its own.
    """
    try:
        import duckdb
    except ImportError as error:
        raise ExtraMissing("duckdb", wanted_for="Queries") from error
    raw = re.search(r"\b(samples|items|measurements)\b", sql, re.IGNORECASE) is not None
    if sql != sql.encode("utf-8", "replace").decode():  # of a command line in another encoding
        raise QueryError(f"{sql!r:.60} is no UTF-8\n{HINT}")
    columns_read = re.sub(r"count\s*\(\s*\*\s*\)", "", sql, flags=re.IGNORECASE)
    may_read_flags = r"\bflags\b|\*|\bdescribe\b|\bsummarize\b"
    flags = re.search(may_read_flags, columns_read, re.IGNORECASE) is not None
    table, damaged = read_runs(results, runs, raw=raw or flags)
    if flags:
        table = _with_flags(table)
    connection = duckdb.connect(config={"threads": 2})
    try:
        connection.register("given", _naive(table))
        connection.execute("CREATE TABLE measurements AS SELECT * FROM given")
        connection.unregister("given")
        for view in _VIEWS.values():
            connection.execute(view)
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        for asked in connection.extract_statements(sql):
            if (kind := asked.type.name) in _CHANGES:  # of the copy in memory alone
                raise QueryError(f"{kind} is refused: a query reads rows and changes none\n{HINT}")
        answer = connection.execute(sql)
        if answer is None or answer.description is None:
            raise QueryError(f"there is no statement in {sql!r:.60}\n{HINT}")
        columns = tuple(column[0] for column in answer.description or ())
        rows = tuple(tuple(row) for row in answer.fetchall())
    except duckdb.Error as error:
        raise QueryError(f"{error}\n{HINT}") from error
    finally:
        connection.close()
    return Answer(columns=columns, rows=rows, damaged=damaged)


HINT = (
    "There are rows, jobs, samples and items; `nightgrid schema results` lists their columns, "
    "and DESCRIBE jobs does too. Rows and jobs have a column `flags` beside them."
)


def read_runs(
    results: Path, runs: Sequence[str] = (), *, raw: bool = True
) -> tuple[pa.Table, tuple[str, ...]]:
    """Return all rows of the runs (default: all) and the unreadable files. Without ``raw``, raw
    columns are empty, which is much faster. `run` is a run's name here, also in rows of a copy.
    Raise StoreError if runs are missing or unreadable."""
    import pyarrow as pa

    names = list(runs) or sorted(existing_runs(results))
    tables = [schema().empty_table()]
    damaged: list[str] = []
    for name in names:
        store = find_run(name, results)
        look = read_rows(store.tables_path, column_names(raw=raw))
        damaged += map(str, look.damaged)
        table = look.table()
        # The rows of a copy (`fetch --as`) have the name that the run had where they were measured.
        at = table.schema.get_field_index("run")
        field = table.schema.field(at)
        names_here = pa.array([store.run] * table.num_rows, field.type)
        tables.append(table.set_column(at, field, names_here))
    return pa.concat_tables(tables, promote_options="default"), tuple(damaged)


def _with_flags(table: pa.Table) -> pa.Table:
    import pyarrow as pa

    texts: list[str | None] = []
    for start in range(0, table.num_rows, _TOGETHER):
        part = table.slice(start, _TOGETHER).combine_chunks()
        rows = list(measurements_of(part))
        (batch,) = part.select(["samples", "items"]).to_batches()
        texts += ["; ".join(map(str, raised)) or None for raised in raised_on(rows, batch)]
    return table.append_column("flags", pa.array(texts, pa.string()))


def _naive(table: pa.Table) -> pa.Table:
    """Return the table with times as UTC without zone: DuckDB needs two more packages for zones."""
    import pyarrow as pa

    for index, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):
            kind = pa.timestamp(field.type.unit)
            table = table.set_column(index, field.name, table.column(index).cast(kind))
    return table


def plain_value(value: Any) -> Any:
    """Return a database value for JSON: times as ISO 8601, NaN as null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case None | bool() | int() | str():
            return value
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return float(value)
        case Mapping():
            return {str(key): plain_value(item) for key, item in value.items()}
        case list() | tuple():
            return list(map(plain_value, value))
    return str(value)
