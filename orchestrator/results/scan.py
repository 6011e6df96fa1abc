"""One consistent look at a directory of rows, while others write to it or compact it.

Every file is verified against the checksum in its name before it is parsed, and its values once
after (``validation.py``); what is not rows is named and left out, and stays where it is. A
compacted file says which fragments it stands for; where both are there (a compaction is going on,
or was cut short) only the compacted file counts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import SchemaMismatch, StoreError
from orchestrator.results import disk, fragments
from orchestrator.results.fragments import Damage

if TYPE_CHECKING:
    import pyarrow as pa

#: Key of the Parquet metadata under which a compacted file lists the files it replaces, as JSON.
COVERS_KEY = b"nightgrid.covers"
#: A file that says it holds more is refused: it would not fit into memory.
MOST_ROWS = 10_000_000

_LOG = logging.getLogger("nightgrid.store")


@dataclass(slots=True)
class Scan:
    """One consistent look at a directory of rows."""

    directory: Path
    tables: dict[str, pa.Table]  # by file name, each row once
    damaged: list[Damage]
    covered: list[str]  # leftovers of a compaction
    together: pa.Table | None = None  # all tables as one, if they have been put together

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

    Files never change, so who follows a run hands in the tables of the last look as ``known``
    and only what came since is read.

    A compaction may replace files under our hands, so the names are listed again afterwards: if
    one that we listed has gone, or a compacted file has come, what we have may miss rows or hold
    them twice, and we start over. Rows appended meanwhile may or may not be seen.
    """
    columns = list(columns)
    for _ in range(100):
        names = row_files(directory)
        try:
            found = _read_files(directory, names, columns, known or {})
        except FileNotFoundError:
            continue
        now = row_files(directory)
        come = now - names
        if names <= now and not any(fragments.is_compacted(name) for name in come):
            for damage in found.damaged:
                _LOG.warning("not read: %s: %s", damage.path, damage.reason)
            return found
    raise StoreError(f"{directory} does not come to rest: files keep vanishing while it is read")


def row_files(directory: Path) -> set[str]:
    """Names of the files with rows in a run's directory of tables."""
    try:
        names = disk.names(directory)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise StoreError(f"{directory} cannot be read: {error.strerror or error}") from error
    return {name for name in names if name.endswith(".parquet") and not name.startswith(".")}


def _read_files(
    directory: Path, names: set[str], columns: list[str], known: Mapping[str, pa.Table]
) -> Scan:
    import pyarrow as pa

    from orchestrator.results.validation import faults

    scan = Scan(directory, {}, [], [])
    covered: set[str] = set()
    # Compacted files first: they say which fragments need not be read.
    compacted = {name for name in names if fragments.is_compacted(name)}
    for name in [*sorted(compacted), *sorted(names - compacted)]:
        if name in covered:
            scan.covered.append(name)
            continue
        table = known.get(name)
        if table is None:
            table = _read_file(directory / name, columns, scan.damaged)
            # Before anything is left out for its sake.
            if table is not None and name in compacted:
                table = _vouched_for(directory / name, table, scan.damaged)
        if table is not None:
            scan.tables[name] = table
            covered |= _covers(table)
    for name in covered & scan.tables.keys():  # an older compacted file that sorted first
        del scan.tables[name]
        scan.covered.append(name)
    new = {n: t for n, t in scan.tables.items() if n not in known and n not in compacted}
    if new:
        scan.together = pa.concat_tables(scan.tables.values()).combine_chunks()
    whole = len(new) == len(scan.tables) and all(table.num_rows for table in new.values())
    for name, reason in faults(new, scan.together if whole else None).items():
        del scan.tables[name]
        scan.damaged.append(_not_rows(directory / name, reason))
        scan.together = None
    return scan


def _vouched_for(path: Path, table: pa.Table, damaged: list[Damage]) -> pa.Table | None:
    """The table of a compacted file, if it is sound and has a row at least for each file that it
    replaces; else None, and an entry in ``damaged``."""
    from orchestrator.results.validation import faults

    reason = faults({path.name: table}).get(path.name, "")
    if not reason and table.num_rows < len(_covers(table)):
        reason = f"it has {table.num_rows:,} rows and stands for {len(_covers(table)):,} files"
    if not reason:
        return table
    damaged.append(_not_rows(path, reason))
    return None


def _not_rows(path: Path, reason: str) -> Damage:
    return Damage(path=path, reason=f"not a table of results: {reason}")


def _covers(table: pa.Table) -> set[str]:
    """The names of the files for which a table stands.

    Raises:
        ValueError: what it says of them is no list of names.
    """
    names = json.loads((table.schema.metadata or {}).get(COVERS_KEY, b"[]"))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("it does not list the files that it stands for")
    return set(names)


def _read_file(path: Path, columns: list[str], damaged: list[Damage]) -> pa.Table | None:
    """The table of one file; None, and an entry in ``damaged``, if it cannot be trusted."""
    try:
        data = disk.read(path)
        reason = fragments.damage_of(path.name, data)
    except OSError as error:
        if not disk.is_there(path):
            raise  # vanished: the caller looks again
        data, reason = b"", f"cannot be read: {error.strerror or error}"
    if reason is None:
        try:
            return _parsed(data, columns, path)
        except SchemaMismatch:
            raise  # not damage: this program is too old
        except Exception as error:  # bytes from anywhere make the library raise anything
            text = str(error) or repr(error)
            reason = f"not a table of results: {text.removeprefix(f'{path} ').splitlines()[0]:.300}"
    damaged.append(Damage(path=path, reason=reason))
    return None


def _parsed(data: bytes, columns: list[str], path: Path) -> pa.Table:
    """The columns of a file of rows, of exactly their types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from orchestrator.results.older_tables import current

    file = pq.ParquetFile(pa.BufferReader(data))
    if file.metadata.num_rows > MOST_ROWS:
        raise StoreError(f"{path} has {file.metadata.num_rows:,} rows, more than is read of one")
    present = set(file.schema_arrow.names)
    # None is all: choosing some costs half a millisecond, with a hundred in the file.
    wanted = [name for name in columns if name in present] if present - {*columns} else None
    table = current(file.read(wanted, use_threads=False), str(path), columns)
    if _covers(table) and not fragments.is_compacted(path.name):
        raise StoreError("it claims to replace other files, but is not a compacted file")
    return table
