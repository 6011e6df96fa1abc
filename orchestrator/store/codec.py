"""Codec of rows: a ``Measurement`` to a line of JSON or an Arrow table, and back.

A row (``row_of``) maps columns to plain values: ``metrics`` flattened, times in microseconds since
the epoch, values of ``parameters`` as JSON, raw samples and items as records with their rank, nulls
left out. Numbers that their columns do not admit move as text to ``details``, so that readers
refuse no measured row; everything else round-trips exactly. Tables are decoded column by column
with shared values made once: a hundred thousand rows take seconds.
"""

from __future__ import annotations

import base64
import json
import math
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import lru_cache
from itertools import repeat
from numbers import Real
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import StoreError
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.store import schema
from workloads.base import MeasureSettings

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows of a table that are converted together: enough to be fast, few enough to stay small.
ROWS_TOGETHER = 8192
MAPS = ("details", "parameters", "versions", "workload_metrics")

#: Converts a value to that of its column, None where it is moved to the list of odd numbers.
_Convert = Callable[[Any, list[str]], Any]

# ---------------------------------------------------------------- measurement -> row


def row_of(measurement: Measurement) -> dict[str, Any]:
    """Return a row's non-null columns as plain values; StoreError if a value does not fit."""
    odd: list[str] = []
    row = _plain(measurement, odd)
    row |= row.pop("metrics")
    if odd:
        row["details"][schema.OUT_OF_RANGE] = "; ".join(odd)
    return row


def _plain(record: Any, odd: list[str]) -> dict[str, Any]:
    """Non-null fields as plain values, out-of-range numbers to ``odd``; StoreError if invalid."""
    row = {}
    for name, convert in _conversions(record.__class__):
        value = getattr(record, name)
        if value is not None:
            try:
                value = convert(value, odd)
            except (TypeError, ValueError, AttributeError) as error:
                what = f"column {name!r} cannot hold its value: {value!r:.80}"
                raise StoreError(what) from error
        if value is not None:
            row[name] = value
    return row


@lru_cache(maxsize=8)
def _conversions(record: type) -> list[tuple[str, _Convert]]:
    return [(name, _conversion(record, name)) for name in schema.rules_of(record)]


def _conversion(record: type, name: str) -> _Convert:
    """Return a field's conversion, which raises TypeError or the like for another type."""
    kind, optional, _, doc = schema.rules_of(record)[name]
    items = typing.get_args(kind)

    def set_aside(what: str, odd: list[str]) -> None:
        if not optional:
            raise StoreError(f"{what}, not in its range: {doc.allowed}")
        odd.append(what)

    def number(value: Any, odd: list[str]) -> Any:
        if type(value) not in (int, float):
            value = kind(_real(value))
        if kind is int and type(value) is float:
            raise TypeError(value)
        if doc.allowed.admits(value):
            return round(value * 1_000_000) if name in schema.TIMES else value
        set_aside(f"{name}={value!r:.40}", odd)
        return None

    def numbers(values: Any, odd: list[str]) -> Any:
        values = [items[0](_real(value)) for value in values]
        ends = [min(values), max(values)] if values else []
        if all(map(doc.allowed.admits, ends)) and not any(map(math.isnan, values)):
            return values
        set_aside(f"{name} from {ends[0]!r:.40} to {ends[1]!r:.40}", odd)
        return None

    def plain(value: Any, _: list[str]) -> Any:
        if not isinstance(value, kind):
            raise TypeError(value)
        return value

    def text(value: Any, _: list[str]) -> Any:
        return list(map(_text, value)) if isinstance(value, tuple) else _text(value)

    if record is Measurement and name in schema.RAW_TYPES:  # a sample has a number of items
        return lambda pairs, odd: _raw_values(name, pairs, odd)
    if name in MAPS:
        make: Callable[[Any], Any] = _text
        if name in ("parameters", "workload_metrics"):
            make = _parameter if name == "parameters" else float
        return lambda values, _: {_text(key): make(value) for key, value in values.items()}
    if name in ("metrics", "measure"):
        return _plain
    if kind in (int, float):
        return number
    if items and items[0] in (int, float):
        return numbers
    return plain if kind in (bool, bytes) else text


def _raw_values(name: str, pairs: Sequence[Any], odd: list[str]) -> list[dict[str, Any]]:
    """Raw samples or items without those that have an invalid number, which ``odd`` collects."""
    records = []
    for number, (rank, raw) in enumerate(pairs):
        try:
            records.append({"rank": rank} | _plain(raw, odd))
        except StoreError as error:
            odd.append(f"{name}[{number}]: {error}")
    return records


def _real(value: Any) -> Any:
    """Return a Python or NumPy number; else raise TypeError."""
    if not isinstance(value, Real):
        raise TypeError(value)
    return value


def _text(value: str) -> str:
    """Valid Unicode: an undecodable byte of a log becomes an escape instead of an error."""
    return str(value if value.isascii() else value.encode("utf-8", "backslashreplace").decode())


def _parameter(value: Any) -> str:
    return _encode(_text(value) if type(value) is str else value)


# ---------------------------------------------------------------- row -> line or table


def line_of(row: Mapping[str, Any]) -> bytes:
    """A row as JSON on one line, without its end."""
    return _encode(row).encode("ascii")


