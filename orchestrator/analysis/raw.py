"""Samples and prompts of many rows as arrays, one a field.

A run may have millions of them: a record of each would take minutes to make. They come from rows
that were read with them, or from the columns of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.core.measurement import Measurement
from orchestrator.store.codec import as_numbers

if TYPE_CHECKING:
    import pyarrow as pa

Numbers = np.ndarray[Any, np.dtype[Any]]


class Records:
    """The samples, or the prompts, of many rows: each field as one array.

    ``row`` and ``rank`` have the place of the row and the rank of each record.
    """

    def __init__(
        self,
        row: Numbers,
        values: Callable[[str], Numbers],
        lists: Callable[[str], tuple[Numbers, Numbers]],
    ) -> None:
        """
        Args:
            row: the place of each record's row.
            values: the numbers of a field, NaN where there is none.
            lists: all values of a field of lists, and the length of each list, NaN for none.
        """
        self.row, self._values, self._lists = row, values, lists
        self._known: dict[str, Numbers] = {}

    def __getitem__(self, name: str) -> Numbers:
        if name not in self._known:
            self._known[name] = self._values(name)
        return self._known[name]

    def lists(self, name: str) -> tuple[Numbers, Numbers]:
        """All values of a field of lists, and the length of each list, NaN for none."""
        return self._lists(name)

    def chosen(self, mask: Numbers) -> Records:
        """The records that the mask keeps."""

        def lists(name: str) -> tuple[Numbers, Numbers]:
            values, lengths = self._lists(name)
            kept = np.repeat(mask, np.nan_to_num(lengths).astype(np.int64))
            return values[kept], lengths[mask]

        return Records(self.row[mask], lambda name: self[name][mask], lists)

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[tuple[int, Any]]]) -> Records:
        """Of the samples, or the items, of each row."""
        known = [(place, rank, one) for place, raw in enumerate(rows) for rank, one in raw]

        def values(name: str) -> Numbers:
            if name == "rank":
                return floats(rank for _, rank, _ in known)
            if name == "output_text":  # its bytes
                texts = (one.output_text for _, _, one in known)
                return floats(t if t is None else len(t.encode("utf-8", "replace")) for t in texts)
            return floats(getattr(one, name) for _, _, one in known)

        def lists(name: str) -> tuple[Numbers, Numbers]:
            every = [getattr(one, name) for _, _, one in known]
            lengths = floats(None if one is None else len(one) for one in every)
            return floats(value for one in every for value in one or ()), lengths

        return cls(np.array([place for place, _, _ in known], np.int64), values, lists)

    @classmethod
    def of_column(cls, column: pa.ListArray) -> Records:
        """Of a column ``samples`` or ``items`` of a table."""
        import pyarrow.compute as pc

        records = column.flatten()

        def field(name: str) -> Any:
            known = records.type.get_field_index(name) >= 0  # a later version added some
            return records.field(name) if known else None

        def values(name: str) -> Numbers:
            array = field(name)
            if array is None:
                return np.full(len(records), np.nan)
            if name == "output_text":
                array = pc.binary_length(array).cast("float64")
            return as_numbers(array).astype(float)

        def lists(name: str) -> tuple[Numbers, Numbers]:
            array = field(name)
            if array is None:
                return np.empty(0), np.full(len(records), np.nan)
            return as_numbers(array.flatten()).astype(float), as_numbers(
                array.value_lengths()
            ).astype(float)

        lengths = np.nan_to_num(as_numbers(column.value_lengths())).astype(np.int64)
        return cls(np.repeat(np.arange(len(column)), lengths), values, lists)


@dataclass(frozen=True, slots=True)
class Raw:
    """The raw values of many rows."""

    samples: Records
    items: Records

    @classmethod
    def of_rows(cls, rows: Sequence[Measurement]) -> Raw:
        """Of rows that were read with their samples and items."""
        return cls(
            Records.of_rows(row.samples for row in rows), Records.of_rows(row.items for row in rows)
        )

    @classmethod
    def of_batch(cls, batch: pa.RecordBatch) -> Raw:
        """Of the columns ``samples`` and ``items`` of a table."""
        return cls(Records.of_column(batch["samples"]), Records.of_column(batch["items"]))


class Groups:
    """Records that agree in some keys: ``of`` has the number of each record's group, in the order
    of the keys, ``first`` a record of each group."""

    def __init__(self, *keys: Numbers) -> None:
        order = np.lexsort(keys[::-1])
        begins = np.zeros(len(order), bool)
        begins[:1] = True
        for key in keys:
            begins[1:] |= key[order][1:] != key[order][:-1]
        self.of = np.empty(len(order), np.int64)
        self.of[order] = np.cumsum(begins) - 1
        self.first = order[begins]

    def largest(self, values: Numbers) -> Numbers:
        """The largest value of each group."""
        largest = np.full(len(self.first), -np.inf)
        np.maximum.at(largest, self.of, values)
        return largest


def floats(values: Iterable[Any]) -> Numbers:
    """The values as an array, NaN where there is none."""
    return np.array([np.nan if value is None else value for value in values], float)
