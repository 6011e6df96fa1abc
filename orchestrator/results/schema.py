"""The columns of the result tables: an Arrow schema held against the ``Measurement`` record.

The schema is built from the record's fields, and every column carries a description and a unit in
its Arrow metadata (``docs/schema.md`` is generated from it; ``schema_docs.py`` declares them, with
the numbers that are allowed). ``metrics`` is flattened into columns of its own, so that plain SQL
is pleasant; raw samples and items stay nested; open-ended names are maps. Values of ``parameters``
are JSON, since they have several types.

Format history (``schema_version``):
    1  first version
A reader refuses a newer version (``SchemaMismatch``). It reads an older one: columns that were
added since are filled with their default. A change of meaning needs an entry in ``UPGRADES``.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from operator import attrgetter
from typing import Any

from orchestrator.domain.measurement import Measurement, Metrics
from orchestrator.errors import SchemaMismatch, StoreError
from orchestrator.results.schema_docs import COLUMN_DOCS, NESTED_DOCS, RANK, Doc, Range
from workloads.api import Item, MeasureSettings, Sample

if typing.TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1

#: From a version to the next: table -> table, for changes that a default cannot bridge.
UPGRADES: dict[int, Callable[[pa.Table], pa.Table]] = {}

#: Key of ``details`` under which numbers stand that their columns do not admit.
OUT_OF_RANGE = "out_of_range"

#: The columns of raw values, which most readers do not need.
RAW_COLUMNS = ("samples", "items", "image")

_VERSION_KEY = b"nightgrid.schema_version"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_TIMES = ("recorded_at", "started_at", "ended_at")
_METRICS = {field.name for field in fields(Metrics)}
_json = json.JSONEncoder(separators=(",", ":")).encode
_RAW_TYPES: dict[str, type] = {"samples": Sample, "items": Item}
_NESTED: dict[str, type] = {**_RAW_TYPES, "measure": MeasureSettings}


@lru_cache(maxsize=1)
def schema() -> pa.Schema:
    """The Arrow schema of a table of measurements, with documented columns."""
    import pyarrow as pa

    columns = []
    for name, hint in _hints(Measurement).items():
        if name == "metrics":
            columns += [_column(metric, _arrow(kind)) for metric, kind in _hints(Metrics).items()]
        elif name in _RAW_TYPES:
            columns.append(_column(name, pa.list_(_struct(_RAW_TYPES[name], rank=True))))
        elif name in _TIMES:
            columns.append(_column(name, pa.timestamp("us", tz="UTC")))
        else:
            columns.append(_column(name, _arrow(hint)))
    return pa.schema(columns, metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()})


@lru_cache(maxsize=1)
def undocumented_schema() -> pa.Schema:
    """The same columns without their descriptions, for files of a single row."""
    import pyarrow as pa

    return pa.schema([_bare(column) for column in schema()], metadata=schema().metadata)


def _bare(field: pa.Field) -> pa.Field:
    """The field without descriptions, and without saying that nested values are never null."""
    import pyarrow as pa

    kind = field.type
    if pa.types.is_map(kind):
        kind = pa.map_(kind.key_type, _bare(kind.item_field).type)
    elif pa.types.is_list(kind):
        kind = pa.list_(_bare(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_bare(child) for child in kind])
    return pa.field(field.name, kind)


def column_names(*, raw: bool = True) -> list[str]:
    """The columns in order, with or without the raw samples and items."""
    return [name for name in schema().names if raw or name not in RAW_COLUMNS]


def to_table(measurements: Sequence[Measurement], *, documented: bool = True) -> pa.Table:
    """Rows as an Arrow table. Text that UTF-8 cannot hold is escaped; all else is exact.

    Raises:
        StoreError: a value does not fit its column; the message names both.
    """
    return _table([_flat(measurement) for measurement in measurements], documented)


def _table(rows: Sequence[Mapping[str, Any]], documented: bool) -> pa.Table:
    """Flat rows as a table; a column that they lack is null."""
    import pyarrow as pa

    columns = schema() if documented else undocumented_schema()
    try:  # all at once, since a hundred columns of few values each cost by the call
        records = pa.array(rows, pa.struct(list(columns)))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise StoreError(_misfit(rows, columns) or str(error)) from error
    batch = pa.RecordBatch.from_struct_array(records)
    return pa.Table.from_batches([batch]).replace_schema_metadata(columns.metadata)


def _misfit(rows: Sequence[Mapping[str, Any]], columns: pa.Schema) -> str | None:
    """Name the column that cannot hold its value, and the reason; None if all can."""
    import pyarrow as pa

    for column in columns:
        try:
            pa.array([row.get(column.name) for row in rows], column.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            return f"column {column.name!r} cannot hold its value: {error}"
    return None


def from_table(table: pa.Table, *, source: str = "table") -> list[Measurement]:
    """The measurements of a table, exactly as they went in.

    Columns may be missing where the record has a default, as in older tables and in tables read
    without ``RAW_COLUMNS``; columns that the record does not know are ignored.

    Raises:
        SchemaMismatch: the table is of a newer version.
        StoreError: the table is not one of measurements, or a value cannot be one.
    """
    table = current(table, source)
    try:
        rows = table.to_pylist(maps_as_pydicts="lossy")
        return [_record(row) for row in rows]
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise StoreError(f"{source} does not hold measurements: {error!r}") from error


def table_version(table: pa.Table) -> int:
    """The schema version that a table says it has; 0 when it says none."""
    value = (table.schema.metadata or {}).get(_VERSION_KEY, b"0")
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
    return tuple(at for at, name in enumerate(columns) if name in _defaults())


@lru_cache(maxsize=32)
def _fields(names: tuple[str, ...]) -> pa.Schema:
    """The schema of these columns, without descriptions."""
    import pyarrow as pa

    return pa.schema([undocumented_schema().field(name) for name in names])


def _as_expected(column: pa.ChunkedArray, field: pa.Field, source: str) -> pa.ChunkedArray:
    """The column, if it is of the field's type down to the innermost value."""
    import pyarrow as pa

    if not column.type.equals(field.type):
        if record := _NESTED.get(field.name):
            chunks = [_completed(chunk, field.type, record) for chunk in column.chunks]
            column = pa.chunked_array(chunks) if chunks else column
        if not _bare(pa.field(field.name, column.type)).type.equals(field.type):
            raise StoreError(
                f"{source} is not a Nightgrid table: its {field.name} are {column.type}, "
                f"not {field.type}"
            )
        column = column.cast(field.type)  # it says of a nested value that it is never null
    if field.name in _defaults() and column.null_count:
        default = _defaults()[field.name]
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
    rules = _rules(record)
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
    default = _defaults().get(field.name)
    return pa.chunked_array([pa.array([default] * rows, field.type)])


