"""Records: what an append writes, one row or several, and the tables that are read from them.

A record of few rows is JSON, with the columns of its rows as plain values (``columns.values_of``);
columns that are null in every row are left out:

    {"schema_version": 1, "rows": 2, "columns": {"job_id": ["a", "b"], "cards": [1, 8], ...}}

It tells its own names, so that no damage elsewhere takes it along. NaN and infinities stand as
Python writes them; bytes are base64, as are lists of many numbers (doubles, little-endian). Arrow's
arrays cost by the column, of which there are a hundred: they are made of all such records at once
when a log becomes Parquet.

A record of many rows is an Arrow IPC stream, as all once were, since a number takes longer as text;
so is one with odd values: the way through ``tables.py`` tells what is wrong with them, or how they
fit nevertheless.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchestrator.core.measurement import Measurement
from orchestrator.results import fragments
from orchestrator.results.columns import arrays_of, packed_fields, values_of
from orchestrator.results.older_tables import refuse_newer
from orchestrator.results.schema import (
    NESTED,
    RAW_TYPES,
    SCHEMA_VERSION,
    VERSION_KEY,
    column_names,
    rules_of,
    undocumented_schema,
)

if TYPE_CHECKING:
    import pyarrow as pa


#: From so many rows on a record is an Arrow IPC stream.
_MANY = 16


def record_of(measurements: Sequence[Measurement]) -> tuple[str, bytes]:
    """Name and content of a record: rows that are written together, at least one.

    Raises:
        StoreError: a value does not fit its column, or a job's id cannot be part of a name.
        MemoryError, OSError, ImportError: try again.
    """
    for each in measurements:
        fragments.refuse_unnameable(each.job_id, each.attempt_number)
    job_id = measurements[0].job_id if len(measurements) == 1 else fragments.TOGETHER
    number = max(each.attempt_number for each in measurements)
    if len(measurements) < _MANY:
        try:
            data = _json_of(measurements)
            return fragments.record_name(job_id, number, data), data
        except (MemoryError, OSError, ImportError):
            raise  # another try would have another name, and the row would be two
        except Exception:  # whatever it is, the other way tells it better
            pass
    data = _stream_of(measurements)
    return fragments.record_name(job_id, number, data, fragments.ARROW_RECORD), data


def _json_of(measurements: Sequence[Measurement]) -> bytes:
    """Rows as JSON.

    Raises:
        Exception: of any kind: a value is odd.
    """
    told = {
        "schema_version": SCHEMA_VERSION,
        "rows": len(measurements),
        "columns": values_of(measurements),
    }
    return _encode(told).encode("ascii")


def _as_text(value: object) -> str:
    if type(value) is bytes:
        return base64.b64encode(value).decode("ascii")
    raise TypeError(f"no value of a row: {value!r:.80}")


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_as_text).encode
#: Arrow IPC: a length of zero, so that no message follows.
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def _stream_of(measurements: Sequence[Measurement]) -> bytes:
    """Rows as an Arrow IPC stream.

    Raises:
        StoreError: a value does not fit its column.
    """
    from orchestrator.results.tables import to_batch

    batch = to_batch(measurements, documented=False)
    return b"".join((_stream_begin(), batch.serialize(), _STREAM_END))


@lru_cache(maxsize=1)
def _stream_begin() -> bytes:
    """The schema as an Arrow IPC message, which is the same for every record."""
    return bytes(undocumented_schema().serialize())


# ---------------------------------------------------------------- reading


def record_table(name: str, data: bytes, columns: Iterable[str] | None = None) -> pa.Table:
    """The rows of one record: these columns, or all; of Arrow's those that are there.

    Raises:
        ArrowException, ValueError, TypeError, LookupError, RecursionError: it is no record.
        SchemaMismatch: it is of a newer version.
    """
    if fragments.is_arrow_record(name):
        return _table_of_stream(data, columns)
    wanted = column_names() if columns is None else list(columns)
    return joined([parsed(data)], wanted)


def _table_of_stream(data: bytes, columns: Iterable[str] | None) -> pa.Table:
    """Every offset leads somewhere: unlike Parquet's, Arrow's own reader takes buffers as they
    are."""
    import pyarrow as pa

    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        table = stream.read_all()
    table.validate(full=True)
    if columns is None:
        return table
    present = set(table.column_names)
    return table.select([each for each in columns if each in present])


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The columns of a record, each with a value for each row; what the values are is not seen."""

    version: int
    rows: int
    columns: Mapping[str, Any]


def parsed(data: bytes) -> Record:
    """The record in some bytes.

    Raises:
        ValueError, RecursionError: there is none.
        SchemaMismatch: it is of a newer version.
    """
    told = json.loads(data)
    if not isinstance(told, dict):
        raise ValueError("a record is an object")
    version, rows, columns = (told.get(name) for name in ("schema_version", "rows", "columns"))
    if type(version) is not int or version < 1:
        raise ValueError("a record has a schema version")
    refuse_newer(version, "a record")
    if type(rows) is not int or not isinstance(columns, dict):
        raise ValueError("a record has rows and columns")
    for name, values in columns.items():
        if name in RAW_TYPES:
            _refuse_raw(name, values, rows)
        elif name in _known():  # a later column's form is its own, and it is not read
            _refuse_unless(name, values, rows)
    # So no number of rows is believed that takes no bytes.
    if rows < 1 or "job_id" not in columns:
        raise ValueError("it holds no rows")
    return Record(version=version, rows=rows, columns=columns)


@lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    return frozenset(column_names())


def _refuse_unless(name: str, values: object, count: int) -> None:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{name} are not {count} values")


def _refuse_raw(name: str, told: object, rows: int) -> None:
    counts = told.get("counts") if isinstance(told, dict) else None
    values = told.get("values") if isinstance(told, dict) else None
    _refuse_unless(name, counts, rows)
    if not isinstance(counts, list) or not isinstance(values, dict) or "rank" not in values:
        raise ValueError(f"{name} are no raw values")
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError(f"{name} cannot be counted")
    for field, each in values.items():
        if field in packed_fields(name):
            _refuse_packed(f"{field} of {name}", each, sum(counts))
        elif field == "rank" or field in rules_of(RAW_TYPES[name]):
            _refuse_unless(f"{field} of {name}", each, sum(counts))


def _refuse_packed(name: str, told: object, count: int) -> None:
    counts = told.get("counts") if isinstance(told, dict) else None
    _refuse_unless(name, counts, count)
    if not isinstance(counts, list) or any(type(each) is not int or each < 0 for each in counts):
        raise ValueError(f"{name} cannot be counted")
    if not isinstance(told, dict) or not isinstance(told.get("doubles"), str):
        raise ValueError(f"{name} are no packed numbers")
    # Each record for itself: one that lacks numbers would take those of the next.
    if len(base64.b64decode(told["doubles"])) != 8 * sum(counts):
        raise ValueError(f"{name} are not {sum(counts):,} numbers")


def joined(records: Sequence[Record], columns: Sequence[str]) -> pa.Table:
    """The rows of records of one version, at least one, as one table with these columns.

    Raises:
        ArrowException, ValueError, TypeError, LookupError: a value is none for its column.
    """
    import pyarrow as pa

    rows = sum(record.rows for record in records)
    values = {name: _column(name, records) for name in columns}
    try:
        arrays = arrays_of({n: v for n, v in values.items() if v is not None}, rows, columns)
    except (AttributeError, ArithmeticError) as error:  # of a value of another kind
        raise ValueError(str(error)) from error
    version = {VERSION_KEY: str(records[0].version).encode()}
    fields = [undocumented_schema().field(name) for name in columns]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=version))


def _column(name: str, records: Sequence[Record]) -> Any:
    """The values of a column in all records; None where no record has any."""
    if not any(name in record.columns for record in records):
        return None
    if name in RAW_TYPES:
        return _raw_column(name, records)
    values: list[Any] = []
    for record in records:
        values += record.columns.get(name) or [None] * record.rows
    kind = str(undocumented_schema().field(name).type)
    if kind == "binary":
        return [None if each is None else base64.b64decode(each) for each in values]
    if kind.startswith("map<"):  # Arrow takes pairs for tuples only
        return [None if each is None else list(map(tuple, each)) for each in values]
    if name in NESTED:
        return [_defaults(NESTED[name]) | each for each in values]
    return values


def _raw_column(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """The raw values of all records; fields that an older one lacks have their default."""
    told = [record.columns.get(name) or _no_raw(record.rows) for record in records]
    values: dict[str, Any] = {}
    for field in packed_fields(name):
        packed = [each["values"].get(field) or _no_numbers(sum(each["counts"])) for each in told]
        values[field] = {
            "counts": [count for each in packed for count in each["counts"]],
            "doubles": b"".join(base64.b64decode(each["doubles"]) for each in packed),
        }
    for field in ("rank", *rules_of(RAW_TYPES[name])):
        if field not in values and any(field in each["values"] for each in told):
            default = _defaults(RAW_TYPES[name]).get(field)
            values[field] = []
            for each in told:
                values[field] += each["values"].get(field) or [default] * sum(each["counts"])
    for field, default in _defaults(RAW_TYPES[name]).items():
        if field not in values and default is not None:
            values[field] = [default] * sum(sum(each["counts"]) for each in told)
    return {"counts": [count for each in told for count in each["counts"]], "values": values}


def _no_numbers(lists: int) -> dict[str, Any]:
    return {"counts": [0] * lists, "doubles": ""}


def _no_raw(rows: int) -> dict[str, Any]:
    return {"counts": [0] * rows, "values": {}}


@lru_cache(maxsize=8)
def _defaults(kind: type) -> dict[str, Any]:
    """The defaults of a nested record's fields, of those that have one."""
    return {
        name: list(field.default) if isinstance(field.default, tuple) else field.default
        for name, (field, _) in rules_of(kind).items()
        if field.default is not MISSING
    }
