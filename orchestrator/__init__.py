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
    from orchestrator.api import Grid, Run, load, run

__version__ = "0.1.0"
__all__ = ["Grid", "Run", "load", "run"]


def __getattr__(name: str) -> Any:
    """Names of the API, imported when asked for: the command line must not pay for them."""
    if name not in __all__:
        raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
    return getattr(importlib.import_module("orchestrator.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
