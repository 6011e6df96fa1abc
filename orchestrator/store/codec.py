"""The one codec of rows: a ``Measurement`` to a line of JSON or an Arrow table, and back.

On its way to the disk a row is a flat mapping of columns to plain values (``row_of``): ``metrics``
is flattened, times are whole microseconds since the epoch, values of ``parameters`` are JSON, raw
samples and items are lists of records with their rank; what is null is left out. As a line of JSON
it stands in the log (``log.py``); many of them make a table, which becomes Parquet. Bytes are
base64 in JSON; NaN and infinities stand as Python writes them.

Numbers that their columns do not admit are kept as text in ``details``, so that a row that was
measured is never one that readers refuse. All else is exact: a round trip loses nothing.

Back from a table, a column is converted as a whole, and what most rows share (texts, parameters,
versions, settings of measuring) is made once: a hundred thousand rows take two seconds.
"""

from __future__ import annotations

import base64
import json
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import lru_cache
from itertools import repeat
from numbers import Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import StoreError
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.store.column_docs import COLUMN_DOCS, Range
from orchestrator.store.schema import (
    METRICS,
    NESTED,
    OUT_OF_RANGE,
    RAW_TYPES,
    TIMES,
    VERSION_KEY,
    allowed_in,
    columns_schema,
    current,
    default_of,
    hints_of,
    is_choice,
    numbers_in,
    optional_of,
    refuse_newer,
    rules_of,
    schema,
    undocumented_schema,
)
from workloads.base import MeasureSettings

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

#: Rows of a table that are converted together: enough to be fast, few enough to stay small.
ROWS_TOGETHER = 8192
_MAPS = ("details", "parameters", "versions", "workload_metrics")


# ---------------------------------------------------------------- measurement -> row


def row_of(measurement: Measurement) -> dict[str, Any]:
    """The columns of a row as plain values, without those that are null.

    Raises:
        StoreError: a value does not fit its column; the message names both.
    """
    odd: list[str] = []  # numbers that their columns do not admit, as text
    row = _plain_fields(Measurement).values(measurement, odd)
    row |= _plain_fields(Metrics).values(measurement.metrics, odd)
    row["measure"] = _plain_fields(MeasureSettings).values(measurement.measure, odd)
    for name, kind in RAW_TYPES.items():
        row[name] = _raw_values(name, kind, getattr(measurement, name), odd)
    for name in TIMES:
        value = getattr(measurement, name)
        if value is not None and COLUMN_DOCS[name].allowed.admits(value):
            row[name] = round(value * 1_000_000)
        elif value is not None:
            odd.append(f"{name}={value!r}")
    try:
        for name in _MAPS:
            values = getattr(measurement, name)
            row[name] = {_text(key): _MAP_VALUES[name](value) for key, value in values.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"column {name!r} cannot hold its value: {error}") from error
    if odd:
        row["details"][OUT_OF_RANGE] = "; ".join(odd)
    return row


def line_of(row: Mapping[str, Any]) -> bytes:
    """A row as JSON on one line, without its end."""
    return _encode(row).encode("ascii")


def _bytes_as_text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    raise TypeError(f"not a value of a row: {value!r:.80}")


_encode = json.JSONEncoder(separators=(",", ":"), default=_bytes_as_text).encode


class _PlainFields:
    """The fields of a kind of record that are plain values or tuples of them."""

    def __init__(self, kind: type) -> None:
        apart = {"metrics", "measure", *TIMES, *RAW_TYPES, *_MAPS} if kind is Measurement else ()
        names = [name for name in hints_of(kind) if name not in apart]
        self._get = attrgetter(*names)
        self._fields = [(name, _check_of(kind, name)) for name in names]

    def values(self, record: Any, odd: list[str]) -> dict[str, Any]:
        """The values by name, without those that are None.

        Args:
            record: whose fields they are.
            odd: gets, as text, the numbers that are out of range.

        Raises:
            StoreError: a number that cannot be null is out of range, or a value of another type.
        """
        row = {}
        for (name, check), value in zip(self._fields, self._get(record), strict=True):
            if value is not None:
                value = check(value, odd)
                if value is not None:
                    row[name] = value
        return row