@lru_cache(maxsize=1)
def _defaults() -> dict[str, Any]:
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
        for name, (field, optional) in _rules(each).items()
        if not optional and field.default is MISSING and field.default_factory is MISSING
    )


@lru_cache(maxsize=1)
def choices() -> dict[str, set[str]]:
    """The columns of enumerations, and the values that each can have."""
    return {n: {str(one) for one in k} for n, k in _hints(Measurement).items() if _is_choice(k)}


# ---------------------------------------------------------------- record -> row


def _flat(measurement: Measurement) -> dict[str, Any]:
    odd: list[str] = []  # numbers that their columns do not admit, as text
    row = _plain_fields(Measurement).of(measurement, odd)
    row |= _plain_fields(Metrics).of(measurement.metrics, odd)
    for name, kind in _RAW_TYPES.items():
        row[name] = _raw(name, kind, getattr(measurement, name), odd)
    for name in _TIMES:
        value = getattr(measurement, name)
        if value is not None and not COLUMN_DOCS[name].allowed.admits(value):
            odd.append(f"{name}={value!r}")
            value = None
        row[name] = None if value is None else round(value * 1_000_000)
    row["workload_metrics"] = [
        (_text(key), float(value)) for key, value in measurement.workload_metrics.items()
    ]
    for name in _mappings():
        row[name] = [(_text(key), _text(item)) for key, item in getattr(measurement, name).items()]
    if odd:
        row["details"].append((OUT_OF_RANGE, "; ".join(odd)))
    row["parameters"] = [
        (_text(key), _json(_text(item) if type(item) is str else item))
        for key, item in measurement.parameters.items()
    ]
    row["measure"] = _plain_fields(MeasureSettings).of(measurement.measure, odd)
    return row


