"""The Arrow schema of the result tables, built from the fields of ``Measurement``.

Every column carries its description and unit (``column_docs.py``), from which ``docs/schema.md`` is
generated. ``metrics`` is flattened for plain SQL; raw samples and items stay nested; open-ended
names are maps; values of ``parameters`` are JSON, since their types differ.

Format history (``schema_version``):
    1  first version
Readers refuse a newer version (``SchemaMismatch``) and fill the missing columns of an older one
with defaults (``current``), where a change of meaning would have to be bridged, too.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.core.errors import SchemaMismatch, StoreError
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.store.column_docs import COLUMN_DOCS, NESTED_DOCS, RANK, Doc, Range
from workloads.base import Item, MeasureSettings, Sample

if TYPE_CHECKING:
    import pyarrow as pa


SCHEMA_VERSION = 1

#: Key of ``details`` for numbers that their columns do not admit.
OUT_OF_RANGE = "out_of_range"

#: The columns of raw values, which most readers do not need.
RAW_COLUMNS = ("samples", "items", "image")

VERSION_KEY = b"nightgrid.schema_version"
TIMES = ("recorded_at", "started_at", "ended_at")
RAW_TYPES: dict[str, type] = {"samples": Sample, "items": Item}
NESTED: dict[str, type] = {**RAW_TYPES, "measure": MeasureSettings}


# ---------------------------------------------------------------- fields of records


class Rule(NamedTuple):
    """A field of a record."""

    kind: Any  # its type, None left out
    optional: bool  # it may be None
    default: Any  # ``MISSING`` where it has none
    doc: Doc


@lru_cache(maxsize=8)
def rules_of(record: type) -> dict[str, Rule]:
    """Return a record's fields by name, in order; ValueError if a field has two types."""
    docs = NESTED_DOCS.get(record.__name__, COLUMN_DOCS)
    hints = typing.get_type_hints(record)
    rules = {}
    for field in fields(record):
        hint = hints[field.name]
        union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        kinds = typing.get_args(hint) if union else (hint,)
        (kind,) = (one for one in kinds if one is not types.NoneType)
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        rules[field.name] = Rule(
            kind, types.NoneType in kinds, default, docs.get(field.name, Doc())
        )
    return rules


@lru_cache(maxsize=1)
def column_rules() -> dict[str, Rule]:
    """The columns by name, in their order: fields of a measurement, ``metrics`` flattened."""
    rules: dict[str, Rule] = {}
    for name, rule in rules_of(Measurement).items():
        rules |= rules_of(Metrics) if name == "metrics" else {name: rule}
    return rules


def column_names(*, raw: bool = True) -> list[str]:
    """The columns in order, with or without the raw samples and items."""
    return [name for name in column_rules() if raw or name not in RAW_COLUMNS]


def required(record: type | None = None) -> frozenset[str]:
    """The columns, or of a nested record the fields, that have no default and cannot be null."""
    rules = column_rules() if record is None else rules_of(record)
    return frozenset(n for n, r in rules.items() if not r.optional and r.default is MISSING)


def is_choice(kind: Any) -> bool:
    """Return whether a type is a string enumeration."""
    return isinstance(kind, type) and issubclass(kind, str) and kind is not str


# ---------------------------------------------------------------- types


@lru_cache(maxsize=1)
def schema() -> pa.Schema:
    """The Arrow schema of a table of measurements, with documented columns."""
    import pyarrow as pa

    columns = []
    for name, rule in column_rules().items():
        kind = pa.timestamp("us", tz="UTC") if name in TIMES else arrow_type(rule.kind)
        columns.append(_documented(name, kind, rule.doc))
    return pa.schema(columns, metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})


def columns_schema(names: Sequence[str]) -> pa.Schema:
    """The schema of these columns."""
    import pyarrow as pa

    return pa.schema([schema().field(name) for name in names], metadata=schema().metadata)


