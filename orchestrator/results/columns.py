"""Measurements as Arrow columns, all rows of a record at once: what a run writes while it works.

Making an array costs by the call, so that all columns of one type are made as one array and cut
apart; most of a row's hundred are null in every row. Numbers are held against the range of their
column. Where one does not fit, or anything else is odd, there are no columns, and the rows are
looked at one by one (``tables.py``). The same rows give the same bytes, whatever was written
before: a record is known by them (``fragments.py``).
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import isfinite
from operator import attrgetter
from typing import Any

from orchestrator.domain.measurement import Measurement, Metrics
from orchestrator.results.row_values import json_text, other_columns, scalar, text
from orchestrator.results.schema import (
    RAW_TYPES,
    TIMES,
    allowed_in,
    hints_of,
    optional_of,
    undocumented_schema,
)
from orchestrator.results.schema_docs import COLUMN_DOCS, Range
from workloads.api import MeasureSettings

if typing.TYPE_CHECKING:
    import pyarrow as pa

_Values = Sequence[Any]
#: Makes of the values of a column what Arrow is given.
_Convert = Callable[[_Values], _Values]


class Odd(Exception):
    """A value that its column does not admit as it is."""


def columns_of(measurements: Sequence[Measurement]) -> list[pa.Array]:
    """The columns of rows, of which there is at least one, in the order of the schema.

    Raises:
        Odd: a value needs a closer look.
        Exception: of any kind: a value is none for its column.
    """
    columns = _Columns(len(measurements))
    _fields_of(Measurement).add(columns, measurements)
    _fields_of(Metrics).add(columns, [each.metrics for each in measurements])
    found = columns.made()
    for name, kind in RAW_TYPES.items():
        found[name] = _raw(name, kind, [getattr(each, name) for each in measurements])
    return [found[name] for name in _names()]


@lru_cache(maxsize=1)
def _names() -> list[str]:
    """The columns in the order of the schema."""
    return list(undocumented_schema().names)


class _Columns:
    """Columns of as many rows, to be made together."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._null: list[tuple[str, str]] = []  # names and types
        self._of_type: dict[str, tuple[list[str], list[Any]]] = {}  # names and values

    def add(self, name: str, kind: str, values: _Values, convert: _Convert | None) -> None:
        """Add a column.

        Raises:
            Odd: one of its values is.
        """
        if values[0] is None and values.count(None) == self._rows:
            self._null.append((name, kind))
            return
        known = self._of_type.get(kind)
        if known is None:
            known = self._of_type[kind] = ([], [])
        known[0].append(name)
        known[1].extend(values if convert is None else convert(values))

    def made(self) -> dict[str, pa.Array]:
        """All columns by name."""
        import pyarrow as pa

        rows, types, found = self._rows, _types(), dict[str, pa.Array]()
        for kind, (names, values) in self._of_type.items():
            array = pa.array(values, types[kind])
            if len(names) == 1:
                found[names[0]] = array
                continue
            for number, name in enumerate(names):
                found[name] = array.slice(number * rows, rows)
        nulls = {
            kind: pa.nulls(rows, types[kind]) for kind in dict.fromkeys(dict(self._null).values())
        }
        for name, kind in self._null:
            found[name] = nulls[kind]
        return found


@lru_cache(maxsize=1)
def _types() -> dict[str, pa.DataType]:
    """The types of columns by their text: Arrow writes it anew whenever one is looked up."""
    found = [field.type for field in undocumented_schema()]
    for name in RAW_TYPES:
        found += [field.type for field in undocumented_schema().field(name).type.value_type]
    return {str(kind): kind for kind in found}


class _Fields:
    """The fields of a kind of record: their types, and what becomes of their values."""

    def __init__(self, kind: type, types: Mapping[str, pa.DataType]) -> None:
        apart = {*RAW_TYPES, "metrics"} if kind is Measurement else ()
        names = [name for name in hints_of(kind) if name not in apart]
        self._values = attrgetter(*names)
        self._columns = [(name, str(types[name]), _conversion(kind, name)) for name in names]

    def add(self, columns: _Columns, records: Iterable[Any]) -> None:
        """Add the columns of some records, at least one.

        Raises:
            Odd: a value is.
        """
        values = zip(*map(self._values, records), strict=True)
        for (name, kind, convert), each in zip(self._columns, values, strict=True):
            columns.add(name, kind, each, convert)