_plain_fields = lru_cache(maxsize=16)(_PlainFields)


def _check_of(record: type, name: str) -> Callable[[Any, list[str]], Any]:
    """The conversion of a field's values to those of its column."""
    hint = hints_of(record)[name]
    optional = optional_of(hint) is not None
    hint = optional_of(hint) or hint

    def misfit(value: object) -> StoreError:
        return StoreError(f"column {name!r} cannot hold its value: {value!r:.80}")

    def number(value: Any, odd: list[str]) -> Any:
        if type(value) not in (int, float):
            if not isinstance(value, Real):
                raise misfit(value)
            value = kind(value)
        if hint is int and type(value) is float:
            raise misfit(value)
        if allowed.admits(value):
            return value
        if not optional:
            raise StoreError(f"{name} is {value!r:.40}, not in its range: {allowed}")
        odd.append(f"{name}={value!r:.40}")
        return None

    def numbers(values: Any, odd: list[str]) -> Any:
        if not all(isinstance(value, Real) for value in values):
            raise misfit(values)
        if values and not _all_in(values, allowed):
            odd.append(f"{name} from {min(values)!r:.40} to {max(values)!r:.40}")
            return None if optional else []
        return [value if type(value) is kind else kind(value) for value in values]

    def plain(value: Any, _: list[str]) -> Any:
        if not isinstance(value, hint):
            raise misfit(value)
        return value

    def text(value: Any, _: list[str]) -> Any:
        if isinstance(value, tuple):
            return [_text(item) for item in value]
        if not isinstance(value, str):
            raise misfit(value)
        return _text(value)

    if hint in (int, float) or numbers_in(hint):
        allowed = allowed_in(record, name)
        kind: Any = hint if hint in (int, float) else typing.get_args(hint)[0]
        return number if hint in (int, float) else numbers
    return plain if hint in (bool, bytes) else text


def _raw_values(
    name: str, kind: type, pairs: Sequence[Any], odd: list[str]
) -> list[dict[str, Any]]:
    """Raw samples or items without those that have an invalid number, which ``odd`` collects."""
    plain = _plain_fields(kind)
    found = []
    for number, (rank, raw) in enumerate(pairs):
        try:
            own_odd: list[str] = []
            values = plain.values(raw, own_odd)
            if any(text.startswith("step_s ") for text in own_odd):
                raise StoreError(own_odd[-1])
        except StoreError as error:
            odd.append(f"{name}[{number}]: {error}")
            continue
        odd += own_odd
        found.append({"rank": rank} | values)
    return found


def _all_in(values: Sequence[float], allowed: Range) -> bool:
    """Return whether all lie in a range. With a NaN among them their sum is one, which equals
    nothing."""
    total = sum(values)
    return total == total and allowed.low <= min(values) and max(values) <= allowed.high


def _text(value: str) -> str:
    """Valid Unicode: an undecodable byte of a log becomes an escape instead of an error."""
    return str(value if value.isascii() else value.encode("utf-8", "backslashreplace").decode())


def _parameter(value: Any) -> str:
    return _encode(_text(value) if type(value) is str else value)


_MAP_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "details": _text,
    "parameters": _parameter,
    "versions": _text,
    "workload_metrics": float,
}


# ---------------------------------------------------------------- row -> table


