"""Nightgrid: turn a grid file into measurements on every card of a Ray cluster.

    from orchestrator import Grid, load, run

    grid = Grid.from_file("grids/smoke.yaml")
    night = run(grid, emulate="2x8")
    night.to_pandas()

``orchestrator`` knows everything about jobs and nothing about models; ``workloads`` the
other way round. The arrows between the parts are listed in ``docs/decisions.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api import Grid, run
    from orchestrator.run_rows import Run, load

__version__ = "0.1.0"
__all__ = ["Grid", "Run", "load", "run"]

#: Imported when asked for: the command line must not pay for what a notebook needs.
_HOMES = {
    "Grid": "orchestrator.api",
    "Run": "orchestrator.run_rows",
    "load": "orchestrator.run_rows",
    "run": "orchestrator.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
