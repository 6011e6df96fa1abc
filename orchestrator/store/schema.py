"""The columns of the result tables: an Arrow schema held against the ``Measurement`` record.

The schema is built from the record's fields, and every column carries a description and a unit in
its Arrow metadata (``docs/schema.md`` is generated from it; ``column_docs.py`` declares them, with
the numbers that are allowed). ``metrics`` is flattened into columns of its own, so that plain SQL
is pleasant; raw samples and items stay nested; open-ended names are maps. Values of ``parameters``
are JSON, since they have several types.

Format history (``schema_version``):
    1  first version
A reader refuses a newer version (``SchemaMismatch``). It reads an older one (``current``): columns
that were added since are filled with their default. A change of meaning needs an entry in
``UPGRADES``.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import SchemaMismatch, StoreError
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.store.column_docs import COLUMN_DOCS, NESTED_DOCS, RANK, Doc, Range
from workloads.base import Item, MeasureSettings, Sample

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1

#: Key of ``details`` under which numbers stand that their columns do not admit.
OUT_OF_RANGE = "out_of_range"

#: The columns of raw values, which most readers do not need.
RAW_COLUMNS = ("samples", "items", "image")

VERSION_KEY = b"nightgrid.schema_version"
TIMES = ("recorded_at", "started_at", "ended_at")
METRICS = {field.name for field in fields(Metrics)}
RAW_TYPES: dict[str, type] = {"samples": Sample, "items": Item}
NESTED: dict[str, type] = {**RAW_TYPES, "measure": MeasureSettings}


@lru_cache(maxsize=1)
def schema() -> pa.Schema:
    """The Arrow schema of a table of measurements, with documented columns."""
    import pyarrow as pa

    columns = []
    for name, hint in hints_of(Measurement).items():
        if name == "metrics":
            columns += [_column(metric, _arrow(kind)) for metric, kind in hints_of(Metrics).items()]
        elif name in RAW_TYPES:
            columns.append(_column(name, pa.list_(_struct(RAW_TYPES[name], rank=True))))
        elif name in TIMES:
            columns.append(_column(name, pa.timestamp("us", tz="UTC")))
        else:
            columns.append(_column(name, _arrow(hint)))
    return pa.schema(columns, metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})


@lru_cache(maxsize=1)
def undocumented_schema() -> pa.Schema:
    """The same columns without their descriptions, for files of a single row."""
    import pyarrow as pa

    return pa.schema([bare(column) for column in schema()], metadata=schema().metadata)


def bare(field: pa.Field) -> pa.Field:
    """The field without descriptions, and without saying that nested values are never null."""
    import pyarrow as pa

    kind = field.type
    if pa.types.is_map(kind):
        kind = pa.map_(kind.key_type, bare(kind.item_field).type)
    elif pa.types.is_list(kind):
        kind = pa.list_(bare(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([bare(child) for child in kind])
    return pa.field(field.name, kind)


def column_names(*, raw: bool = True) -> list[str]:
    """The columns in order, with or without the raw samples and items."""
    return [name for name in schema().names if raw or name not in RAW_COLUMNS]


@lru_cache(maxsize=1)
def defaults() -> dict[str, Any]:
    """Values that stand for null, by column, where that is not null itself."""
    made = {
        field.name: default_of(field)
        for kind in (Measurement, Metrics)
        for field in fields(kind)
        if field.name != "metrics" and default_of(field) not in (None, MISSING)
    }
    return {name: [] if value in ((), {}) else value for name, value in made.items()}


def default_of(field: Field[Any]) -> Any:
    """The default of a field; ``MISSING`` where it has none."""
    if field.default is MISSING and field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def required(kind: type | None = None) -> frozenset[str]:
    """The columns, or of a nested record the fields, that have no default and cannot be null."""
    kinds = (Measurement, Metrics) if kind is None else (kind,)
    return frozenset(
        name
        for each in kinds
        for name, (field, optional) in rules_of(each).items()
        if not optional and default_of(field) is MISSING
    )


@lru_cache(maxsize=1)
def choices() -> dict[str, set[str]]:
    """The columns of enumerations, and the values that each can have."""
    return {n: {str(one) for one in k} for n, k in hints_of(Measurement).items() if is_choice(k)}


@lru_cache(maxsize=16)
def rules_of(kind: type) -> dict[str, tuple[Field[Any], bool]]:
    """The fields of a record, by name, each with whether it may be None."""
    hints = hints_of(kind)
    return {
        field.name: (field, optional_of(hints[field.name]) is not None) for field in fields(kind)
    }


def allowed_in(kind: type, name: str) -> Range:
    """The numbers that a field of a record may hold."""
    docs = NESTED_DOCS.get(kind.__name__, COLUMN_DOCS)
    return docs[name].allowed


# ---------------------------------------------------------------- types


def is_choice(hint: Any) -> bool:
    """Return whether values of a type are texts, one of those that iterating the type gives."""
    return isinstance(hint, type) and issubclass(hint, str) and hint is not str


@lru_cache(maxsize=16)
def hints_of(kind: type) -> dict[str, Any]:
    """Field types by name, in field order."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def numbers_in(hint: Any) -> bool:
    """Return whether values of a type are tuples of numbers."""
    return typing.get_origin(hint) is tuple and typing.get_args(hint)[0] in (int, float)


def optional_of(hint: Any) -> Any:
    """The T of ``T | None``, or None when ``hint`` does not admit None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(rest) == 1 and len(typing.get_args(hint)) == 2:
            return rest[0]
    return None


def _arrow(hint: Any) -> pa.DataType:
    """The Arrow type of a field's Python type.

    Raises:
        TypeError: there is none; a new kind of field needs a decision here.
    """
    import pyarrow as pa

    hint = optional_of(hint) or hint
    simple = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    simple[bytes] = pa.binary()
    if hint in simple:
        return simple[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal or is_choice(hint):
        return pa.string()
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return pa.list_(_arrow(arguments[0]))
    if origin is not None and issubclass(origin, Mapping):
        return pa.map_(pa.string(), pa.float64() if arguments[1] is float else pa.string())
    if hint is MeasureSettings:
        return _struct(MeasureSettings)
    raise TypeError(f"no Arrow type for {hint!r}")


def _struct(kind: type, *, rank: bool = False) -> pa.StructType:
    import pyarrow as pa

    docs = NESTED_DOCS[kind.__name__]
    children = [_documented("rank", pa.int64(), RANK)] if rank else []
    children += [
        _documented(name, _arrow(hint), docs[name]) for name, hint in hints_of(kind).items()
    ]
    return pa.struct(children)


def _column(name: str, kind: pa.DataType) -> pa.Field:
    return _documented(name, kind, COLUMN_DOCS[name])


def _documented(name: str, kind: pa.DataType, doc: Doc) -> pa.Field:
    import pyarrow as pa

    metadata = {"description": doc.meaning} | ({"unit": doc.unit} if doc.unit else {})
    return pa.field(name, kind, metadata=metadata)


# ---------------------------------------------------------------- older tables

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
    expected = columns_schema(columns)
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
    return bool(table.schema.equals(columns_schema(columns))) and not any(
        table.column(at).null_count for at in _places_of_defaults(columns)
    )


@lru_cache(maxsize=32)
def _places_of_defaults(columns: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(at for at, name in enumerate(columns) if name in defaults())


def columns_schema(names: Sequence[str]) -> pa.Schema:
    """The schema of these columns, without descriptions."""
    import pyarrow as pa

    whole = undocumented_schema()
    return pa.schema([whole.field(name) for name in names], metadata=whole.metadata)


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
