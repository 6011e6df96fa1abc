"""Validation of values from files of rows, so that code behind it can rely on them.

``fault`` checks whole columns: UTF-8, nulls only where allowed, numbers and times in the ranges of
``column_docs.py``, known states and kinds of card, parameters that are plain JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchestrator.store.column_docs import RANK, Range
from orchestrator.store.schema import NESTED, column_rules, is_choice, required, rules_of

if TYPE_CHECKING:
    import pyarrow as pa


def faults(tables: Mapping[str, pa.Table]) -> dict[str, str]:
    """Reasons, by name, of invalid tables; all have the same ``schema.current`` columns."""
    import pyarrow as pa

    full = {name: table for name, table in tables.items() if table.num_rows}
    reasons = dict.fromkeys(tables.keys() - full.keys(), "it holds no rows")
    # All together, since most of the time goes to a hundred columns, however few their values.
    if full and fault(pa.concat_tables(full.values()).combine_chunks()):
        reasons |= {name: reason for name, table in full.items() if (reason := fault(table))}
    return reasons


def fault(table: pa.Table) -> str:
    """Describe the first fault of a table of ``schema.current`` columns; "" if it is valid.

    Raises MemoryError, which says nothing about the values.
    """
    import pyarrow as pa

    try:
        table.validate(full=True)  # offsets, and text that is UTF-8
        for name in table.column_names:
            if reason := _column_fault(name, table.column(name)):
                return reason
    except MemoryError:  # an ArrowException, too
        raise
    except (pa.ArrowException, ArithmeticError) as error:
        return str(error)
    return ""


def _column_fault(name: str, column: pa.ChunkedArray) -> str:
    import pyarrow as pa
    import pyarrow.compute as pc

    rule = column_rules()[name]
    if name in required() and column.null_count:
        return f"{name} is missing"
    if name in NESTED:
        records = column if pa.types.is_struct(column.type) else pc.list_flatten(column)
        return _record_fault(name, NESTED[name], records)
    if is_choice(rule.kind):
        unknown = {str(value) for value in pc.unique(column).to_pylist()} - set(map(str, rule.kind))
        return f"{name} cannot be {min(unknown)!r:.60}" if unknown else ""
    if name == "parameters":
        texts = pc.unique(_map_values(column)).to_pylist()
        return next(filter(None, map(_parameter_fault, texts)), "")
    return _values_fault(name, column, rule.doc.allowed)


def _record_fault(name: str, record: type, records: pa.ChunkedArray) -> str:
    """Describe the first fault of nested records, field by field; "" if there is none."""
    import pyarrow.compute as pc

    rules = rules_of(record)
    needed = required(record) | {"rank"}
    if records.null_count:
        return f"a record of {name} is missing"
    for child in records.type:
        values = pc.struct_field(records, child.name)
        if child.name in needed and values.null_count:
            return f"a {child.name} of {name} is missing"
        doc = rules[child.name].doc if child.name in rules else RANK
        if reason := _values_fault(child.name, values, doc.allowed):
            return f"{name}: {reason}"
    return ""


def _values_fault(name: str, values: pa.ChunkedArray, allowed: Range) -> str:
    """Describe the first fault of values of any type: nulls inside, numbers out of range."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_map(kind):
        return f"a value of {name} is missing" if _map_values(values).null_count else ""
    if pa.types.is_list(kind):
        inner = pc.list_flatten(values)
        if inner.null_count:
            return f"a value of {name} is missing"
        return _values_fault(name, inner, allowed)
    if pa.types.is_timestamp(kind):
        return _range_fault(name, pc.cast(values, pa.int64()), allowed, 1_000_000)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _range_fault(name, values, allowed)
    return ""


def _map_values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    import pyarrow as pa
    import pyarrow.compute as pc

    entry = pa.struct([("key", column.type.key_type), ("value", column.type.item_type)])
    return pc.struct_field(pc.list_flatten(column.cast(pa.list_(entry))), "value")


def _range_fault(name: str, values: pa.ChunkedArray, allowed: Range, unit: int = 1) -> str:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(values.type):
        if not allowed.finite:
            values = pc.filter(values, pc.is_finite(values))
        elif pc.any(pc.is_nan(values)).as_py():
            return f"{name} is NaN, not in its range: {allowed}"
    ends = pc.min_max(values).as_py()
    for end in (ends["min"], ends["max"]):
        if end is not None and not allowed.low * unit <= end <= allowed.high * unit:
            return f"{name} is {end / unit if unit > 1 else end:,}, not in its range: {allowed}"
    return ""


@lru_cache(maxsize=4096)
def _parameter_fault(text: str | None) -> str:
    try:
        value: Any = json.loads(text or "")
        str(value).encode()
    except (ValueError, RecursionError) as error:  # half a character is a ValueError, too
        return f"a parameter is not JSON: {str(error) or repr(error):.100}"
    if isinstance(value, list | dict):
        return f"a parameter is not a plain value: {text!r:.60}"
    return ""
