"""Axes: values of settings in a grid file, and the points of an experiment.

Values are a value, a range, or a list of both. Ranges are of whole numbers and never pass their
end: `1..64 *2` is 1, 2, 4, …, 64; `1..9 +2` is 1, 3, 5, 7, 9; `1..8` counts by one. An experiment
is the product of its axes (a `zip` group is one axis of several settings); the last varies fastest.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from orchestrator.core.job import Scalar
from orchestrator.grid.vocabulary import Fault, shown

MAX_JOBS = 1_000_000
MAX_RANGE = 10_000  # values of one range

_LOOKS_LIKE_RANGE = re.compile(r"\s*[-+]?[0-9.]*[0-9]\s*\.\.")
_RANGE = re.compile(r"\s*([0-9]{1,15})\s*\.\.\s*([0-9]{1,15})\s*(?:([*+])\s*([0-9]{1,15}))?\s*")
RANGE_HINT = "a range is written 1..64 *2 (doubling), 1..9 +2 (steps of 2) or 1..8"


@dataclass(frozen=True, slots=True)
class Axis:
    """Settings that move together (one, or a zip group) and the points that they take in turn."""

    names: tuple[str, ...]
    points: tuple[tuple[Scalar, ...], ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A partial match on any subset of settings: each may have one of several values."""

    allowed: Mapping[str, frozenset[Scalar]]

    def matches(self, settings: Mapping[str, Scalar]) -> bool:
        """Return whether all of the pattern's settings have a value it names."""
        return all(settings[name] in values for name, values in self.allowed.items())


def looks_like_range(value: object) -> bool:
    """Return whether a value is meant as a range, rightly written or not."""
    return isinstance(value, str) and _LOOKS_LIKE_RANGE.match(value) is not None


def parse_range(text: str) -> range | tuple[int, ...] | Fault:
    """The numbers of a range, or what is wrong with it."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return Fault(f"{shown(text)} is not a range", RANGE_HINT)
    start, stop = int(match[1]), int(match[2])
    operator, step = match[3] or "+", int(match[4] or 1)
    if start > stop:
        swapped = f"{stop}..{start}" + (f" {operator}{step}" if match[3] else "")
        return Fault(f"{shown(text)} ends before it begins", f"write {swapped}")
    if operator == "*":
        if start < 1 or step < 2:
            return Fault(f"{shown(text)} never reaches its end", "begin at 1, double at least")
        numbers = [start]
        while numbers[-1] * step <= stop:
            numbers.append(numbers[-1] * step)
        return tuple(numbers)
    if step < 1:
        return Fault(f"{shown(text)} never reaches its end", RANGE_HINT)
    numbers_by_step = range(start, stop + 1, step)
    if len(numbers_by_step) > MAX_RANGE:
        hint = f"a range has at most {MAX_RANGE:,} values; {RANGE_HINT}"
        return Fault(f"{shown(text)} has {len(numbers_by_step):,} values", hint)
    return numbers_by_step


def product_size(axes: Sequence[Axis]) -> int:
    """Number of points in the product of axes."""
    return prod(len(axis.points) for axis in axes)


def product(fixed: Mapping[str, Scalar], axes: Sequence[Axis]) -> Iterator[dict[str, Scalar]]:
    """Every point as a full mapping of settings, the last axis varying fastest."""
    names = tuple(itertools.chain.from_iterable(axis.names for axis in axes))
    for combination in itertools.product(*(axis.points for axis in axes)):
        point = dict(fixed)
        point.update(zip(names, itertools.chain.from_iterable(combination), strict=True))
        yield point


def without(
    points: Iterable[dict[str, Scalar]], patterns: Sequence[Pattern], used: list[bool]
) -> Iterator[dict[str, Scalar]]:
    """The points that no pattern matches; ``used[i]`` becomes true when pattern i matched one."""
    for point in points:
        hits = [index for index, pattern in enumerate(patterns) if pattern.matches(point)]
        for index in hits:
            used[index] = True
        if not hits:
            yield point
