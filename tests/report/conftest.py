"""Helpers for tests of the report: the page of a large run, which takes seconds to make."""

from __future__ import annotations

import pytest
from measurement_factory import large_run

from orchestrator.analysis.summary import summarize
from orchestrator.report.html import render


@pytest.fixture(scope="session")
def large_page() -> str:
    rows = large_run(10_000, items=1)
    return render(summarize(rows), rows)