class _PlainFields:
    """The fields of a record that are plain values or tuples of them. Which are numbers is found
    out once, from their types: most of a row's hundred are, and need no look at each value."""

    def __init__(self, kind: type) -> None:
        others = _other_columns() if kind is Measurement else ()
        hints = {name: hint for name, hint in _hints(kind).items() if name not in others}
        numbers = (bool, int, float)
        self._numbers = tuple(n for n, h in hints.items() if (_optional(h) or h) in numbers)
        self._others = tuple(name for name in hints if name not in self._numbers)
        self._of_numbers = attrgetter(*self._numbers)
        self._ranges = tuple(
            (name, *allowed_in(kind, name)[:2], allowed_in(kind, name))
            for name in self._numbers
            if (_optional(hints[name]) or hints[name]) is not bool
        )
        self._optional = {name for name, hint in hints.items() if _optional(hint) is not None}

    def of(self, record: Any, odd: list[str]) -> dict[str, Any]:
        """The values by name: of a choice its text, of a tuple a list.

        Args:
            record: whose fields they are.
            odd: gets, as text, the numbers that are out of range. They are null in the row where
                that is possible, so that a row that was measured is never one that readers refuse.

        Raises:
            StoreError: a number that may not be null is out of range.
        """
        row = dict(zip(self._numbers, self._of_numbers(record), strict=True))
        for name, low, high, allowed in self._ranges:
            value = row[name]
            if value is not None and not low <= value <= high and not allowed.admits(value):
                if name not in self._optional:
                    raise StoreError(f"{name} is {value!r:.40}, not in its range: {allowed}")
                odd.append(f"{name}={value!r:.40}")
                row[name] = None
        for name in self._others:
            value = getattr(record, name)
            row[name] = value if value is None else _scalar(value)
        return row


_plain_fields = lru_cache(maxsize=16)(_PlainFields)


def allowed_in(kind: type, name: str) -> Range:
    """The numbers that a field of a record may hold."""
    docs = NESTED_DOCS.get(kind.__name__, COLUMN_DOCS)
    return docs[name].allowed


def _all_in(values: Sequence[float], allowed: Range) -> bool:
    """Return whether all lie in a range. With a NaN among them their sum is one, which equals
    nothing."""
    total = sum(values)
    return total == total and allowed.low <= min(values) and max(values) <= allowed.high


def _raw(name: str, kind: type, pairs: Sequence[Any], odd: list[str]) -> list[dict[str, Any]]:
    """Raw samples or items without those that have an invalid number, which ``odd`` collects."""
    plain = _plain_fields(kind)
    found = []
    for number, (rank, raw) in enumerate(pairs):
        try:
            values = plain.of(raw, odd)
            steps = values.get("step_s") or ()
            if steps and not _all_in(steps, allowed_in(kind, "step_s")):
                raise StoreError(f"step_s has {min(steps)!r} to {max(steps)!r}")
        except StoreError as error:
            odd.append(f"{name}[{number}]: {error}")
            continue
        found.append({"rank": rank} | values)
    return found


