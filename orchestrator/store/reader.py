"""Reader of rows: a consistent snapshot of a run's directory, without a lock.

Rows lie in Parquet files and in logs of the last seconds (``log.py``). File names hold the SHA-256
of the content, because Parquet does not detect all damage: 52 of 1,426 one-byte flips read back as
wrong values without an error.

    rows-<rows>-<attempt>-<sha256[:16]>.parquet    some rows; their highest attempt number
    rows-<attempt>-<sha256[:16]>.parquet           up to 1,000 rows (version 0.1.0)
    <job>-<attempt>-<sha256[:16]>.jsonl            one row that was set aside

Damage is reported and left in place. A row may be in two files while the writer merges them;
``ROW_KEY`` deduplicates.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.core.errors import SchemaMismatch, StoreError
from orchestrator.core.measurement import Measurement
from orchestrator.store import disk
from orchestrator.store.codec import ROWS_TOGETHER, measurements_of, table_of, values_of
from orchestrator.store.disk import Damage
from orchestrator.store.log import Line, is_log, lines_in
from orchestrator.store.schema import column_names, columns_schema, current, fault, faults, rules_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


#: Identity of a row. An abandoned attempt that still ends has two; the later one is never final.
ROW_KEY = ("invocation_id", "attempt_id", "recorded_at", "state", "final")
#: A Parquet file may decode to this many values and bytes, and to so many more for each of its
#: bytes: real rows have one or two, and sixty kilobytes can hold millions of empty lists.
MOST_VALUES, MOST_DECODED_BYTES, MOST_FOR_A_BYTE = 5_000_000, 256 * 2**20, 32

_NAME = re.compile(
    r"(?P<head>[A-Za-z0-9_][A-Za-z0-9_-]{0,79})-(?P<number>\d{1,9})-(?P<digest>[0-9a-f]{16})\.\w+"
)
_DEVELOPMENT_LOG = ".appended-"
_MOST_TOGETHER = 1000  # rows in a file of version 0.1.0

_LOG = logging.getLogger("nightgrid.store")


# ---------------------------------------------------------------- names


class FileName(NamedTuple):
    """Parsed name of a file of rows: job id ("": several), highest attempt, row limit, digest."""

    job_id: str
    attempt: int
    rows: int
    digest: str


def file_name(rows: int, attempt_number: int, data: bytes) -> str:
    """The name of a Parquet file with so many rows, the highest attempt being this."""
    return f"rows-{rows}-{attempt_number}-{disk.digest(data)}.parquet"


def parsed_name(name: str) -> FileName | None:
    """The facts in a name that Nightgrid gives to a file of rows; None for other names."""
    match = _NAME.match(name)
    if match is None:
        return None
    head, number, digest = match["head"], int(match["number"]), match["digest"]
    kind, _, count = head.partition("-")
    if kind == "rows" and (not count or count.isdecimal()):
        return FileName("", number, int(count or _MOST_TOGETHER), digest)
    return FileName(head, number, 1, digest)


def has_rows(name: str) -> bool:
    """Return whether a file of this name is one of rows."""
    parquet = name.endswith(".parquet") and not name.startswith(".")
    return parquet or is_log(name) or name.startswith(_DEVELOPMENT_LOG)


def about_how_many(names: Iterable[str]) -> int:
    """The number of rows in Parquet files of these names: nearly right, and never too low."""
    parsed = (parsed_name(name) for name in names if name.endswith(".parquet"))
    return sum(name.rows for name in parsed if name is not None)


def damage_of(name: str, data: bytes) -> str | None:
    """Reason why the bytes cannot be what was written under this name; None if they are."""
    if name.startswith(_DEVELOPMENT_LOG):
        return (
            "a log of a version before 0.1.0; `nightgrid run` of commit 7f860c86, with the same "
            "grid and results, makes Parquet of it"
        )
    parsed = parsed_name(name)
    if parsed is None:
        return "the name is not one that Nightgrid gives, so its content cannot be verified"
    if (digest := disk.digest(data)) != parsed.digest:
        return f"its {len(data):,} bytes have SHA-256 {digest}…, its name says otherwise"
    return None


# ---------------------------------------------------------------- one look


@dataclass(slots=True)
class Rows:
    """A snapshot of a directory: deduplicated tables by file name, and damage.

    ``names`` are of all files and logs; ``repeated``: some rows were in several files.
    """

    directory: Path
    columns: Sequence[str]
    tables: dict[str, pa.Table]
    damaged: list[Damage]
    names: set[str] = field(default_factory=set)
    repeated: bool = False

    def refuse_unread(self, what: str) -> None:
        """Raise StoreError if a file cannot be read now: ``what``, for the message, is unknown."""
        for damage in self.damaged:
            if damage.passing:
                raise StoreError(
                    f"{what} cannot be known now: {damage}. Try again; if it "
                    f"stays so, move the file to {self.directory.with_name('quarantine')}"
                )

    def table(self) -> pa.Table:
        """All rows as one table, in the order of recording."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self.tables:
            return table_of([], self.columns)
        table = pa.concat_tables(self.tables.values()).combine_chunks()
        zero = pa.scalar(0, table["recorded_at"].type)
        at = pc.fill_null(table["recorded_at"], zero)
        keys = table.select(["attempt_id", "invocation_id"]).add_column(0, "recorded_at", at)
        order = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])
        arrays = table.select(self.columns).take(order).columns
        return pa.Table.from_arrays(arrays, schema=columns_schema(self.columns))


