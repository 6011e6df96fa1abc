"""Counters of compilation: what this process's compilers have made so far.

Read before and after a timed part they tell whether it compiled: a step that met a new graph took
seconds that are no property of the model. torch.compile counts its graphs in every process; a
device whose software compiles as well adds counters of its own (``Device.compilations``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilations:
    """Compilations of a process up to a moment, or between two."""

    graphs: int | None = None  # None: nobody counts them
    compile_s: float | None = None  # time to make them; None: nobody measures it
    recalled: int | None = None  # graphs that were known, here or on disk; None: nobody counts
    cpu_fallbacks: int | None = None  # operations that a card left to the host
    named: Mapping[str, float] = field(default_factory=dict)  # by the software's own names

    def since(self, earlier: Compilations) -> Compilations:
        """The growth since an earlier reading; counters that did not move are left out."""
        grown = {name: n - earlier.named.get(name, 0) for name, n in self.named.items()}
        return Compilations(
            graphs=_difference(self.graphs, earlier.graphs),
            compile_s=_difference(self.compile_s, earlier.compile_s),
            recalled=_difference(self.recalled, earlier.recalled),
            cpu_fallbacks=_difference(self.cpu_fallbacks, earlier.cpu_fallbacks),
            named={name: n for name, n in grown.items() if n},
        )

    def temperature(self) -> str:
        """Tell if a job had to compile, for its row: cold, or cached where every graph was known.
        Empty where nobody measures how long compiling takes, and where there was no graph."""
        if self.graphs is None or self.compile_s is None:
            return ""
        if not self.graphs:
            return "cached: every graph was known" if self.recalled != 0 else ""
        return f"cold: {self.graphs} graphs compiled in {self.compile_s:.3g} s"

    def told(self) -> str:
        """The counters as one line, for a row."""
        return ", ".join(f"{name} {number:g}" for name, number in sorted(self.named.items()))


_Number = TypeVar("_Number", int, float)


def _difference(now: _Number | None, before: _Number | None) -> _Number | None:
    return None if now is None or before is None else now - before


def of_torch() -> Compilations:
    """The graphs that torch.compile has made here, those of recompilations included; 0 as long as
    nothing was compiled. torch's compiler is not imported for it, which takes seconds."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
    return Compilations(graphs=graphs, named={"torch_graphs": graphs})
