"""Measurements as Arrow tables and back, exactly: a round trip loses nothing.

``metrics`` is flattened into columns, values of ``parameters`` become JSON, and numbers that their
columns do not admit are told in ``details``, so that a row that was measured is never one that
readers refuse.
"""

from __future__ import annotations

import contextlib
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from operator import attrgetter
from typing import Any

from orchestrator.core.errors import StoreError
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.results.columns import columns_of
from orchestrator.results.older_tables import current
from orchestrator.results.row_values import json_text, mappings, other_columns, scalar, text
from orchestrator.results.schema import (
    METRICS,
    OUT_OF_RANGE,
    RAW_TYPES,
    TIMES,
    allowed_in,
    hints_of,
    is_choice,
    numbers_in,
    optional_of,
    rules_of,
    schema,
    undocumented_schema,
)
from orchestrator.results.schema_docs import COLUMN_DOCS, Range
from workloads.base import MeasureSettings

if typing.TYPE_CHECKING:
    import pyarrow as pa

#: From so many rows on it is cheaper to make all of a column at once.
_MANY = 4
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def to_table(measurements: Sequence[Measurement], *, documented: bool = True) -> pa.Table:
    """Rows as an Arrow table. Text that UTF-8 cannot hold is escaped; all else is exact.

    Raises:
        StoreError: a value does not fit its column; the message names both.
    """
    import pyarrow as pa

    batch = to_batch(measurements, documented=documented)
    metadata = (schema() if documented else undocumented_schema()).metadata
    return pa.Table.from_batches([batch]).replace_schema_metadata(metadata)


def to_batch(measurements: Sequence[Measurement], *, documented: bool = True) -> pa.RecordBatch:
    """Rows as one Arrow batch, whose schema has no metadata.

    Raises:
        StoreError: a value does not fit its column; the message names both.
    """
    import pyarrow as pa

    columns = _columns(documented)
    if len(measurements) >= _MANY:
        with contextlib.suppress(Exception):  # whatever it is, it is told better below
            return pa.RecordBatch.from_arrays(columns_of(measurements), schema=columns)
    try:
        rows = [_flat(measurement) for measurement in measurements]
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise StoreError(f"a value does not fit its column: {error}") from error
    try:
        records = pa.array(rows, pa.struct(list(columns)))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise StoreError(_misfit(rows, columns) or str(error)) from error
    return pa.RecordBatch.from_struct_array(records)


@lru_cache(maxsize=2)
def _columns(documented: bool) -> pa.Schema:
    """All columns of a row."""
    return (schema() if documented else undocumented_schema()).remove_metadata()


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


# ---------------------------------------------------------------- record -> row


def _flat(measurement: Measurement) -> dict[str, Any]:
    odd: list[str] = []  # numbers that their columns do not admit, as text
    row = _plain_fields(Measurement).of(measurement, odd)
    row |= _plain_fields(Metrics).of(measurement.metrics, odd)
    for name, kind in RAW_TYPES.items():
        row[name] = _raw(name, kind, getattr(measurement, name), odd)
    for name in TIMES:
        value = getattr(measurement, name)
        if value is not None and not COLUMN_DOCS[name].allowed.admits(value):
            odd.append(f"{name}={value!r}")
            value = None
        row[name] = None if value is None else round(value * 1_000_000)
    row["workload_metrics"] = [
        (text(key), float(value)) for key, value in measurement.workload_metrics.items()
    ]
    for name in mappings():
        row[name] = [(text(key), text(item)) for key, item in getattr(measurement, name).items()]
    if odd:
        row["details"].append((OUT_OF_RANGE, "; ".join(odd)))
    row["parameters"] = [
        (text(key), json_text(item)) for key, item in measurement.parameters.items()
    ]
    row["measure"] = _plain_fields(MeasureSettings).of(measurement.measure, odd)
    return row


class _PlainFields:
    """The fields of a record that are plain values or tuples of them. Which are numbers is found
    out once, from their types: most of a row's hundred are, and need no look at each value."""

    def __init__(self, kind: type) -> None:
        others = other_columns() if kind is Measurement else ()
        hints = {name: hint for name, hint in hints_of(kind).items() if name not in others}
        numbers = (bool, int, float)
        self._numbers = tuple(n for n, h in hints.items() if (optional_of(h) or h) in numbers)
        self._others = tuple(name for name in hints if name not in self._numbers)
        self._of_numbers = attrgetter(*self._numbers)
        self._ranges = tuple(
            (name, *allowed_in(kind, name)[:2], allowed_in(kind, name))
            for name in self._numbers
            if (optional_of(hints[name]) or hints[name]) is not bool
        )
        self._optional = {name for name, hint in hints.items() if optional_of(hint) is not None}
        self._lists = {
            name: allowed_in(kind, name)
            for name in self._others
            if name != "step_s" and numbers_in(optional_of(hints[name]) or hints[name])
        }

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
            if isinstance(value, str | bytes):
                raise TypeError(f"{name} is {value!r:.40}, which is no number")
            if value is not None and not low <= value <= high and not allowed.admits(value):
                if name not in self._optional:
                    raise StoreError(f"{name} is {value!r:.40}, not in its range: {allowed}")
                odd.append(f"{name}={value!r:.40}")
                row[name] = None
        for name in self._others:
            value = getattr(record, name)
            row[name] = value if value is None else scalar(value)
        for name, within in self._lists.items():
            if (values := row[name]) and not _all_in(values, within):
                odd.append(f"{name} from {min(values)!r:.40} to {max(values)!r:.40}")
                row[name] = None if name in self._optional else []
        return row


_plain_fields = lru_cache(maxsize=16)(_PlainFields)


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


# ---------------------------------------------------------------- row -> record


def _record(row: dict[str, Any]) -> Measurement:
    values = {name: value_of(name, item) for name, item in row.items() if name not in METRICS}
    metrics = {name: item for name, item in row.items() if name in METRICS}
    values["metrics"] = Metrics(**_without_missing(Metrics, metrics))
    return Measurement(**_without_missing(Measurement, values))


def value_of(name: str, value: Any) -> Any:
    """Convert one column's Python value to the record's type; None stays None."""
    if value is None:
        return None
    if name in RAW_TYPES:
        kind = RAW_TYPES[name]
        return tuple((raw.pop("rank"), kind(**_without_missing(kind, raw))) for raw in value)
    if name == "measure":
        return MeasureSettings(**_without_missing(MeasureSettings, value))
    if name == "parameters":
        return {key: json.loads(item) for key, item in value.items()}
    if name in TIMES:
        return ((value - _EPOCH) // timedelta(microseconds=1)) / 1_000_000
    hint = hints_of(Measurement)[name]
    if is_choice(hint):
        return hint(value)
    return tuple(value) if isinstance(value, list) else value


def _without_missing(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """The fields that the record knows; nulls give way to defaults, lists become tuples.

    Raises:
        ValueError: a field without a default is null or absent.
    """
    result = {}
    for name, (field, optional) in rules_of(kind).items():
        value = values.get(name)
        if value is not None:
            result[name] = tuple(value) if isinstance(value, list) else value
        elif optional:
            result[name] = None
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{kind.__name__}.{name} is missing")
    return result
