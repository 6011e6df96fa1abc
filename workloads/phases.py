"""The phase of a job, told from within a library that knows nothing of jobs.

A library may compile for minutes while it loads a model. What runs on its way there names the
phase, and whoever drives the job hears of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from workloads.api import Phase

_enter: ContextVar[Callable[[Phase], None] | None] = ContextVar("phase", default=None)


@contextlib.contextmanager
def told_to(enter_phase: Callable[[Phase], None]) -> Iterator[None]:
    """Let ``enter`` reach this function within the block."""
    before = _enter.set(enter_phase)
    try:
        yield
    finally:
        _enter.reset(before)


def enter(phase: Phase) -> None:
    """Name the phase; outside of any job nobody hears of it."""
    hears = _enter.get()
    if hears is not None:
        hears(phase)
