"""The columns of the result tables: an Arrow schema held against the ``Measurement`` record.

The schema is built from the record's fields, and every column carries a description and a unit in
its Arrow metadata (``docs/schema.md`` is generated from it; ``schema_docs.py`` declares them, with
the numbers that are allowed). ``metrics`` is flattened into columns of its own, so that plain SQL
is pleasant; raw samples and items stay nested; open-ended names are maps. Values of ``parameters``
are JSON, since they have several types.

Values of older tables are brought to it in ``older_tables.py``; records become rows and rows
records in ``tables.py``.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import lru_cache
from typing import Any

from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.results.schema_docs import COLUMN_DOCS, NESTED_DOCS, RANK, Doc, Range
from workloads.base import Item, MeasureSettings, Sample

if typing.TYPE_CHECKING:
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
    found = {}
    for kind in (Measurement, Metrics):
        for field in fields(kind):
            made = None if field.default is MISSING else field.default
            if field.default_factory is not MISSING and field.name != "metrics":
                made = field.default_factory()
            if made is not None:
                found[field.name] = [] if made == () or made == {} else made
    return found


def required(kind: type | None = None) -> frozenset[str]:
    """The columns, or of a nested record the fields, that have no default and cannot be null."""
    kinds = (Measurement, Metrics) if kind is None else (kind,)
    return frozenset(
        name
        for each in kinds
        for name, (field, optional) in rules_of(each).items()
        if not optional and field.default is MISSING and field.default_factory is MISSING
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