@lru_cache(maxsize=8)
def _fields_of(kind: type) -> _Fields:
    """The fields of a record that stand in the schema, or of a raw one."""
    types = {field.name: field.type for field in undocumented_schema()}
    for name, raw in RAW_TYPES.items():
        if raw is kind:
            types = {field.name: field.type for field in types[name].value_type}
    return _Fields(kind, types)


def _raw(name: str, kind: type, rows: Sequence[Sequence[tuple[int, Any]]]) -> pa.Array:
    """A column of raw values, each with the rank that measured it."""
    import pyarrow as pa

    arrow, fields = _raw_type(name)
    pairs = [pair for row in rows for pair in row]
    if not pairs:
        return pa.array(rows, arrow)
    columns = _Columns(len(pairs))
    columns.add("rank", "int64", [rank for rank, _ in pairs], None)
    _fields_of(kind).add(columns, [raw for _, raw in pairs])
    made = columns.made()
    structs = pa.StructArray.from_arrays([made[each.name] for each in fields], fields=fields)
    offsets = pa.array([0, *accumulate(map(len, rows))], pa.int32())
    return pa.ListArray.from_arrays(offsets, structs, type=arrow)


@lru_cache(maxsize=4)
def _raw_type(name: str) -> tuple[pa.ListType, list[pa.Field]]:
    """The type of a column of raw values, and the fields of one of them."""
    arrow = undocumented_schema().field(name).type
    return arrow, list(arrow.value_type)


# ---------------------------------------------------------------- values


def _conversion(kind: type, name: str) -> _Convert | None:
    """The conversion of the values of a field; None: they stay as they are."""
    hint = hints_of(kind)[name]
    hint = optional_of(hint) or hint
    if kind is Measurement and name in other_columns():
        return _moments(name) if name in TIMES else _each(_OTHERS.get(name, _texts))
    if hint in (int, float):
        return _numbers(allowed_in(kind, name))
    if name == "step_s":
        return _steps(allowed_in(kind, name))
    return None if hint in (bool, bytes) else _texts_of_column


def _numbers(allowed: Range) -> _Convert:
    def checked(values: _Values) -> _Values:
        _hold_against(allowed, values)
        return values

    return checked


def _steps(allowed: Range) -> _Convert:
    def checked(values: _Values) -> _Values:
        for each in values:
            _hold_against(allowed, each)
        return values

    return checked


def _moments(name: str) -> _Convert:
    """Seconds since the epoch become whole microseconds."""
    allowed = COLUMN_DOCS[name].allowed

    def converted(values: _Values) -> _Values:
        _hold_against(allowed, values)
        return [None if value is None else round(value * 1_000_000) for value in values]

    return converted


def _hold_against(allowed: Range, values: _Values) -> None:
    """See that all numbers lie in their range.

    Raises:
        Odd: one does not.
    """
    numbers = [value for value in values if value is not None] if None in values else values
    if not allowed.finite:
        numbers = list(filter(isfinite, numbers))
    if numbers:
        total = sum(numbers)  # with a NaN among them one, which equals nothing
        if total != total or not (allowed.low <= min(numbers) and max(numbers) <= allowed.high):
            raise Odd


def _texts_of_column(values: _Values) -> _Values:
    """Texts, of which one is often that of all, or tuples of them."""
    first = values[0]
    if type(first) is not tuple and values.count(first) == len(values):
        return [scalar(first)] * len(values)
    return [None if value is None else scalar(value) for value in values]


def _each(convert: Callable[[Any], Any]) -> _Convert:
    return lambda values: [convert(value) for value in values]


@lru_cache(maxsize=256)
def _measure(settings: MeasureSettings) -> dict[str, Any]:
    """Settings as a record of Arrow's.

    Raises:
        Odd: a number is out of range.
    """
    values = {name: getattr(settings, name) for name in hints_of(MeasureSettings)}
    for name, value in values.items():
        _hold_against(allowed_in(MeasureSettings, name), [value])
    return values


def _parameters(parameters: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(text(name), json_text(value)) for name, value in parameters.items()]


def _figures(figures: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(text(name), float(value)) for name, value in figures.items()]


def _texts(texts: Mapping[str, str]) -> list[tuple[str, str]]:
    return _pairs(tuple(texts.items())) if texts else []


@lru_cache(maxsize=64)
def _pairs(pairs: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    return [(text(name), text(value)) for name, value in pairs]


#: Of the fields that are no plain values, those that are no texts by name, moments or raw values.
_OTHERS: Mapping[str, Callable[[Any], Any]] = {
    "measure": _measure,
    "parameters": _parameters,
    "workload_metrics": _figures,
}
