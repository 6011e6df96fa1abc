"""Nightgrid from Python: ``from nightgrid import Grid, load, run``.

The names are those of ``orchestrator.api``, which is imported at the first use of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orchestrator
from orchestrator import __version__ as __version__

if TYPE_CHECKING:
    from orchestrator.api import Grid as Grid
    from orchestrator.api import Run as Run
    from orchestrator.api import load as load
    from orchestrator.api import run as run

__all__ = ["Grid", "Run", "load", "run"]


def __getattr__(name: str) -> Any:
    """The API's names, imported lazily."""
    if name not in __all__:
        raise AttributeError(f"module 'nightgrid' has no attribute {name!r}")
    return getattr(orchestrator, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
