"""Compaction: the rows of many files as one, without a record of each.

A scan has seen to it that every value is what its column says (``validation.py``), and has left out
what is not; so the columns of all files are put together as they are.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from orchestrator.results import fragments
from orchestrator.results.row_file import parquet
from orchestrator.results.scan import COVERS_KEY, Scan
from orchestrator.results.schema import schema

if TYPE_CHECKING:
    import pyarrow as pa


def compacted(scan: Scan) -> tuple[str, bytes]:
    """Name and content of one file for the rows of all; it lists the files that it covers."""
    table = joined_rows(scan)
    covers = {COVERS_KEY: json.dumps(sorted(scan.tables)).encode()}
    table = table.replace_schema_metadata(dict(table.schema.metadata) | covers)
    data = parquet(table, use_dictionary=True)
    return fragments.compacted_name(table.num_rows, data), data


def leftovers(scan: Scan) -> list[str]:
    """The files that a compaction has replaced but not deleted. Any writer of this
    directory may claim to replace a file, so only those go whose attempt has a row there."""
    if not scan.covered:
        return []
    there = {
        pair
        for name, table in scan.tables.items()
        if fragments.is_compacted(name)
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