def arrow_type(kind: Any) -> pa.DataType:
    """Return the Arrow type of a field's Python type; TypeError if there is none."""
    import pyarrow as pa

    simple = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    simple[bytes] = pa.binary()
    if kind in simple:
        return simple[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal or is_choice(kind):
        return pa.string()
    if origin is tuple and arguments[-1] is Ellipsis:
        return pa.list_(arrow_type(arguments[0]))
    if origin is tuple and arguments[-1] in NESTED.values():  # with the rank that measured it
        rank = _documented("rank", pa.int64(), RANK)
        return pa.struct([rank, *arrow_type(arguments[-1])])
    if origin is not None and issubclass(origin, Mapping):
        return pa.map_(pa.string(), pa.float64() if arguments[1] is float else pa.string())
    if kind in NESTED.values():
        children = rules_of(kind).items()
        return pa.struct([_documented(name, arrow_type(r.kind), r.doc) for name, r in children])
    raise TypeError(f"no Arrow type for {kind!r}")


def _documented(name: str, kind: pa.DataType, doc: Doc) -> pa.Field:
    import pyarrow as pa

    if not doc.meaning:
        raise TypeError(f"column_docs.py does not describe {name}")
    metadata = {"description": doc.meaning} | ({"unit": doc.unit} if doc.unit else {})
    return pa.field(name, kind, metadata=metadata)


# ---------------------------------------------------------------- older tables


def refuse_newer(version: int, source: str) -> None:
    """Raise SchemaMismatch if a schema version is newer than this program's."""
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{source} has schema version {version}; this program reads up to {SCHEMA_VERSION}. "
            "Use the version of Nightgrid that wrote it, or a newer one."
        )


def current(table: pa.Table, source: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Convert a table to this version's columns and types, with defaults for nulls; values are not
    checked (``fault``). ``columns`` None: all present ones, the required ones among them.

    Raises SchemaMismatch if the table is of a newer version, StoreError if it is not one of
    measurements; both name the ``source``.
    """
    import pyarrow as pa

    value = (table.schema.metadata or {}).get(VERSION_KEY, b"0")
    version = int(value) if value.isdigit() else 0
    if version == 0:
        raise StoreError(f"{source} is not a Nightgrid table: it has no schema version")
    refuse_newer(version, source)
    present = table.column_names
    if len(set(present)) < len(present):
        raise StoreError(f"{source} is not a Nightgrid table: it has a column twice")
    if columns is None:
        columns = [name for name in present if name in COLUMN_DOCS]
        columns += sorted(required() - {*columns})
    wanted = columns_schema(columns)
    known = dict(zip(present, table.columns, strict=True))
    arrays = [_current(known.get(field.name), field, table.num_rows, source) for field in wanted]
    return pa.Table.from_arrays(arrays, schema=wanted)


def _current(
    column: pa.ChunkedArray | None, field: pa.Field, rows: int, source: str
) -> pa.ChunkedArray:
    """A column of the field's type; one that the table lacks is at its default."""
    import pyarrow as pa

    if column is not None:
        needed = required(NESTED[field.name]) if field.name in NESTED else frozenset()
        needed |= {"rank"} if field.name in RAW_TYPES else set()
        if not _fits(column.type, field.type, needed):
            raise StoreError(
                f"{source} is not a Nightgrid table: its {field.name} are {column.type}, "
                f"not {field.type}"
            )
        if not column.type.equals(field.type):
            chunks = [pa.array(chunk.to_pylist(), field.type) for chunk in column.chunks]
            column = pa.chunked_array(chunks, field.type)
    elif field.name in required():
        raise StoreError(f"{source} does not hold measurements: it has no {field.name}")
    else:
        column = pa.chunked_array([pa.nulls(rows, field.type)])
    default = column_rules()[field.name].default
    if default is None or default is MISSING or not column.null_count:
        return column
    return column.fill_null([] if default in ((), {}) else default)


def _fits(kind: pa.DataType, wanted: pa.DataType, needed: frozenset[str]) -> bool:
    """Return whether a type is the wanted one; its records may lack fields that are not needed."""
    import pyarrow as pa

    if pa.types.is_struct(kind) and pa.types.is_struct(wanted):
        known = {child.name: child.type for child in wanted}
        fit = (c.name in known and _fits(c.type, known[c.name], needed) for c in kind)
        return all(fit) and needed <= {child.name for child in kind}
    if pa.types.is_list(kind) and pa.types.is_list(wanted):
        return _fits(kind.value_type, wanted.value_type, needed)
    if pa.types.is_map(kind) and pa.types.is_map(wanted):
        return kind.key_type == wanted.key_type and kind.item_type == wanted.item_type
    return bool(kind == wanted)


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
