"""The one look at values that come from files of rows: is each what its column says it is?

``fault`` looks at whole columns: text that is UTF-8, nulls only where a record may lack a value,
numbers and times in the ranges that ``column_docs.py`` declares, states and kinds of card that
exist, parameters that are plain JSON values. What has passed needs no second look: no reader behind
this has to expect a batch size of zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchestrator.store.codec import map_entries
from orchestrator.store.column_docs import COLUMN_DOCS, NESTED_DOCS, RANK, Docs, Range
from orchestrator.store.schema import NESTED, choices, required

if TYPE_CHECKING:
    import pyarrow as pa


def faults(tables: Mapping[str, pa.Table]) -> dict[str, str]:
    """The tables, by name, that hold something else than rows, and why.

    Args:
        tables: of the same columns, and of exactly their types (``schema.current``).
    """
    full = [name for name, table in tables.items() if table.num_rows]
    found = {name: "it holds no rows" for name in tables if name not in full}
    return found | (_faults_among(tables, full) if full else {})


def _faults_among(tables: Mapping[str, pa.Table], names: Sequence[str]) -> dict[str, str]:
    """Look at all of these together; only where something is wrong, at each half alone."""
    import pyarrow as pa

    reason = fault(pa.concat_tables([tables[name] for name in names]).combine_chunks())
    if not reason or len(names) == 1:
        return dict.fromkeys(names, reason) if reason else {}
    half = len(names) // 2
    return _faults_among(tables, names[:half]) | _faults_among(tables, names[half:])


def fault(table: pa.Table) -> str:
    """Describe the first fault that makes some of these rows invalid; "" if all are valid.

    Args:
        table: some or all columns, of exactly their types.

    Raises:
        MemoryError: they may be valid.
    """
    import pyarrow as pa

    try:
        table.validate(full=True)  # offsets, and text that is UTF-8
        for field in table.schema:
            column = table.column(field.name)
            if reason := _column_fault(field.name, field.type, column):
                return reason
    except MemoryError:  # an ArrowException, too
        raise
    except (pa.ArrowException, ArithmeticError) as error:
        return str(error)
    return ""


def _column_fault(name: str, kind: pa.DataType, column: pa.ChunkedArray) -> str:
    import pyarrow as pa
    import pyarrow.compute as pc

    if name in required() and column.null_count:
        return f"{name} is missing"
    if name == "parameters":
        return _parameters_fault(column)
    if name in NESTED:
        structs = column if pa.types.is_struct(kind) else pc.list_flatten(column)
        return _record_fault(name, NESTED[name], structs)
    if name in choices():
        unknown = {str(value) for value in pc.unique(column).to_pylist()} - choices()[name]
        return f"{name} cannot be {min(unknown)!r:.60}" if unknown else ""
    return _values_fault(name, kind, column, COLUMN_DOCS[name].allowed)


def _record_fault(name: str, record: type, structs: pa.ChunkedArray) -> str:
    """Describe the first fault of nested records, field by field; "" if there is none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    docs: Docs = {"rank": RANK, **NESTED_DOCS[record.__name__]}
    needed = required(record) | {"rank"}
    if pa.types.is_struct(structs.type) and structs.null_count:
        return f"a record of {name} is missing"
    for child in structs.type:
        values = pc.struct_field(structs, child.name)
        if child.name in needed and values.null_count:
            return f"a {child.name} of {name} is missing"
        reason = _values_fault(child.name, child.type, values, docs[child.name].allowed)
        if reason:
            return f"{name}: {reason}"
    return ""


def _values_fault(name: str, kind: pa.DataType, values: pa.ChunkedArray, allowed: Range) -> str:
    """Describe the first fault of values of any type: nulls inside, numbers out of range."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_map(kind):
        chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
        missing = any(map_entries(chunk)[2].null_count for chunk in chunks)
        return f"a value of {name} is missing" if missing else ""
    if pa.types.is_list(kind):
        inner = pc.list_flatten(values)
        if inner.null_count:
            return f"a value of {name} is missing"
        return _values_fault(name, kind.value_type, inner, allowed)
    if pa.types.is_timestamp(kind):
        return _range_fault(name, pc.cast(values, pa.int64()), allowed, 1_000_000)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _range_fault(name, values, allowed)
    return ""


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


def _parameters_fault(column: pa.ChunkedArray) -> str:
    import pyarrow.compute as pc

    for chunk in column.chunks:
        for text in pc.unique(map_entries(chunk)[2]).to_pylist():
            if reason := _parameter_fault(text):
                return reason
    return ""


@lru_cache(maxsize=4096)
def _parameter_fault(text: str | None) -> str:
    """Describe the fault of the JSON of one parameter's value; most rows share theirs with
    others."""
    try:
        value: Any = json.loads(text or "")
        str(value).encode()
    except (ValueError, RecursionError) as error:  # half a character is a ValueError, too
        return f"a parameter is not JSON: {str(error) or repr(error):.100}"
    if isinstance(value, list | dict):
        return f"a parameter is not a plain value: {text!r:.60}"
    return ""
