"""Tables of earlier versions, brought to this program's: columns, types, defaults.

Format history (``schema_version``):
    1  first version
A reader refuses a newer version (``SchemaMismatch``). It reads an older one: columns that were
added since are filled with their default. A change of meaning needs an entry in ``UPGRADES``.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from functools import lru_cache

from orchestrator.core.errors import SchemaMismatch, StoreError
from orchestrator.results.schema import (
    NESTED,
    SCHEMA_VERSION,
    VERSION_KEY,
    bare,
    defaults,
    required,
    rules_of,
    undocumented_schema,
)
from orchestrator.results.schema_docs import COLUMN_DOCS

if typing.TYPE_CHECKING:
    import pyarrow as pa

#: From a version to the next: table -> table, for changes that a default cannot bridge.
UPGRADES: dict[int, Callable[[pa.Table], pa.Table]] = {}


def table_version(table: pa.Table) -> int:
    """The schema version that a table says it has; 0 when it says none."""
    value = (table.schema.metadata or {}).get(VERSION_KEY, b"0")
    return int(value) if value.isdigit() else 0


def refuse_newer(version: int, source: str) -> None:
    """Let a schema version pass that this program knows.

    Raises:
        SchemaMismatch: it is of a newer program.
    """
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{source} has schema version {version}; this program reads up to {SCHEMA_VERSION}. "
            "Use the version of Nightgrid that wrote it, or a newer one."
        )


def current(table: pa.Table, source: str, columns: Sequence[str] | None = None) -> pa.Table:
    """The table brought to this program's version: these columns, of exactly their types. Values
    are not looked at (``validation.py`` does that); nulls give way to defaults.

    Args:
        table: what a file held.
        source: its name, for errors.
        columns: those wanted; None: those that are there, and all that a record needs must be.

    Raises:
        SchemaMismatch: the table is of a newer version.
        StoreError: it is not one of measurements.
    """
    import pyarrow as pa

    version = table_version(table)
    if version == 0:
        raise StoreError(f"{source} is not a Nightgrid table: it has no schema version")
    refuse_newer(version, source)
    for number in range(version, SCHEMA_VERSION):
        if number in UPGRADES:
            table = UPGRADES[number](table)
    if columns is not None and _is_as_expected(table, tuple(columns)):
        return table  # as nearly every file is: a look at each of a hundred columns costs more
    present = table.column_names
    if len(set(present)) < len(present):
        raise StoreError(f"{source} is not a Nightgrid table: it has a column twice")
    if columns is None:
        columns = [name for name in present if name in COLUMN_DOCS]
        if lacking := required() - {*columns}:
            raise StoreError(f"{source} does not hold measurements: it has no {min(lacking)}")
    expected = _fields(tuple(columns))
    arrays = [
        _as_expected(table.column(field.name), field, source)
        if field.name in present
        else _absent(field, table.num_rows, source)
        for field in expected
    ]
    result = pa.Table.from_arrays(arrays, schema=expected)
    return result.replace_schema_metadata(table.schema.metadata)


def _is_as_expected(table: pa.Table, columns: tuple[str, ...]) -> bool:
    """Return whether a table has these columns of the right types, and no null that has a
    default."""
    return bool(table.schema.equals(_fields(columns))) and not any(
        table.column(at).null_count for at in _places_of_defaults(columns)
    )


@lru_cache(maxsize=32)
def _places_of_defaults(columns: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(at for at, name in enumerate(columns) if name in defaults())


@lru_cache(maxsize=32)
def _fields(names: tuple[str, ...]) -> pa.Schema:
    """The schema of these columns, without descriptions."""
    import pyarrow as pa

    return pa.schema([undocumented_schema().field(name) for name in names])


def _as_expected(column: pa.ChunkedArray, field: pa.Field, source: str) -> pa.ChunkedArray:
    """The column, if it is of the field's type down to the innermost value."""
    import pyarrow as pa

    if not column.type.equals(field.type):
        if record := NESTED.get(field.name):
            chunks = [_completed(chunk, field.type, record) for chunk in column.chunks]
            column = pa.chunked_array(chunks) if chunks else column
        if not bare(pa.field(field.name, column.type)).type.equals(field.type):
            raise StoreError(
                f"{source} is not a Nightgrid table: its {field.name} are {column.type}, "
                f"not {field.type}"
            )
        column = column.cast(field.type)  # it says of a nested value that it is never null
    if field.name in defaults() and column.null_count:
        default = defaults()[field.name]
        values = [default if value is None else value for value in column.to_pylist()]
        column = pa.chunked_array([pa.array(values, field.type)])
    return column


def _completed(array: pa.Array, kind: pa.DataType, record: type) -> pa.Array:
    """Nested values of an older table with what its record has got since, at its defaults; as they
    are where they lack something else."""
    import pyarrow as pa

    if pa.types.is_list(kind) and pa.types.is_list(array.type) and not array.null_count:
        values = _completed(array.flatten(), kind.value_type, record)
        begins = array.offsets.to_numpy()
        return pa.ListArray.from_arrays(pa.array(begins - begins[0], pa.int32()), values)
    if not (pa.types.is_struct(kind) and pa.types.is_struct(array.type)):
        return array
    present = {child.name for child in array.type}
    lacking = {child.name for child in kind} - present
    if not lacking or lacking & required(record) or not present <= {child.name for child in kind}:
        return array
    rules = rules_of(record)
    parts = []
    for child in kind:
        if child.name in present:
            parts.append(array.field(child.name))
        else:
            default = rules[child.name][0].default if child.name in rules else None
            value = None if default in (MISSING, ()) else default
            parts.append(pa.repeat(pa.scalar(value, child.type), len(array)))
    fields_ = [child.with_type(part.type) for child, part in zip(kind, parts, strict=True)]
    return pa.StructArray.from_arrays(parts, fields=fields_, mask=array.is_null())


def _absent(field: pa.Field, rows: int, source: str) -> pa.ChunkedArray:
    """The default of a column that older tables lack."""
    import pyarrow as pa

    if field.name in required():
        raise StoreError(f"{source} does not hold measurements: it has no {field.name}")
    default = defaults().get(field.name)
    return pa.chunked_array([pa.array([default] * rows, field.type)])