def read_rows(
    directory: Path,
    columns: Iterable[str] | None = None,
    known: Mapping[str, pa.Table] | None = None,
    only: Set[str] | None = None,
) -> Rows:
    """Read a verified snapshot of every file and log of rows (or of those in ``only``), again if
    the writer has replaced files meanwhile; ``known`` tables of an earlier snapshot are not parsed
    again.

    Raises SchemaMismatch if a row was written by a newer version; StoreError if the directory
    cannot be read.
    """
    wanted = column_names() if columns is None else list(columns)
    with_key = [*wanted, *(name for name in ROW_KEY if name not in wanted)]
    parsed = dict(known or {})

    def present() -> set[str]:
        names = row_files(directory)
        return names if only is None else names & only

    for _ in range(100):
        names = present()
        look = Rows(directory, wanted, {}, [], names)
        try:
            # Logs first: a row that leaves one meanwhile is in a file then, and not missed.
            logs = {}
            for name in filter(is_log, names):  # they grow: what is known of them is of no use
                data = _content(look, directory / name) or b""
                logs[name], lines = table_of_lines(lines_in(data), with_key)
                look.damaged += [Damage(path=directory / name, reason=one.reason) for one in lines]
            _read_files(look, sorted(names - logs.keys()), with_key, parsed)
        except FileNotFoundError:
            continue
        look.tables |= {name: logs[name] for name in sorted(logs) if logs[name].num_rows}
        parsed |= look.tables
        now = present()
        if names <= now and not any(name.endswith(".parquet") for name in now - names):
            _drop_repeated(look)
            for damage in look.damaged:
                _LOG.warning("not read: %s: %s", damage.path, damage.reason)
            return look
    raise StoreError(f"{directory} does not come to rest: files keep vanishing while it is read")


def row_files(directory: Path) -> set[str]:
    """Names of the files and logs with rows in a run's directory of tables."""
    try:
        names = disk.names(directory)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise StoreError(f"{directory} cannot be read: {error.strerror or error}") from error
    return set(filter(has_rows, names))


def table_of_lines(
    lines: Iterable[Line], columns: Sequence[str] | None = None
) -> tuple[pa.Table, list[Line]]:
    """Convert lines to a table with these columns (None: all); also return the damaged lines.

    Raises MemoryError, which says nothing about the lines, and SchemaMismatch.
    """
    import pyarrow as pa

    lines = list(lines)
    sound = [line for line in lines if line.row is not None]
    try:
        rows = [line.row for line in sound if line.row is not None]
        table = current(table_of(rows, columns), "a log", columns)
        if reason := fault(table):
            raise ValueError(reason)
        return table, [line for line in lines if line.row is None]
    except (MemoryError, SchemaMismatch):
        raise
    except Exception:  # values from anywhere make the library raise anything
        if len(sound) <= 1:
            reason = "its values are not those of a row"
            return table_of([], columns), [
                line if line.row is None else replace(line, row=None, reason=reason)
                for line in lines
            ]
    parts = [table_of_lines([line], columns) for line in lines]
    table = pa.concat_tables([part for part, _ in parts])
    return table, [line for _, damaged in parts for line in damaged]


def _read_files(
    look: Rows, names: Iterable[str], columns: list[str], known: Mapping[str, pa.Table]
) -> None:
    new = {}
    for name in names:
        if name in known:
            look.tables[name] = known[name]
        elif (table := _file_table(look, name, columns)) is not None:
            new[name] = table
    for name, reason in faults(new).items():
        del new[name]
        path = look.directory / name
        look.damaged.append(Damage(path=path, reason=f"not a table of results: {reason}"))
    look.tables |= new


