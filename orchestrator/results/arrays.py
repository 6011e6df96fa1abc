"""Values of Arrow's arrays by way of NumPy and their buffers.

``to_numpy``, ``pyarrow.array`` and scalars look for pandas, and import it where it is installed:
half a second, and 40 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    Numbers = np.ndarray[Any, np.dtype[Any]]


#: NumPy's names of the kinds that are read.
_KINDS = {"bool": "bool", "int32": "int32", "int64": "int64", "double": "float64"}


def as_list(array: pa.Array) -> list[Any]:
    """An array of one plain kind as objects. Arrow's own way makes one of every value first."""
    if array.null_count == len(array):
        return [None] * len(array)
    values = list(_values(array).tolist())
    if not array.null_count:
        return values
    there = _values(array.is_valid()).tolist()
    return [value if valid else None for value, valid in zip(values, there, strict=True)]


def as_numbers(array: pa.Array) -> Numbers:
    """An array of one plain kind; where some values are null, floats with NaN for these."""
    import numpy as np

    values = _values(array)
    return np.where(_values(array.is_valid()), values, np.nan) if array.null_count else values


def entries(array: pa.MapArray) -> tuple[list[int], pa.Array, pa.Array]:
    """The entries of maps: where those of each begin, and at last where all end; the keys; the
    values. Arrow's own hold those of the array that this one may be a slice of."""
    places = as_list(array.offsets)
    begin, count = places[0], places[-1] - places[0]
    keys, items = array.keys.slice(begin, count), array.items.slice(begin, count)
    return [place - begin for place in places], keys, items


def indices(numbers: Sequence[int]) -> pa.Array:
    """Places in an array, as ``take`` wants them."""
    import numpy as np
    import pyarrow as pa

    data = pa.py_buffer(np.array(numbers, np.int64))
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, data])


def _values(array: pa.Array) -> Numbers:
    """The content of the buffer: anything where there is no value.

    Raises:
        KeyError: the array is of another kind.
    """
    import numpy as np

    kind, end = _KINDS[str(array.type)], array.offset + len(array)
    if not len(array):
        return np.empty(0, kind)
    data = array.buffers()[1]
    if kind == "bool":
        bits = np.frombuffer(data, np.uint8, (end + 7) // 8)
        return np.unpackbits(bits, count=end, bitorder="little")[array.offset :].view(bool)
    return np.frombuffer(data, kind, end)[array.offset :]
