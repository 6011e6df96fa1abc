"""The cells of a grid as arrays: settings become features by their role.

Sizes are taken in log2, since doubling a batch or a length is one step wherever it starts. Settings
without an order (precision, engine, image) only match or differ. Roles group the features, so that
a surrogate needs few lengths of correlation: load, lengths, layout (how many cards and how a model
is divided over them, threads, other sizes), and categories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.job import Scalar

Floats: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = Sequence[int] | NDArray[np.intp]


class Role(Enum):
    """Part that a setting has in the time of a cell."""

    LOAD = "load"  # sequences in flight: batch size, concurrency
    INPUT = "input"  # tokens read, of a sequence
    OUTPUT = "output"  # tokens written, of a sequence
    CARDS = "cards"  # that share the work
    SIZE = "size"  # any other number: splits of a model, threads, steps
    CATEGORY = "category"  # values without an order


#: Roles whose features share one length of correlation.
KINDS = {
    "load": (Role.LOAD,),
    "length": (Role.INPUT, Role.OUTPUT),
    "layout": (Role.CARDS, Role.SIZE),
}


class Space:
    """The cells of a grid, in their order; a cell is known by its row.

    ``cells`` are their settings; ``roles`` has the roles of those that matter, others are
    ignored. A setting that has a value without a number in some cell is a category there.
    """

    def __init__(self, cells: Sequence[Mapping[str, Scalar]], roles: Mapping[str, Role]) -> None:
        self.size = len(cells)
        columns = {name: [cell.get(name) for cell in cells] for name in roles}
        features: dict[str, list[Floats]] = {kind: [] for kind in KINDS}
        codes: list[NDArray[np.intp]] = []
        #: Values by role, shape (cells,): the product of its settings, 1 without any.
        self.physical = {
            role: np.ones(self.size) for role in (Role.LOAD, Role.INPUT, Role.OUTPUT, Role.CARDS)
        }
        for name, role in sorted(roles.items()):
            values = columns[name]
            numbers = _numbers(values)
            if not values:
                continue
            if role is Role.CATEGORY or numbers is None:
                known = {text: at for at, text in enumerate(sorted(set(map(str, values))))}
                if len(known) > 1:
                    codes.append(np.array([known[str(value)] for value in values]))
                continue
            if role in self.physical:
                self.physical[role] = self.physical[role] * np.maximum(numbers, 1e-9)
            if numbers.min() < numbers.max():
                kind = next(kind for kind, its in KINDS.items() if role in its)
                low = numbers.min()
                features[kind].append(np.log2(numbers if low > 0 else numbers - low + 1.0))
        self._features = {
            kind: np.stack(columns, axis=1) if columns else np.zeros((self.size, 0))
            for kind, columns in features.items()
        }
        self._codes = np.stack(codes, axis=1) if codes else np.zeros((self.size, 0), dtype=np.intp)
        self.categories = len(codes)  # settings without an order that differ between cells
        sizes = np.concatenate([self._features[kind] for kind in KINDS], axis=1)
        parts = {**self._features, "size": sizes, "category": self._codes}
        self._numbers = {part: _numbered(columns) for part, columns in parts.items()}

    def distinct(self, part: str, rows: Rows) -> tuple[Rows, Rows | slice]:
        """Cells that differ in a part of the settings, and which of them each row is like.

        ``part`` is a kind, ``size`` for all numbers, or ``category``. A grid has few of each.
        """
        values, first, like = np.unique(
            self._numbers[part][rows], return_index=True, return_inverse=True
        )
        if 2 * len(values) > len(like):
            return rows, slice(None)
        return np.asarray(rows)[first], like

    def squared_distances(self, kind: str, rows: Rows, others: Rows) -> Floats:
        """Squared distances in log2 between cells, shape (rows, others)."""
        features = self._features[kind]
        one, other = features[rows], features[others]
        total = np.zeros((len(one), len(other)))
        for at in range(features.shape[1]):  # a cube of differences would not fit in the cache
            total += np.square(one[:, at, None] - other[None, :, at])
        return total

    def mismatches(self, rows: Rows, others: Rows) -> Floats:
        """Count the categories in which cells differ, shape (rows, others)."""
        one, other = self._codes[rows], self._codes[others]
        total = np.zeros((len(one), len(other)))
        for at in range(self.categories):
            total += one[:, at, None] != other[None, :, at]
        return total

    def new_categories(self, rows: Rows, known: Rows) -> NDArray[np.intp]:
        """Count the categories of each row whose value no known cell has, shape (rows,)."""
        total = np.zeros(len(rows), dtype=np.intp)
        for codes in self._codes.T:
            total += ~np.isin(codes[rows], codes[known])
        return total


def _numbered(features: NDArray[Any]) -> NDArray[np.intp]:
    """Number the combinations of features, shape (cells,)."""
    if not features.shape[1]:
        return np.zeros(len(features), dtype=np.intp)
    return np.unique(features, axis=0, return_inverse=True)[1].reshape(-1)


def _numbers(values: Sequence[Scalar]) -> Floats | None:
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return None
    numbers = np.array(values, dtype=float)
    return numbers if np.isfinite(numbers).all() else None
