"""One consistent look at a directory of rows, while others write to it or compact it.

Every file, and every record in a log, is verified against the checksum in its name before it is
parsed, and its values once after (``validation.py``); what is not rows is named and left out, and
stays where it is. A file says which others, or which records, it stands for; where both are there
(a compaction is going on, or was cut short) only that file counts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core.errors import SchemaMismatch, StoreError
from orchestrator.results import disk, fragments
from orchestrator.results.append_log import is_log, parts_of
from orchestrator.results.fragments import Damage

if TYPE_CHECKING:
    import pyarrow as pa

    from orchestrator.results.record import Record

#: Key of the Parquet metadata under which a file lists the files or records it replaces, as JSON.
COVERS_KEY = b"nightgrid.covers"
#: The columns by which an attempt is known.
ATTEMPT = ("job_id", "attempt_number")
#: A file that says it holds more is refused: it would not fit into memory.
MOST_ROWS = 10_000_000
#: A compacted file lists no more names than that, unless it replaces more files.
MOST_COVERED = 500_000

_LOG = logging.getLogger("nightgrid.store")


@dataclass(slots=True)
class Scan:
    """One consistent look at a directory of rows."""

    directory: Path
    tables: dict[str, pa.Table]  # by name of the file or record, each row once
    damaged: list[Damage]
    covered: list[str]  # files and records that another file stands for
    together: pa.Table | None = None  # all tables as one, if they have been put together

    @property
    def unread(self) -> list[Damage]:
        """The damaged that another look may find sound."""
        return [damage for damage in self.damaged if damage.passing]

    def attempts(self) -> set[tuple[str, int]]:
        """Job and number of each attempt that has a row, of a scan with these two columns."""
        return {
            (row["job_id"], row["attempt_number"])
            for table in self.tables.values()
            for row in table.select(ATTEMPT).to_pylist()
        }

    def joined(self) -> pa.Table:
        """All tables as one; there is at least one."""
        import pyarrow as pa

        if self.together is None:
            self.together = pa.concat_tables(self.tables.values()).combine_chunks()
        return self.together


def scan_rows(
    directory: Path, columns: Iterable[str], known: Mapping[str, pa.Table] | None = None
) -> Scan:
    """Read every file of rows, verified, of one moment.

    Files and records never change, so who follows a run hands in the tables of the last look as
    ``known`` and only what came since is parsed.

    A writer may replace logs and files under our hands, so the names are listed again afterwards:
    if one that we listed has gone, or a file has come that stands for others, what we have may miss
    rows or hold them twice, and we start over. A listing is not of one moment: it can miss a log
    that goes meanwhile as well as the file that came in its place. Rows appended meanwhile may or
    may not be seen. What was parsed is not parsed again: a log goes every few seconds, and
    thousands of files take longer.
    """
    columns, known = list(columns), dict(known or {})
    for _ in range(100):
        names = row_files(directory)
        logs = set(filter(is_log, names))
        try:
            found = _read_files(directory, names - logs, columns, known)
            known |= found.tables
            if logs:  # last: what stands for records is sound
                read_logs(found, _contents(directory, logs, found), columns, known)
        except FileNotFoundError:
            continue
        now = row_files(directory)
        come = now - names
        if names <= now and not any(map(fragments.replaces_others, come)):
            for damage in found.damaged:
                _LOG.warning("not read: %s: %s", damage.path, damage.reason)
            return found
    raise StoreError(f"{directory} does not come to rest: files keep vanishing while it is read")


def _gone(path: Path) -> FileNotFoundError:
    """The error for a file that is not there any more, whatever it was called: a network file
    system has a word of its own for a file that another host has removed."""
    return FileNotFoundError(errno.ENOENT, "it has gone", str(path))


def row_files(directory: Path) -> set[str]:
    """Names of the files and logs with rows in a run's directory of tables."""
    try:
        names = disk.names(directory)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise StoreError(f"{directory} cannot be read: {error.strerror or error}") from error
    return set(filter(has_rows, names))


def has_rows(name: str) -> bool:
    """Tell if a file of this name is one of rows."""
    return is_log(name) or (name.endswith(".parquet") and not name.startswith("."))


