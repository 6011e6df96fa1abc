"""Nightgrid: turn a grid file into measurements on every card of a Ray cluster.

    from orchestrator import Grid, load, run

    grid = Grid.from_file("grids/smoke.yaml")
    night = run(grid, emulate="2x8")
    night.to_pandas()

``orchestrator`` knows jobs, ``workloads`` knows models; ``docs/decisions.md`` lists the imports
that are allowed between parts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api import Grid, Run, load, run

__version__ = "0.1.0"
__all__ = ["Grid", "Run", "load", "run"]


def __getattr__(name: str) -> Any:
    """Import names of the API lazily: the command line must not pay for them."""
    if name not in __all__:
        raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
    return getattr(importlib.import_module("orchestrator.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