def _bytes_as_text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    raise TypeError(f"not a value of a row: {value!r:.80}")


_encode = json.JSONEncoder(separators=(",", ":"), default=_bytes_as_text).encode


def row_in(line: bytes) -> dict[str, Any]:
    """Parse a row, values unchecked; raise ValueError, RecursionError or SchemaMismatch (newer)."""
    row = json.loads(line)
    if not isinstance(row, dict) or type(row.get("schema_version")) is not int:
        raise ValueError("a row is an object with a schema version")
    schema.refuse_newer(row["schema_version"], "a row")
    return row


def to_table(measurements: Sequence[Measurement]) -> pa.Table:
    """Convert rows to an Arrow table, escaping invalid Unicode; StoreError if a value is bad."""
    import pyarrow as pa

    try:
        return table_of([row_of(measurement) for measurement in measurements])
    except (pa.ArrowException, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise StoreError(f"a value does not fit its column: {error}") from error


def table_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> pa.Table:
    """Convert rows to a table with these columns (None: all).

    Raises ArrowException, ValueError, TypeError, LookupError, ArithmeticError or AttributeError if
    a value does not fit its column.
    """
    import pyarrow as pa

    wanted = schema.columns_schema(schema.column_names() if columns is None else columns)
    arrays = []
    for field in wanted:
        values: list[Any] = [row.get(field.name) for row in rows]
        if field.name in MAPS:
            values = [None if value is None else list(value.items()) for value in values]
        elif field.name == "image":
            values = [base64.b64decode(v, validate=True) if type(v) is str else v for v in values]
        arrays.append(pa.array(values, field.type))
    version = min((row["schema_version"] for row in rows), default=1)
    metadata = {schema.VERSION_KEY: str(version).encode()}
    return pa.Table.from_arrays(arrays, schema=wanted.with_metadata(metadata))


# ---------------------------------------------------------------- table -> measurement


def measurements_of(
    table: pa.Table, *, source: str = "table", shared: dict[Any, Any] | None = None
) -> Iterator[Measurement]:
    """Convert a table to measurements, a few thousand rows at a time; missing columns get defaults,
    unknown ones are ignored. ``shared`` has values that rows of several tables share.

    Raises SchemaMismatch if the table is of a newer version, StoreError if a value is invalid.
    """
    import pyarrow as pa

    table = schema.current(table, source)
    shared = {} if shared is None else shared
    try:
        for start in range(0, table.num_rows, ROWS_TOGETHER):
            part = table.slice(start, ROWS_TOGETHER)
            columns = {name: values_of(name, part[name], shared) for name in part.column_names}
            columns["metrics"] = _records(Metrics, part.num_rows, columns)
            yield from _records(Measurement, part.num_rows, columns)
    except (
        *(KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError),
        *(RecursionError, pa.ArrowException),
    ) as error:
        raise StoreError(f"{source} does not hold measurements: {error!r:.300}") from error


def _records(record: Any, count: int, columns: Mapping[str, list[Any]]) -> list[Any]:
    """Build records slot by slot, five times faster than ``__init__``; ValueError if incomplete."""
    records = [object.__new__(record) for _ in range(count)]
    for name, rule in schema.rules_of(record).items():
        values: Iterable[Any] = columns.get(name) or repeat(rule.default, count)
        if not rule.optional and rule.default is MISSING and None in columns.get(name, [None]):
            raise ValueError(f"{record.__name__}.{name} is missing")
        deque(map(getattr(record, name).__set__, records, values), maxlen=0)
    return records


def values_of(name: str, column: Any, shared: dict[Any, Any] | None = None) -> list[Any]:
    """Convert one column to the record's values; ``shared`` caches those that rows share."""
    import pyarrow.types as kinds

    kind = column.type
    if kinds.is_timestamp(kind):
        moments = column.cast("int64").to_pylist()
        return [None if moment is None else moment / 1_000_000 for moment in moments]
    values: list[Any] = column.to_pylist()
    if name in schema.RAW_TYPES:
        return [None if value is None else _raw_pairs(name, value) for value in values]
    rule = schema.rules_of(Measurement).get(name)
    make: Callable[[Any], Any]
    if name == "measure":
        values = [tuple(value.items()) for value in values]
        make = _measure_settings
    elif kinds.is_map(kind):
        make = _parameters if name == "parameters" else dict
    elif kinds.is_list(kind):
        make = tuple
    elif kinds.is_string(kind):
        make = rule.kind if rule is not None and schema.is_choice(rule.kind) else str
    else:
        return values
    shared = {} if shared is None else shared
    made = []
    for value in values:
        key = make, tuple(value) if isinstance(value, list) else value
        if value is not None and key not in shared:
            shared[key] = make(value)
        made.append(None if value is None else shared[key])
    return made


def _raw_pairs(name: str, records: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    kind = schema.RAW_TYPES[name]
    return tuple((one.pop("rank"), kind(**_known(kind, one.items()))) for one in records)


def _measure_settings(pairs: Iterable[tuple[str, Any]]) -> MeasureSettings:
    return MeasureSettings(**_known(MeasureSettings, pairs))


def _known(record: type, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of a nested record; nulls give way to defaults, lists become tuples."""
    rules = schema.rules_of(record)
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in pairs
        if name in rules and (value is not None or rules[name].optional)
    }


def _parameters(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in pairs}
