"""The rows of many files as one table, without a record of each: what a compaction writes.

A reader makes records of rows and finds out in doing so whether they are rows at all. Here that is
asked of the columns, of all files together. Only if that does not hold, each file is looked at:
what has other columns (older tables, whose missing ones have defaults) goes by way of records, and
what a reader would refuse is kept apart, since files are deleted once they are compacted.
"""

from __future__ import annotations

import json
import logging
import typing
from collections.abc import Iterable
from dataclasses import MISSING, fields
from datetime import datetime, timedelta
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchestrator.errors import StoreError
from orchestrator.measurement import Measurement, Metrics
from orchestrator.results.fragments import Damage
from orchestrator.results.scan import Scan
from orchestrator.results.schema import from_table, schema, to_table
from workloads.api import Item, MeasureSettings, Sample

if TYPE_CHECKING:
    import pyarrow as pa

_LOG = logging.getLogger("nightgrid.store")
#: What a ``datetime`` can hold, microseconds since the epoch.
_FIRST_US, _LAST_US = (
    (end - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    for end in (datetime.min, datetime.max)
)


def joined_rows(scan: Scan) -> pa.Table:
    """The rows of all files in the order of recording, as ``to_table`` would have them. A file
    that holds something else leaves the scan and counts as damage."""
    import pyarrow as pa

    parts = _all_sound(scan.tables.values()) or _one_by_one(scan)
    documented = [pa.Table.from_arrays(part.columns, schema=schema()) for part in parts]
    return _in_order(pa.concat_tables([schema().empty_table(), *documented]).combine_chunks())


def _all_sound(tables: Iterable[pa.Table]) -> list[pa.Table]:
    """All tables as one, if they are of this program's columns and a reader would take them all;
    else none."""
    import pyarrow as pa

    try:
        together = pa.concat_tables(tables).combine_chunks()
    except pa.ArrowInvalid:  # their columns differ
        return []
    return [together] if together.schema.equals(schema()) and not fault(together) else []


def _one_by_one(scan: Scan) -> list[pa.Table]:
    """The tables of those files that hold rows; the others become damage."""
    parts = []
    for name, table in list(scan.tables.items()):
        try:
            parts.append(_checked(table, str(scan.directory / name)))
        except StoreError as error:
            del scan.tables[name]
            scan.damaged.append(Damage(path=scan.directory / name, reason=str(error)))
            _LOG.warning("not compacted: %s", error)
    return parts


def _checked(table: pa.Table, source: str) -> pa.Table:
    """One file's rows in this program's columns.

    Raises:
        StoreError: it does not hold rows.
    """
    if not table.schema.equals(schema()):
        table = to_table(from_table(table, source=source))
    if reason := fault(table):
        raise StoreError(f"{source} does not hold measurements: {reason}")
    return table


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


def fault(table: pa.Table) -> str:
    """Why a reader would refuse some of these rows; "" if it takes them all.

    Args:
        table: of this program's columns, whatever stands in them.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        table.validate(full=True)  # offsets, and text that is UTF-8
    except pa.ArrowException as error:
        return str(error)
    for name in (*_required(Measurement), *_required(Metrics)):
        if name != "metrics" and table[name].null_count:
            return f"{name} is missing"
    for name, known in _choices().items():
        if unknown := set(pc.unique(table[name]).to_pylist()) - known:
            return f"{name} cannot be {min(unknown)!r}"
    for field in table.schema:
        if pa.types.is_timestamp(field.type):
            ends = pc.min_max(table[field.name].cast(pa.int64())).as_py()
            if any(end is not None and not _FIRST_US <= end <= _LAST_US for end in ends.values()):
                return f"{field.name} is in no calendar"
    return (
        _nested_fault(pc.list_flatten(table["samples"]), ("rank", *_required(Sample)))
        or _nested_fault(pc.list_flatten(table["items"]), ("rank", *_required(Item)))
        or _nested_fault(table["measure"], _required(MeasureSettings))
        or _parameters_fault(table["parameters"])
    )


@lru_cache(maxsize=8)
def _required(record: type) -> tuple[str, ...]:
    """The fields of a record that have no default and cannot be None."""
    hints = typing.get_type_hints(record)
    return tuple(
        field.name
        for field in fields(record)
        if field.default is MISSING
        and field.default_factory is MISSING
        and type(None) not in typing.get_args(hints[field.name])
    )


@lru_cache(maxsize=1)
def _choices() -> dict[str, set[str]]:
    """The columns of enumerations, and the values that each can have."""
    hints = typing.get_type_hints(Measurement)
    kinds = {n: kind for n, kind in hints.items() if isinstance(kind, type)}
    return {n: {each.value for each in k} for n, k in kinds.items() if issubclass(k, Enum)}


def _nested_fault(structs: pa.ChunkedArray, required: tuple[str, ...]) -> str:
    import pyarrow.compute as pc

    for name in required:
        if pc.struct_field(structs, name).null_count:
            return f"a {name} is missing"
    return ""


def _parameters_fault(column: pa.ChunkedArray) -> str:
    import pyarrow.compute as pc

    for chunk in column.chunks:
        for text in pc.unique(chunk.items).to_pylist():
            try:
                value: Any = json.loads(text)
            except (TypeError, ValueError, RecursionError) as error:
                return f"a parameter is not JSON: {error!r}"
            if isinstance(value, list | dict):
                return f"a parameter is no plain value: {text}"
    return ""