def to_table(measurements: Sequence[Measurement], *, documented: bool = True) -> pa.Table:
    """Rows as an Arrow table. Text that UTF-8 cannot hold is escaped.

    Raises:
        StoreError: a value does not fit its column; the message names both.
    """
    import pyarrow as pa

    try:
        table = table_of([row_of(each) for each in measurements])
    except (pa.ArrowException, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise StoreError(f"a value does not fit its column: {error}") from error
    return pa.Table.from_arrays(table.columns, schema=schema()) if documented else table


def row_in(line: bytes) -> dict[str, Any]:
    """The row in a line of JSON; what its values are is not looked at.

    Raises:
        ValueError, RecursionError: there is none.
        SchemaMismatch: it is of a newer version.
    """
    row = json.loads(line)
    if not isinstance(row, dict) or type(row.get("schema_version")) is not int:
        raise ValueError("a row is an object with a schema version")
    refuse_newer(row["schema_version"], "a row")
    return row


def table_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> pa.Table:
    """Rows as a table with these columns, or all.

    Raises:
        ArrowException, ValueError, TypeError, LookupError, ArithmeticError, AttributeError: a value
            is none for its column.
    """
    import pyarrow as pa

    wanted = undocumented_schema() if columns is None else columns_schema(columns)
    arrays = []
    for field in wanted:
        values = [row.get(field.name) for row in rows]
        arrays.append(pa.array(_for_arrow(field.name, values), field.type))
    version = min((row["schema_version"] for row in rows), default=1)
    metadata = {VERSION_KEY: str(version).encode()}
    return pa.Table.from_arrays(arrays, schema=wanted.with_metadata(metadata))


def _for_arrow(name: str, values: list[Any]) -> list[Any]:
    """The values of a column as Arrow wants them; nested records get the defaults of fields that
    an older version did not write."""
    if name in _MAPS:
        return [None if value is None else list(value.items()) for value in values]
    if name == "image":
        return [base64.b64decode(v, validate=True) if type(v) is str else v for v in values]
    if name in NESTED:
        defaults = _defaults(NESTED[name])
        if name == "measure":
            return [None if value is None else defaults | value for value in values]
        return [
            None if value is None else [defaults | record for record in value] for value in values
        ]
    return values


@lru_cache(maxsize=8)
def _defaults(kind: type) -> dict[str, Any]:
    """The defaults of a nested record's fields, of those that have one."""
    return {
        name: list(field.default) if isinstance(field.default, tuple) else field.default
        for name, (field, _) in rules_of(kind).items()
        if field.default is not MISSING
    }


# ---------------------------------------------------------------- table -> measurement


def from_table(table: pa.Table, *, source: str = "table") -> list[Measurement]:
    """The measurements of a table, exactly as they went in.

    Columns may be missing where the record has a default, as in older tables and in tables read
    without ``RAW_COLUMNS``; columns that the record does not know are ignored.

    Raises:
        SchemaMismatch: the table is of a newer version.
        StoreError: the table is not one of measurements, or a value cannot be one.
    """
    return list(measurements_of(table, source=source))


def measurements_of(table: pa.Table, *, source: str = "table") -> Iterator[Measurement]:
    """The measurements of a table, made a few thousand at a time; ``from_table`` says more."""
    import pyarrow as pa

    table = current(table, source)
    shared: dict[Any, Any] = {}
    try:
        for start in range(0, table.num_rows, ROWS_TOGETHER):
            part = table.slice(start, ROWS_TOGETHER)
            columns = {
                name: values_of(name, part[name].combine_chunks(), shared)
                for name in part.column_names
            }
            of_metrics = {name: columns.pop(name) for name in METRICS & columns.keys()}
            columns["metrics"] = _records(Metrics, part.num_rows, of_metrics)
            yield from _records(Measurement, part.num_rows, columns)
    except (
        *(KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError),
        *(RecursionError, pa.ArrowException),
    ) as error:
        raise StoreError(f"{source} does not hold measurements: {error!r:.300}") from error


def _records(kind: Any, count: int, columns: Mapping[str, list[Any]]) -> list[Any]:
    """Records with these values by field; a field that is missing has its default. Slot by slot:
    ``__init__`` of a frozen record of a hundred fields takes five times as long.

    Raises:
        ValueError: a field without a default has no value.
    """
    records = [object.__new__(kind) for _ in range(count)]
    for name, (field, optional) in rules_of(kind).items():
        values: Iterable[Any] = columns.get(name) or repeat(default_of(field), count)
        if not optional and default_of(field) is MISSING and None in columns.get(name, [None]):
            raise ValueError(f"{kind.__name__}.{name} is missing")
        deque(map(getattr(kind, name).__set__, records, values), maxlen=0)
    return records


def values_of(name: str, column: Any, shared: dict[Any, Any] | None = None) -> list[Any]:
    """The values of one column as the record wants them; None where there is none.

    Args:
        shared: values that rows have in common, by what they were made of.
    """
    import pyarrow.types as kinds

    shared = {} if shared is None else shared
    kind = column.type
    if name in RAW_TYPES:
        return [None if each is None else _raw_pairs(name, each) for each in column.to_pylist()]
    if name == "measure":
        return [
            _once(shared, tuple(each.items()), lambda pairs: MeasureSettings(**_known(pairs)))
            for each in column.to_pylist()
        ]
    if kinds.is_map(kind):
        return _mappings(name, column, shared)
    if kinds.is_string(kind):
        hint = hints_of(Measurement).get(name)
        make: Any = hint if is_choice(hint) else str
        coded = column.dictionary_encode()
        made = [_once(shared, text, make) for text in coded.dictionary.to_pylist()]
        return [None if code is None else made[code] for code in as_list(coded.indices)]
    if kinds.is_timestamp(kind):
        moments = as_list(column.cast("int64"))
        return [None if moment is None else moment / 1_000_000 for moment in moments]
    if kinds.is_list(kind):
        return [
            None if each is None else _once(shared, tuple(each), tuple)
            for each in column.to_pylist()
        ]
    return column.to_pylist() if kinds.is_binary(kind) else as_list(column)


def _once(shared: dict[Any, Any], key: Any, make: Callable[[Any], Any]) -> Any:
    """``make(key)``, or what it gave for this key before."""
    known = shared.get((make if isinstance(make, type) else None, key), MISSING)
    if known is MISSING:
        known = shared[make if isinstance(make, type) else None, key] = make(key)
    return known


def _raw_pairs(name: str, records: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    """Raw samples or items, each with its rank."""
    kind = RAW_TYPES[name]
    return tuple((each.pop("rank"), kind(**_known(each.items(), kind))) for each in records)


def _known(pairs: Any, kind: type = MeasureSettings) -> dict[str, Any]:
    """The fields of a nested record; nulls give way to defaults, lists become tuples."""
    rules = rules_of(kind)
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in pairs
        if name in rules and (value is not None or rules[name][1])
    }


def _mappings(name: str, column: Any, shared: dict[Any, Any]) -> list[Any]:
    ends, keys, items = map_entries(column)
    names = values_of("", keys, shared)
    values = as_list(items) if name == "workload_metrics" else values_of("", items, shared)
    make = _parameters if name == "parameters" else dict
    made: list[Any] = []
    for number, valid in enumerate(as_list(column.is_valid())):
        low, high = ends[number], ends[number + 1]
        pairs = tuple(zip(names[low:high], values[low:high], strict=True))
        if not valid:
            made.append(None)
        elif name == "workload_metrics":  # each row has its own
            made.append(dict(pairs))
        else:
            key = (name, pairs)
            known = shared.get(key)
            if known is None:
                known = shared[key] = make(pairs)
            made.append(known)
    return made


def _parameters(pairs: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in pairs}


# ---------------------------------------------------------------- Arrow's arrays


def as_list(array: pa.Array) -> list[Any]:
    """An array of numbers or truth values as objects, None where there is none. Arrow's own way
    makes a scalar of each value first."""
    if array.null_count == len(array):
        return [None] * len(array)
    values: list[Any] = _filled(array).tolist()
    if not array.null_count:
        return values
    valid = array.is_valid().to_numpy(zero_copy_only=False).tolist()
    return [value if there else None for value, there in zip(values, valid, strict=True)]


def as_numbers(array: pa.Array) -> np.ndarray[Any, Any]:
    """An array of numbers or truth values; where some are null, floats with NaN for these."""
    import numpy as np

    values = _filled(array)
    if not array.null_count:
        return values
    return np.where(array.is_valid().to_numpy(zero_copy_only=False), values, np.nan)


def map_entries(array: pa.MapArray) -> tuple[list[int], pa.Array, pa.Array]:
    """The entries of maps: where those of each begin, and at last where all end; the keys; the
    values. Arrow's own hold those of the array that this one may be a slice of."""
    places = as_list(array.offsets)
    begin, count = places[0], places[-1] - places[0]
    keys, items = array.keys.slice(begin, count), array.items.slice(begin, count)
    return [place - begin for place in places], keys, items


def _filled(array: pa.Array) -> np.ndarray[Any, Any]:
    """The values as NumPy has them: anything where there is no value."""
    import pyarrow as pa

    if array.null_count:
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    values: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=False)
    return values