def _content(look: Rows, path: Path) -> bytes | None:
    """Read a file; if unreadable, add a damage and return None; FileNotFoundError if it is gone."""
    try:
        return disk.read(path)
    except OSError as error:
        if not disk.is_there(path):  # a network file system has a word of its own for that
            raise FileNotFoundError(errno.ENOENT, "it has gone", str(path)) from error
        reason = f"cannot be read: {error.strerror or error}"
        passing = disk.may_be_ordinary(path)
        look.damaged.append(Damage(path=path, reason=reason, passing=passing))
        return None


def _file_table(look: Rows, name: str, columns: list[str]) -> pa.Table | None:
    """The table of a Parquet file; None, and a damage in the look, if it cannot be trusted."""
    path, passing = look.directory / name, False
    if (data := _content(look, path)) is None:
        return None
    reason = damage_of(name, data)
    if reason is None:
        try:
            file = parquet_file(data, str(path))
            present = set(file.schema_arrow.names)
            wanted = [name for name in columns if name in present]
            return current(file.read(wanted, use_threads=False), str(path), columns)
        except SchemaMismatch:
            raise  # not damage: this program is too old
        except Exception as error:  # bytes from anywhere make the library raise anything
            passing = not _is_of_the_bytes(error)
            text = (str(error) or repr(error)).removeprefix(f"{path} ")
            reason = f"not a table of results: {text.splitlines()[0]:.300}"
    look.damaged.append(Damage(path=path, reason=reason, passing=passing))
    return None


def parquet_file(data: bytes, source: str) -> pq.ParquetFile:
    """Open a Parquet file; StoreError if it would decode to far more than rows of its size do."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(pa.BufferReader(data))
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    chunks = [group.column(place) for group in groups for place in range(group.num_columns)]
    values = sum(chunk.num_values for chunk in chunks)
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    more = MOST_FOR_A_BYTE * len(data)
    if values > MOST_VALUES + more or size > MOST_DECODED_BYTES + more:
        what = f"{values:,} values and {size:,} bytes in {len(data):,} bytes"
        raise StoreError(f"{source} has {what}, more than rows have")
    return file


def _is_of_the_bytes(error: Exception) -> bool:
    """Return whether the bytes are at fault, not a lack of memory, descriptors or threads."""
    import pyarrow as pa

    if isinstance(error, OSError):
        return error.errno is None  # as Arrow says it of bytes that end too early
    kinds = (pa.ArrowException, StoreError, ValueError, TypeError, LookupError, RecursionError)
    return isinstance(error, kinds) and not isinstance(error, MemoryError)


def _drop_repeated(look: Rows) -> None:
    """Drop duplicate rows from logs and from the files later in order."""
    import pyarrow as pa

    if not look.tables:
        return
    keys = pa.concat_tables([table.select(ROW_KEY) for table in look.tables.values()])
    if len(keys.group_by(list(ROW_KEY), use_threads=False).aggregate([])) == len(keys):
        return  # the usual case; row by row is far slower
    look.repeated = True
    seen: set[tuple[object, ...]] = set()
    tables = {name: without_repeated(table, seen) for name, table in look.tables.items()}
    look.tables = {name: table for name, table in tables.items() if table.num_rows}


def without_repeated(table: pa.Table, seen: set[tuple[object, ...]]) -> pa.Table:
    """Drop rows whose keys are in ``seen``, and add the rest to it."""
    import pyarrow as pa

    fresh = []
    for key in row_keys(table):
        fresh.append(key not in seen)
        seen.add(key)
    return table if all(fresh) else table.filter(pa.array(fresh, pa.bool_()))


def row_keys(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """The key of each row."""
    return zip(*(table[name].to_pylist() for name in ROW_KEY), strict=True)


def keys_in_file(name: str, data: bytes) -> set[tuple[object, ...]]:
    """The keys of the rows in a Parquet file's bytes; none if they cannot be trusted."""
    import pyarrow as pa

    with contextlib.suppress(
        OSError, ValueError, TypeError, LookupError, StoreError, pa.ArrowException
    ):
        if damage_of(name, data) is None:
            return set(row_keys(parquet_file(data, name).read(list(ROW_KEY), use_threads=False)))
    return set()


# ---------------------------------------------------------------- measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that a run's directory holds: the rows in the order of recording, and what is damaged."""

    measurements: tuple[Measurement, ...]
    damaged: tuple[Damage, ...]


def read_contents(directory: Path, quarantine: Path, *, raw: bool = True) -> Contents:
    """Read valid rows and all damage, quarantined files included; may raise SchemaMismatch."""
    import pyarrow as pa

    columns = column_names(raw=raw)
    contents: tuple[list[Measurement], list[Damage]] | None = None
    if about_how_many(row_files(directory)) > ROWS_TOGETHER:
        contents = _in_batches(directory, columns)
    if contents is None:
        look = read_rows(directory, columns)
        contents = [], look.damaged
        while look.tables:  # a table goes before the next one's rows are made
            _, table = look.tables.popitem()
            contents[0].extend(measurements_of(table, source=str(directory)))
    rows, damaged = contents
    rows.sort(key=lambda row: (row.recorded_at or 0.0, row.attempt_id, row.invocation_id))
    pa.default_memory_pool().release_unused()
    return Contents(measurements=tuple(rows), damaged=(*damaged, *set_aside_earlier(quarantine)))


