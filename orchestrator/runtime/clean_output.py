"""The driver's outlets without secrets: rows, its log, status.json and errors.

Workers and agents redact what they send with their own environments; the driver has one of its own,
and errors that it meets itself (the executor's, the store's, Ray's) quote that one.
"""

from __future__ import annotations

import os
from dataclasses import replace

from orchestrator.core.measurement import Measurement
from orchestrator.core.status import RunStatus
from orchestrator.util.redaction import redact
from orchestrator.watch.live import View


def clean_row(row: Measurement) -> Measurement:
    """A row whose texts hold no secret of this process. Its parameters are the grid's, and stay."""
    reason = redact(row.reason, os.environ)
    tail = None if row.failure_tail is None else redact(row.failure_tail, os.environ)
    details = {name: redact(text, os.environ) for name, text in row.details.items()}
    if (reason, tail, details) == (row.reason, row.failure_tail, row.details):
        return row  # most have none, and a row has a hundred columns
    return replace(row, reason=reason, failure_tail=tail, details=details)


class CleanView:
    """A view that is given no secrets of this process."""

    def __init__(self, view: View) -> None:
        self._view = view

    def line(self, text: str) -> None:
        """Say one thing that happened."""
        self._view.line(redact(text, os.environ))

    def show(self, status: RunStatus) -> None:
        """Show how the run stands; its reasons are those of rows."""
        self._view.show(status)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._view.close()