def _read_files(
    directory: Path, names: set[str], columns: list[str], known: Mapping[str, pa.Table]
) -> Scan:
    import pyarrow as pa

    from orchestrator.results.validation import faults

    scan = Scan(directory, {}, [], [])
    covered: set[str] = set()
    overlap = False
    # Compacted files first: they say which files need not be read.
    compacted = {name for name in names if fragments.is_compacted(name)}
    for name in [*sorted(compacted), *sorted(names - compacted)]:
        if name in covered:
            scan.covered.append(name)
            continue
        table = known.get(name)
        if table is None:
            table = _read_file(directory / name, columns, scan)
            # Before anything is left out for its sake.
            if table is not None and name in compacted:
                table = _vouched_for(directory / name, table, scan.damaged)
        if table is not None:
            scan.tables[name] = table
            replaced = replaced_by(table)
            overlap |= not covered.isdisjoint(replaced)
            covered |= replaced
    for name in covered & scan.tables.keys():  # an older compacted file that sorted first
        del scan.tables[name]
        scan.covered.append(name)
    new = {n: t for n, t in scan.tables.items() if n not in known and n not in compacted}
    whole = len(new) == len(scan.tables) and all(table.num_rows for table in new.values())
    if new and whole:
        scan.together = pa.concat_tables(scan.tables.values()).combine_chunks()
    for name, reason in faults(new, scan.together if whole else None).items():
        del scan.tables[name]
        scan.damaged.append(_not_rows(directory / name, reason))
        scan.together = None
    if overlap:
        _leave_out_repeated(scan)
    return scan


def _leave_out_repeated(scan: Scan) -> None:
    """Leave out files whose records others stand for, too. A file can appear late: when a writer
    that could neither name it nor remove it has made another one of the same records and more."""
    replaced = {name: replaced_by(table) for name, table in scan.tables.items()}
    seen: set[str] = set()
    for name in sorted(scan.tables, key=lambda name: (-len(replaced[name]), name)):
        if replaced[name] and replaced[name] <= seen:
            del scan.tables[name]
            scan.covered.append(name)
            scan.together = None
        seen |= replaced[name]


def read_logs(
    scan: Scan,
    contents: Mapping[str, bytes],
    columns: list[str],
    known: Mapping[str, pa.Table],
) -> None:
    """Add the sound records of logs to a scan, but for those that one of its tables or of its
    covered names stands for.

    Args:
        contents: of each log, by its name.
    """
    from orchestrator.results.validation import faults

    covered = {name for table in scan.tables.values() for name in replaced_by(table)}
    covered |= {*scan.covered}
    found: dict[str, tuple[Path, bytes]] = {}  # the log and the content of each new record
    for log in sorted(contents):
        path = scan.directory / log
        for part in parts_of(contents[log]):
            name = part.name
            if part.torn:
                continue  # no damage: nobody was told that it is safe
            if part.reason:
                scan.damaged.append(Damage(path=path, reason=f"{name or 'a row'}: {part.reason}"))
            elif name in covered:
                scan.covered.append(name)
            elif name in known:
                scan.tables[name] = known[name]
            else:
                found[name] = path, part.data
            scan.together = None
    together = _tables_of(found, columns, scan)
    new = {name: scan.tables[name] for name in found if name in scan.tables}
    whole = together if together is not None and together.num_rows == _rows_of(new) else None
    bad = faults(new, whole)
    for name, reason in bad.items():
        del scan.tables[name]
        scan.damaged.append(_not_rows(found[name][0], f"{name}: {reason}"))
    if not bad and len(new) == len(scan.tables):
        scan.together = whole


def _rows_of(tables: Mapping[str, pa.Table]) -> int:
    return sum(table.num_rows for table in tables.values())


def _tables_of(
    records: Mapping[str, tuple[Path, bytes]], columns: list[str], scan: Scan
) -> pa.Table | None:
    """Add the tables of records to a scan; returns that of all which are JSON, if they could be
    read as one."""
    from orchestrator.results import record

    told: dict[str, record.Record] = {}
    for name, (_, data) in records.items():
        if not fragments.is_arrow_record(name):
            with contextlib.suppress(Exception):  # one that is odd is told alone, below
                told[name] = record.parsed(data)
    pieces: list[pa.Table] = []
    tables: dict[str, pa.Table] = {}
    for version in sorted({each.version for each in told.values()}):
        names = [name for name in told if told[name].version == version]
        pieces += _read_together(names, told, columns, tables)
    for name, (path, data) in records.items():
        table = tables.get(name)
        if table is None:
            table = _table_of(name, data, columns, path, scan)
        if table is not None:
            scan.tables[name] = table
    return pieces[0] if len(pieces) == 1 else None


def _read_together(
    names: Sequence[str],
    told: Mapping[str, Record],
    columns: list[str],
    tables: dict[str, pa.Table],
) -> list[pa.Table]:
    """Read these records as one table; only where that fails, each half alone. An odd one costs
    its neighbours a few more tables, and is left out.

    Args:
        told: the records, of one version.
        tables: by name; gets those that could be read.
    """
    from orchestrator.results import record
    from orchestrator.results.older_tables import current

    try:
        table = current(record.joined([told[name] for name in names], columns), "a log", columns)
    except Exception:  # bytes from anywhere make the library raise anything
        half = len(names) // 2
        parts = (names[:half], names[half:]) if half else ()
        return [each for part in parts for each in _read_together(part, told, columns, tables)]
    begin = 0
    for name in names:
        tables[name] = table.slice(begin, told[name].rows)
        begin += told[name].rows
    return [table]


