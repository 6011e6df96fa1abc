"""One consistent look at a directory of rows, while others write to it or compact it.

Every file is verified against the checksum in its name before it is parsed. A compacted file says
which fragments it stands for; where both are there (a compaction is going on, or was cut short)
only the compacted file counts.
"""

from __future__ import annotations

import contextlib
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

_LOG = logging.getLogger("nightgrid.store")


@dataclass(slots=True)
class Scan:
    """One consistent look at a directory of rows."""

    directory: Path
    tables: dict[str, pa.Table]  # by file name, each row once
    damaged: list[Damage]
    covered: list[str]  # leftovers of a compaction

    def joined(self) -> pa.Table:
        """All tables as one; columns that only some have are null in the others."""
        import pyarrow as pa

        tables = list(self.tables.values())
        try:
            with contextlib.suppress(pa.ArrowInvalid):  # as it is when one program wrote them all
                return pa.concat_tables(tables).combine_chunks()
            return pa.concat_tables(tables, promote_options="default").combine_chunks()
        except pa.ArrowException as error:
            raise StoreError(f"{self.directory}: tables do not fit together: {error}") from error


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
        names = _row_files(directory)
        try:
            found = _read_files(directory, names, columns, known or {})
        except FileNotFoundError:
            continue
        now = _row_files(directory)
        come = now - names
        if names <= now and not any(fragments.is_compacted(name) for name in come):
            for damage in found.damaged:
                _LOG.warning("not read: %s: %s", damage.path, damage.reason)
            return found
    raise StoreError(f"{directory} does not come to rest: files keep vanishing while it is read")


def _row_files(directory: Path) -> set[str]:
    try:
        names = disk.names(directory)
    except FileNotFoundError:
        return set()
    return {name for name in names if name.endswith(".parquet") and not name.startswith(".")}


def _read_files(
    directory: Path, names: set[str], columns: list[str], known: Mapping[str, pa.Table]
) -> Scan:
    scan = Scan(directory, {}, [], [])
    covered: set[str] = set()
    # Compacted files first: they say which fragments need not be read.
    for name in sorted(names, key=lambda name: (not fragments.is_compacted(name), name)):
        if name in covered:
            scan.covered.append(name)
            continue
        table = known.get(name)
        if table is None:
            table = _read_file(directory / name, columns, scan.damaged)
        if table is not None:
            scan.tables[name] = table
            covered |= _covers(table)
    for name in covered & scan.tables.keys():  # an older compacted file that sorted first
        del scan.tables[name]
        scan.covered.append(name)
    return scan


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
    import pyarrow as pa
    import pyarrow.parquet as pq

    from orchestrator.results.schema import current

    try:
        data = disk.read(path)
        reason = fragments.damage_of(path.name, data)
    except OSError as error:
        if not disk.is_there(path):
            raise  # vanished: the caller looks again
        data, reason = b"", f"cannot be read: {error.strerror or error}"
    if reason is None:
        try:
            file = pq.ParquetFile(pa.BufferReader(data))
            present = set(file.schema_arrow.names)
            # None is all: choosing some costs half a millisecond, with a hundred in the file.
            wanted = [name for name in columns if name in present] if present - {*columns} else None
            table = file.read(wanted, use_threads=False)
            table = current(table, str(path))
            _covers(table)
            return table
        except SchemaMismatch:
            raise  # not damage: this program is too old
        except (pa.ArrowException, OSError, ValueError, RecursionError, StoreError) as error:
            reason = f"not a table of results: {error}"
    damaged.append(Damage(path=path, reason=reason))
    return None
