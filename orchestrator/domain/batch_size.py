"""Batch sizes that a grid does not name but asks for: the largest that fits, or the fastest.

A job holds its wish as text, so that it can stand in ids and rows: ``max``, ``best``, or with what
differs from the defaults, ``max(cap=4096, tolerance=0.05)``. In a grid the longer form is written
as a mapping, ``{max: {cap: 4096, tolerance: 0.05}}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

Goal = Literal["max", "best"]
GOALS: tuple[Goal, ...] = get_args(Goal)

#: The largest size that is tried where the grid does not say.
CAP = 1024
LARGEST_CAP = 1_000_000
#: ``max``: by how much of the answer a larger size that fits may be missed. ``best``: by how much
#: of the highest throughput a size may be behind to count as equal.
TOLERANCES: Mapping[str, float] = {"max": 0.0, "best": 0.05}

#: The text of a search; what ``parse`` takes.
PATTERN = (
    r"^(max|best)(\((cap=[1-9][0-9]{0,6}|tolerance=0(\.[0-9]{1,6})?"
    r"|cap=[1-9][0-9]{0,6}, tolerance=0(\.[0-9]{1,6})?)\))?$"
)
_PATTERN = re.compile(PATTERN)
HINT = "write max, best or {max: {cap: 4096, tolerance: 0.05}}"


@dataclass(frozen=True, slots=True)
class Search:
    """A wish for a batch size."""

    goal: Goal
    cap: int
    tolerance: float  # share; see ``TOLERANCES``

    @property
    def text(self) -> str:
        """The wish as a job holds it."""
        said = []
        if self.cap != CAP:
            said.append(f"cap={self.cap}")
        if self.tolerance != TOLERANCES[self.goal]:
            said.append(f"tolerance={self.tolerance:.6f}".rstrip("0").rstrip("."))
        return f"{self.goal}({', '.join(said)})" if said else self.goal


@lru_cache(maxsize=256)
def search_of(batch_size: int | str) -> Search | None:
    """The search that a job's batch size asks for; None where it is a number.

    Raises:
        ValueError: it is text and no search.
    """
    if not isinstance(batch_size, str):
        return None
    match = _PATTERN.match(batch_size)
    if match is None:
        raise ValueError(f"{batch_size!r} is no batch size; {HINT}")
    said = dict(re.findall(r"(\w+)=([0-9.]+)", batch_size))
    goal: Goal = "max" if match[1] == "max" else "best"
    return Search(goal, int(said.get("cap", CAP)), float(said.get("tolerance", TOLERANCES[goal])))


def from_mapping(wish: Mapping[str, Any]) -> str:
    """The text of a search that a grid says as a mapping.

    Raises:
        ValueError: the mapping says something else.
    """
    if len(wish) != 1 or (goal := next(iter(wish))) not in GOALS:
        raise ValueError(f"a search for a batch size has one key, {' or '.join(GOALS)}; {HINT}")
    limits = {"cap": CAP, "tolerance": TOLERANCES[goal]}
    given = wish[goal] if wish[goal] is not None else {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{goal} takes a mapping of cap and tolerance; {HINT}")
    for name, value in given.items():
        if name not in limits:
            raise ValueError(f"{goal} has no {name}; it has {' and '.join(limits)}")
        wanted = (int,) if name == "cap" else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            kind = "a whole number" if name == "cap" else "a number"
            raise ValueError(f"{name} of {goal} is {value!r}, not {kind}")
        limits[name] = value
    if not 1 <= limits["cap"] <= LARGEST_CAP:
        raise ValueError(f"cap of {goal} is {limits['cap']}, not 1 to {LARGEST_CAP:,}")
    if not 0 <= limits["tolerance"] < 1:
        raise ValueError(f"tolerance of {goal} is {limits['tolerance']}, not 0 to below 1")
    return Search(goal, int(limits["cap"]), round(float(limits["tolerance"]), 6)).text
