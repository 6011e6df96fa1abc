"""The rows of many files as one table, without a record of each: what a compaction writes.

A scan has seen to it that every value is what its column says (``validation.py``), and has left out
what is not; so the columns of all files are put together as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.results.scan import Scan
from orchestrator.results.schema import schema

if TYPE_CHECKING:
    import pyarrow as pa


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
