"""The report: one pure ``Summary`` of a run's rows, printed in several ways.

``summary`` decides what is said; ``terminal``, ``page``, ``markdown`` and ``export`` say it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from orchestrator.measurement import Measurement

PAGE_NAME = "report.html"


class ReadableRun(Protocol):
    """What the report needs of a store."""

    @property
    def path(self) -> Path:
        """The directory of the run."""

    def measurements(self, samples: bool = True) -> list[Measurement]:
        """All rows in the order in which they were written."""


def write_report(store: ReadableRun) -> Path:
    """Write the HTML page of a run beside its rows, and return its path.

    The page replaces an older one in a single step, so a reader never sees half of it.
    """
    from orchestrator.report.page import render
    from orchestrator.report.summary import summarize

    measurements = store.measurements()
    return write_aside(Path(store.path) / PAGE_NAME, render(summarize(measurements), measurements))


def write_aside(path: Path, text: str) -> Path:
    """Write ``text`` under a temporary name in the same directory, then rename it to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path
