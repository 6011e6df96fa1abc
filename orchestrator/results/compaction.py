"""Compaction: the rows of many records or files as one file, without a ``Measurement`` of each.

A scan has seen to it that every value is what its column says (``validation.py``), and has left out
what is not; so the columns of all are put together as they are.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core.errors import StoreError
from orchestrator.results import fragments
from orchestrator.results.append_log import parts_of
from orchestrator.results.row_file import parquet
from orchestrator.results.scan import COVERS_KEY, MOST_COVERED, Scan, read_logs, replaced_by
from orchestrator.results.schema import column_names, schema

if TYPE_CHECKING:
    import pyarrow as pa


def compacted(scan: Scan) -> tuple[str, bytes]:
    """Name and content of one file for the rows of all; it lists the files that it covers."""
    data = _covering(scan, joined_rows(scan))
    return fragments.compacted_name(scan.joined().num_rows, data), data


def logged(directory: Path, contents: Mapping[str, bytes], covered: Iterable[str]) -> Scan:
    """The records of logs with these contents, but for those that stand in a file.

    Raises:
        SchemaMismatch: one is of a newer version.
        StoreError: one may be sound, and cannot be parsed now.
    """
    scan = Scan(directory, {}, [], list(covered))
    read_logs(scan, contents, column_names(), {})
    for damage in scan.unread:
        raise StoreError(f"{damage.path}: {damage.reason}")
    return scan


def file_of_records(scan: Scan) -> tuple[str, bytes]:
    """Name and content of one file for the records of logs, in the order of their names."""
    import pyarrow.compute as pc

    table = scan.joined()
    data = _covering(scan, table)
    highest = pc.max(table["attempt_number"]).as_py()
    return fragments.together_name(table.num_rows, highest, data), data


def spoiled(log: str, content: bytes, kept: Container[str]) -> dict[str, bytes]:
    """The torn and rotten parts of a log, and all else beside these records, by names for files."""
    found = {}
    for part in parts_of(content):
        if part.reason or part.name not in kept:
            name = part.name or f"{log.strip('.')}-{fragments.digest(part.data)}"
            found[name + ".partial" * part.torn] = part.data
    return found


def _covering(scan: Scan, table: pa.Table) -> bytes:
    """A table as the content of a file that stands for all that a scan has read, and for what that
    stood for: a copy of the run may have a log and lack the file that came between."""
    names = scan.tables.keys() | {old for each in scan.tables.values() for old in replaced_by(each)}
    if len(names) > MOST_COVERED:  # the reader of Parquet takes 100 MB of names, and no more
        names = {*scan.tables}
    covers = {COVERS_KEY: json.dumps(sorted(names)).encode()}
    table = table.replace_schema_metadata(dict(table.schema.metadata) | covers)
    return parquet(table, use_dictionary=True)


def leftovers(scan: Scan) -> list[str]:
    """The files and records that a compaction has replaced but not deleted. Any writer of this
    directory may claim to replace a file, so only those go whose attempt has a row there."""
    if not scan.covered:
        return []
    there = {
        pair
        for name, table in scan.tables.items()
        if replaced_by(table)
        for pair in zip(
            table["job_id"].to_pylist(), table["attempt_number"].to_pylist(), strict=True
        )
    }
    numbers = {number for _, number in there}
    found = []
    for name in scan.covered:
        attempt = fragments.attempt_of(name)
        if attempt is None:
            known = fragments.is_compacted(name)
        elif attempt[0] == fragments.TOGETHER:
            known = attempt[1] in numbers
        else:
            known = attempt in there
        if known:
            found.append(name)
    return found


def joined_rows(scan: Scan) -> pa.Table:
    """The rows of all files in the order of recording, as ``to_table`` would have them."""
    import pyarrow as pa

    documented = pa.Table.from_arrays(scan.joined().columns, schema=schema())
    return _in_order(documented)


def _in_order(table: pa.Table) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    zero = pa.scalar(0, table["recorded_at"].type)
    keys = pa.table(
        {
            "recorded_at": pc.fill_null(table["recorded_at"], zero),
            "attempt_id": table["attempt_id"],
            "invocation_id": table["invocation_id"],
        }
    )
    order = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])
    return table.take(order)
