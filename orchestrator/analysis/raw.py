"""Samples and prompts of many rows as arrays, one per field; objects would take minutes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Records:
    """The samples or prompts of many rows, one array per field; texts are given as byte counts."""

    row: Numbers  # index of each record's row
    values: Mapping[str, Numbers]
    lists: Mapping[str, tuple[Numbers, Numbers]]  # all values, and the length of each list

    def __getitem__(self, name: str) -> Numbers:
        return self.values[name]

    def where(self, mask: Numbers) -> Records:
        """Return the records that the mask keeps."""
        values = {name: known[mask] for name, known in self.values.items()}
        lists = {}
        for name, (known, lengths) in self.lists.items():
            lists[name] = known[np.repeat(mask, whole(lengths))], lengths[mask]
        return Records(self.row[mask], values, lists)

    @classmethod
    def of_rows(cls, kind: type, rows: Iterable[Sequence[tuple[int, Any]]]) -> Records:
        """Return the samples or items of each row."""
        known = [(place, rank, one) for place, raw in enumerate(rows) for rank, one in raw]
        values, lists = {"rank": floats(rank for _, rank, _ in known)}, {}
        for field in fields(kind):
            every = [getattr(one, field.name) for _, _, one in known]
            if field.name in _LISTS:
                lengths = floats(None if one is None else len(one) for one in every)
                lists[field.name] = floats(value for one in every for value in one or ()), lengths
            elif field.name in _TEXTS:
                texts = (one and one.encode("utf-8", "replace") for one in every)
                values[field.name] = floats(text if text is None else len(text) for text in texts)
            else:
                values[field.name] = floats(every)
        return cls(np.array([place for place, _, _ in known], np.int64), values, lists)

    @classmethod
    def of_column(cls, kind: type, column: pa.ListArray) -> Records:
        """Return a table's column ``samples`` or ``items``; missing fields are unknown."""
        import pyarrow as pa
        import pyarrow.compute as pc

        records = column.flatten()
        values, lists = {}, {}
        for name in ("rank", *(field.name for field in fields(kind))):
            if records.type.get_field_index(name) >= 0:
                array = records.field(name)
            else:
                array = pa.nulls(len(records), pa.list_(pa.int64()) if name in _LISTS else None)
            if name in _LISTS:
                lists[name] = _known(array.flatten()), _known(array.value_lengths())
            else:
                array = pc.binary_length(array) if name in _TEXTS else array
                values[name] = _known(array)
        places = np.arange(len(column))
        return cls(np.repeat(places, whole(_known(column.value_lengths()))), values, lists)


_LISTS = ("step_s", "output_ids")
_TEXTS = ("output_text",)


def floats(values: Iterable[Any]) -> Numbers:
    """Return the values as an array, NaN for None."""
    return np.array([np.nan if value is None else value for value in values], float)


def _known(array: pa.Array) -> Numbers:
    numbers: Numbers = array.cast("float64").to_numpy(zero_copy_only=False)
    return numbers


def whole(lengths: Numbers) -> Numbers:
    """Return lengths as integers, 0 for NaN."""
    return np.nan_to_num(lengths).astype(np.int64)


def largest(owner: Numbers, values: Numbers, count: int) -> Numbers:
    """Return the largest value of each of ``count`` owners; minus infinity without any."""
    most = np.full(count, -np.inf)
    np.maximum.at(most, owner, values)
    return most


class Groups:
    """Groups of records by keys: ``of`` is each record's group, ``first`` a record of each."""

    def __init__(self, *keys: Numbers) -> None:
        order = np.lexsort(keys[::-1])
        begins = np.zeros(len(order), bool)
        begins[:1] = True
        for key in keys:
            begins[1:] |= key[order][1:] != key[order][:-1]
        self.of = np.empty(len(order), np.int64)
        self.of[order] = np.cumsum(begins) - 1
        self.first = order[begins]