def _in_batches(
    directory: Path, columns: list[str]
) -> tuple[list[Measurement], list[Damage]] | None:
    """Read the rows of a large run in batches, as its table takes twice the memory of its rows.

    None where only a whole look tells what is there: rows that stand in two files, invalid ones, or
    a writer that replaces files meanwhile.
    """
    import pyarrow as pa

    look = read_rows(directory, ROW_KEY)
    rows: list[Measurement] = []
    shared: dict[Any, Any] = {}
    try:
        for name in look.tables:
            data = disk.read(directory / name)
            for batch in _batches(name, data, columns, ROWS_TOGETHER):
                table = current(pa.Table.from_batches([batch]), name, columns)
                if fault(table):
                    return None
                rows += measurements_of(table, source=str(directory), shared=shared)
    except (OSError, StoreError, pa.ArrowException):
        return None
    unchanged = row_files(directory) == look.names and not look.repeated
    return (rows, look.damaged) if unchanged else None


def set_aside_earlier(quarantine: Path) -> list[Damage]:
    """The files set aside so far."""
    try:
        names = disk.names(quarantine)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return [Damage(path=quarantine, reason=f"cannot be read: {error.strerror or error}")]
    return [Damage(path=quarantine / name, reason="set aside: damaged") for name in sorted(names)]


def with_raw(directory: Path, rows: Iterable[Measurement], *names: str) -> Iterator[Measurement]:
    """Add raw columns to rows, unordered, in batches to bound memory; skips rows that are gone."""
    empty = {name: rules_of(Measurement)[name].default for name in names}
    for some, batch in raw_batches(directory, rows, *names):
        present = [name for name in names if name in batch.schema.names]  # older rows lack some
        columns = [values_of(name, batch[name]) for name in present]
        for row, *values in zip(some, *columns, strict=True):
            raw = {name: value or empty[name] for name, value in zip(present, values, strict=True)}
            yield replace(row, **raw)


def raw_batches(
    directory: Path, rows: Iterable[Measurement], *names: str
) -> Iterator[tuple[list[Measurement], pa.RecordBatch]]:
    """Batches of rows with their raw columns, unordered; skips what ``read_contents`` reported."""
    import pyarrow as pa

    wanted: dict[Any, Measurement] = {
        (row.invocation_id, row.attempt_id, row.recorded_at, row.state, row.final): row
        for row in rows
    }
    seen: set[str] = set()
    # More than once where a log became a file meanwhile.
    while wanted and (new := sorted(row_files(directory) - seen)):
        seen.update(new)
        for name in new if wanted else ():
            with contextlib.suppress(
                OSError, ValueError, TypeError, LookupError, StoreError, pa.ArrowException
            ):
                for batch in _batches(name, disk.read(directory / name), [*ROW_KEY, *names]):
                    keys = zip(*(values_of(key, batch[key]) for key in ROW_KEY), strict=True)
                    places = {at: wanted.pop(key) for at, key in enumerate(keys) if key in wanted}
                    yield list(places.values()), batch.take(pa.array(places, pa.int64()))
    pa.default_memory_pool().release_unused()


def _batches(
    name: str, data: bytes, columns: list[str], rows: int = 1024
) -> Iterator[pa.RecordBatch]:
    if is_log(name):
        table, _ = table_of_lines(lines_in(data), columns)
        yield from table.to_batches(max_chunksize=rows)
    elif damage_of(name, data) is None:
        file = parquet_file(data, name)
        yield from file.iter_batches(rows, columns=columns, use_threads=False)


# ---------------------------------------------------------------- runs


def runs(results_dir: Path) -> list[str]:
    """Names of the runs in a results directory, newest first; StoreError if it is unreadable."""
    try:
        names = disk.names(results_dir)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a NUL in the name
        return []
    except OSError as error:
        raise StoreError(f"{results_dir} cannot be read: {error.strerror or error}") from error
    written: dict[str, float] = {}
    for name in names:  # os.path, since Path's own questions raise where it may not look
        rows = results_dir / name / "rows"
        with contextlib.suppress(OSError):
            if os.path.isdir(rows):
                written[name] = os.stat(rows).st_mtime
    return sorted(written, key=lambda name: written[name], reverse=True)