def _contents(directory: Path, logs: Iterable[str], scan: Scan) -> dict[str, bytes]:
    """The bytes of each log that can be read."""
    found = {}
    for log in sorted(logs):
        path = directory / log
        try:
            found[log] = disk.read(path)
        except OSError as error:
            if not disk.is_there(path):
                raise _gone(path) from error  # the caller looks again
            reason = f"a row: cannot be read: {error.strerror or error}"
            scan.damaged.append(Damage(path=path, reason=reason, passing=True))
    return found


def _vouched_for(path: Path, table: pa.Table, damaged: list[Damage]) -> pa.Table | None:
    """The table of a compacted file, if it is sound; else None, and an entry in ``damaged``."""
    from orchestrator.results.validation import faults

    reason = faults({path.name: table}).get(path.name, "")
    if not reason:
        return table
    damaged.append(_not_rows(path, reason))
    return None


def _not_rows(path: Path, reason: str) -> Damage:
    return Damage(path=path, reason=f"not a table of results: {reason}")


def replaced_by(table: pa.Table) -> set[str]:
    """The names of the files or records for which a table stands.

    Raises:
        ValueError: what it says of them is no list of names.
    """
    names = json.loads((table.schema.metadata or {}).get(COVERS_KEY, b"[]"))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("it does not list what it stands for")
    return set(names)


def _read_file(path: Path, columns: list[str], scan: Scan) -> pa.Table | None:
    """The table of one file; None, and a damage in the scan, if it cannot be trusted."""
    passing = False
    try:
        data = disk.read(path)
        reason = fragments.damage_of(path.name, data)
    except OSError as error:
        if not disk.is_there(path):
            raise _gone(path) from error  # the caller looks again
        data, reason = b"", f"cannot be read: {error.strerror or error}"
        passing = disk.may_be_ordinary(path)
    if reason is None:
        return _table_of(path.name, data, columns, path, scan)
    scan.damaged.append(Damage(path=path, reason=reason, passing=passing))
    return None


def _table_of(
    name: str, data: bytes, columns: list[str], path: Path, scan: Scan
) -> pa.Table | None:
    """The table of a file or record; None, and a damage in the scan, if it is none of rows."""
    try:
        return _parsed(name, data, columns, path)
    except SchemaMismatch:
        raise  # not damage: this program is too old
    except Exception as error:  # bytes from anywhere make the library raise anything
        passing = not _is_of_the_bytes(error)
        text = str(error) or repr(error)
        reason = f"not a table of results: {text.removeprefix(f'{path} ').splitlines()[0]:.300}"
    scan.damaged.append(Damage(path=path, reason=reason, passing=passing))
    return None


def _is_of_the_bytes(error: Exception) -> bool:
    """Return whether parsing the same bytes fails so at any time: not for want of memory, of
    descriptors, of threads, or of a module that is being replaced."""
    import pyarrow as pa

    if isinstance(error, OSError):
        return error.errno is None  # as Arrow says it of bytes that end too early
    kinds = (pa.ArrowException, StoreError, ValueError, TypeError, LookupError, RecursionError)
    return isinstance(error, kinds) and not isinstance(error, MemoryError)


def _parsed(name: str, data: bytes, columns: list[str], path: Path) -> pa.Table:
    """The columns of a file of rows, or of a record, of exactly their types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from orchestrator.results import record
    from orchestrator.results.older_tables import current

    if fragments.is_record(name):
        table = record.record_table(name, data, columns)
        _refuse_too_many(table.num_rows, path)
    else:
        file = pq.ParquetFile(pa.BufferReader(data))
        _refuse_too_many(file.metadata.num_rows, path)
        present = set(file.schema_arrow.names)
        # None is all: choosing some costs half a millisecond, with a hundred in the file.
        wanted = [each for each in columns if each in present] if present - {*columns} else None
        table = file.read(wanted, use_threads=False)
    table = current(table, str(path), columns)
    replaced = replaced_by(table)
    if not all(map(fragments.is_record, replaced)) and not fragments.is_compacted(name):
        raise StoreError("it claims to replace other files, but is not a compacted file")
    # Of each row a record, a file, and a compacted one, at most.
    if len(replaced) > 3 * table.num_rows:
        rows = f"{table.num_rows:,} rows and stands for {len(replaced):,}"
        raise StoreError(f"it has {rows} files or records")
    return table


def _refuse_too_many(rows: int, path: Path) -> None:
    if rows > MOST_ROWS:
        raise StoreError(f"{path} has {rows:,} rows, more than is read of one")
