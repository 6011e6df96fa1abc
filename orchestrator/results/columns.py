"""Measurements as columns, all rows of a record at once: what a run writes while it works.

First as plain values (``values_of``), checked so that their columns admit them as they are; where
one does not fit, or anything else is odd, there are none, and the rows are looked at one by one
(``tables.py``). Then as Arrow's arrays (``arrays_of``). Making an array costs by the call, so that
all columns of one type are made as one array and cut apart; most of a row's hundred are null in
every row. The same rows give the same values, whatever was written before: a record is known by its
bytes (``fragments.py``).
"""

from __future__ import annotations

import typing
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from math import isfinite
from operator import attrgetter
from typing import Any

from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.results.row_values import json_text, other_columns, scalar, text
from orchestrator.results.schema import (
    RAW_TYPES,
    TIMES,
    allowed_in,
    hints_of,
    numbers_in,
    optional_of,
    undocumented_schema,
)
from orchestrator.results.schema_docs import COLUMN_DOCS, Range
from workloads.base import MeasureSettings

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
    return arrays_of(values_of(measurements), len(measurements), _names())


def values_of(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """The columns of rows as plain values, without those that are null in every row.

    A column is a list of as many values as there are rows: numbers, texts, bytes, moments in
    microseconds since the epoch, lists of them, pairs of a name and a value, or the fields of
    settings by name. One of raw values is ``{"counts": how many each row has, "values": the columns
    of all}``; one of times of steps is ``{"counts": how many, "doubles": the bytes of all}``.

    Raises:
        Odd: a value needs a closer look.
        Exception: of any kind: a value is none for its column.
    """
    found = _fields_of(Measurement).values(measurements)
    found |= _fields_of(Metrics).values([each.metrics for each in measurements])
    for name, kind in RAW_TYPES.items():
        rows = [getattr(each, name) for each in measurements]
        pairs = [pair for row in rows for pair in row]
        if pairs:
            ranks = [rank for rank, _ in pairs]
            if set(map(type, ranks)) != {int}:
                raise Odd
            values = _fields_of(kind).values([raw for _, raw in pairs])
            found[name] = {"counts": list(map(len, rows)), "values": {"rank": ranks} | values}
    return found


def arrays_of(values: Mapping[str, Any], rows: int, names: Iterable[str]) -> list[pa.Array]:
    """Some columns of so many rows, from what ``values_of`` has given. Values are not checked.

    Raises:
        Exception: of any kind: a value is none for its column.
    """
    names = list(names)
    plain = {name: _kinds()[name] for name in names if name not in RAW_TYPES}
    found = _arrays(plain, values, rows)
    for name in names:
        if name in RAW_TYPES:
            found[name] = _raw(name, values.get(name), rows)
    return [found[name] for name in names]


def _arrays(kinds: Mapping[str, str], values: Mapping[str, Any], rows: int) -> dict[str, pa.Array]:
    """Columns of as many rows, by name; ``kinds`` tells the types of those wanted."""
    import pyarrow as pa

    of_type: dict[str, list[str]] = {}
    found: dict[str, pa.Array] = {}
    nulls: dict[str, pa.Array] = {}
    for name, kind in kinds.items():
        if name in values:
            of_type.setdefault(kind, []).append(name)
            continue
        if kind not in nulls:
            nulls[kind] = pa.nulls(rows, _types()[kind])
        found[name] = nulls[kind]
    for kind, names in of_type.items():
        if kind == _DOUBLES:
            found |= {name: _unpacked(values[name]) for name in names}
        elif len(names) == 1:
            found[names[0]] = pa.array(values[names[0]], _types()[kind])
        else:
            together = [value for name in names for value in values[name]]
            made = pa.array(together, _types()[kind])
            for number, name in enumerate(names):
                found[name] = made.slice(number * rows, rows)
    return found


@lru_cache(maxsize=1)
def _names() -> list[str]:
    """The columns in the order of the schema."""
    return list(undocumented_schema().names)


@lru_cache(maxsize=1)
def _kinds() -> dict[str, str]:
    """The type of each column, as text."""
    return {field.name: str(field.type) for field in undocumented_schema()}


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
        self._of = attrgetter(*names)
        self._columns = [
            (name, _CLASSES.get(str(types[name]), _LISTS), _conversion(kind, name))
            for name in names
        ]
        self._inner = {
            name: _CLASSES[str(types[name].value_type)] - {type(None)}
            for name in names
            if str(types[name]).startswith("list<")
        }
        self._packed = {name for name in names if str(types[name]) == _DOUBLES}

    def values(self, records: Sequence[Any]) -> dict[str, Any]:
        """The columns of some records, at least one, by name, without those that are all null.

        Raises:
            Odd: a value is.
        """
        found: dict[str, Any] = {}
        count = len(records)
        columns = zip(*map(self._of, records), strict=True)
        for (name, classes, convert), values in zip(self._columns, columns, strict=True):
            if values[0] is None and values.count(None) == count:
                continue
            made: Any = values if convert is None else convert(values)
            if not classes.issuperset(map(type, made)):
                raise Odd
            found[name] = made
        for name, classes in self._inner.items():
            for each in found.get(name, ()):
                if each and not classes.issuperset(map(type, each)):
                    raise Odd
        for name in self._packed & found.keys():
            found[name] = _packed(found[name])
        return found


@lru_cache(maxsize=4)
def packed_fields(name: str) -> frozenset[str]:
    """The fields of a column of raw values that hold many numbers each."""
    _, fields = _raw_type(name)
    return frozenset(field.name for field in fields if str(field.type) == _DOUBLES)


def _packed(lists: _Values) -> dict[str, Any]:
    """Lists of many numbers, which take ten times as long one by one."""
    numbers = array("d", chain.from_iterable(lists))
    return {"counts": list(map(len, lists)), "doubles": numbers.tobytes()}


def _unpacked(told: Mapping[str, Any]) -> pa.Array:
    """The lists of which ``_packed`` was made."""
    import pyarrow as pa

    count, data = sum(told["counts"]), told["doubles"]
    if len(data) != 8 * count:
        raise ValueError(f"{len(data):,} bytes are not {count:,} numbers")
    numbers = pa.Array.from_buffers(pa.float64(), count, [None, pa.py_buffer(data)])
    return pa.ListArray.from_arrays(_offsets(told["counts"]), numbers, type=_types()[_DOUBLES])


def _offsets(counts: Sequence[int]) -> pa.Array:
    """Offsets of lists of these lengths: the beginning of each, and the end of the last one."""
    import pyarrow as pa

    return pa.array([0, *accumulate(counts)], pa.int32())


#: The classes of values that a column of a type takes as they are, by the type's text.
_CLASSES: Mapping[str, frozenset[type]] = {
    "int64": frozenset({int, type(None)}),
    "double": frozenset({int, float, type(None)}),  # whole numbers to 2^53 are exact
    "bool": frozenset({bool, type(None)}),
    "string": frozenset({str, type(None)}),
    "binary": frozenset({bytes, type(None)}),
    "timestamp[us, tz=UTC]": frozenset({int, type(None)}),
}
_LISTS = frozenset({list, tuple, dict, type(None)})
#: The type of ``step_s``, as text.
_DOUBLES = "list<item: double>"


@lru_cache(maxsize=8)
def _fields_of(kind: type) -> _Fields:
    """The fields of a record that stand in the schema, or of a raw one."""
    types = {field.name: field.type for field in undocumented_schema()}
    for name, raw in RAW_TYPES.items():
        if raw is kind:
            types = {field.name: field.type for field in types[name].value_type}
    return _Fields(kind, types)


def _raw(name: str, told: Mapping[str, Any] | None, rows: int) -> pa.Array:
    """A column of raw values, each with the rank that measured it; without any, of empty lists."""
    import pyarrow as pa

    arrow, fields = _raw_type(name)
    if told is None:
        return pa.array([()] * rows, arrow)
    kinds = {field.name: str(field.type) for field in fields}
    made = _arrays(kinds, told["values"], sum(told["counts"]))
    structs = pa.StructArray.from_arrays([made[each.name] for each in fields], fields=fields)
    return pa.ListArray.from_arrays(_offsets(told["counts"]), structs, type=arrow)


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
    if numbers_in(hint):
        return _lists_of_numbers(allowed_in(kind, name))
    return None if hint in (bool, bytes) else _texts_of_column


def _numbers(allowed: Range) -> _Convert:
    def checked(values: _Values) -> _Values:
        _hold_against(allowed, values)
        return values

    return checked


def _lists_of_numbers(allowed: Range) -> _Convert:
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
    """One value at a time; of an object that several rows have, once."""

    def converted(values: _Values) -> _Values:
        known = {id(value): value for value in values}
        if len(known) == len(values):
            return [convert(value) for value in values]
        made = {number: convert(value) for number, value in known.items()}
        return [made[id(value)] for value in values]

    return converted


def _measure(settings: MeasureSettings) -> dict[str, Any]:
    """Settings as a record of Arrow's.

    Raises:
        Odd: a number is out of range.
        ArrowException: a value is none for its field.
    """
    return _settings(*[getattr(settings, name) for name in hints_of(MeasureSettings)])


@lru_cache(maxsize=256, typed=True)  # settings of 7 s and of 7.0 s are equal; their texts are not
def _settings(*told: Any) -> dict[str, Any]:
    import pyarrow as pa

    values = dict(zip(hints_of(MeasureSettings), told, strict=True))
    for name, value in values.items():
        _hold_against(allowed_in(MeasureSettings, name), [value])
    pa.array([values], undocumented_schema().field("measure").type)  # else it is none
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