@lru_cache(maxsize=1)
def _mappings() -> tuple[str, ...]:
    """The fields that map texts to texts."""
    hints = _hints(Measurement).items()
    return tuple(name for name, hint in hints if hint == Mapping[str, str])


@lru_cache(maxsize=1)
def _other_columns() -> frozenset[str]:
    """The fields of a measurement that ``_flat`` converts in a special way."""
    others = ("metrics", "measure", "parameters", "workload_metrics")
    return frozenset({*_TIMES, *_RAW_TYPES, *_mappings(), *others})


def _scalar(value: Any) -> Any:
    if type(value) is str:
        return _text(value)
    if isinstance(value, str):  # of a choice
        return str(value)
    return [_scalar(item) for item in value] if isinstance(value, tuple) else value


def _text(value: str) -> str:
    """Valid Unicode: an undecodable byte of a log becomes an escape instead of an error."""
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


# ---------------------------------------------------------------- row -> record


def _record(row: dict[str, Any]) -> Measurement:
    values = {name: _value(name, item) for name, item in row.items() if name not in _METRICS}
    metrics = {name: item for name, item in row.items() if name in _METRICS}
    values["metrics"] = Metrics(**_without_missing(Metrics, metrics))
    return Measurement(**_without_missing(Measurement, values))


def _value(name: str, value: Any) -> Any:
    """Convert one column's Python value to the record's type; None stays None."""
    if value is None:
        return None
    if name in _RAW_TYPES:
        kind = _RAW_TYPES[name]
        return tuple((raw.pop("rank"), kind(**_without_missing(kind, raw))) for raw in value)
    if name == "measure":
        return MeasureSettings(**_without_missing(MeasureSettings, value))
    if name == "parameters":
        return {key: json.loads(item) for key, item in value.items()}
    if name in _TIMES:
        return ((value - _EPOCH) // timedelta(microseconds=1)) / 1_000_000
    hint = _hints(Measurement)[name]
    if _is_choice(hint):
        return hint(value)
    return tuple(value) if isinstance(value, list) else value


def _without_missing(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """The fields that the record knows; nulls give way to defaults, lists become tuples.

    Raises:
        ValueError: a field without a default is null or absent.
    """
    result = {}
    for name, (field, optional) in _rules(kind).items():
        value = values.get(name)
        if value is not None:
            result[name] = tuple(value) if isinstance(value, list) else value
        elif optional:
            result[name] = None
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{kind.__name__}.{name} is missing")
    return result


@lru_cache(maxsize=16)
def _rules(kind: type) -> dict[str, tuple[Field[Any], bool]]:
    """The fields of a record, by name, each with whether it may be None."""
    hints = _hints(kind)
    return {field.name: (field, _optional(hints[field.name]) is not None) for field in fields(kind)}


# ---------------------------------------------------------------- types


def _is_choice(hint: Any) -> bool:
    """Return whether values of a type are texts, one of those that iterating the type gives."""
    return isinstance(hint, type) and issubclass(hint, str) and hint is not str


@lru_cache(maxsize=16)
def _hints(kind: type) -> dict[str, Any]:
    """Field types by name, in field order."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _optional(hint: Any) -> Any:
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

    hint = _optional(hint) or hint
    simple = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    simple[bytes] = pa.binary()
    if hint in simple:
        return simple[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal or _is_choice(hint):
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
    children += [_documented(name, _arrow(hint), docs[name]) for name, hint in _hints(kind).items()]
    return pa.struct(children)


def _column(name: str, kind: pa.DataType) -> pa.Field:
    return _documented(name, kind, COLUMN_DOCS[name])


def _documented(name: str, kind: pa.DataType, doc: Doc) -> pa.Field:
    import pyarrow as pa

    metadata = {"description": doc.meaning} | ({"unit": doc.unit} if doc.unit else {})
    return pa.field(name, kind, metadata=metadata)
