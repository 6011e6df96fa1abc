"""Progress for people: plain lines where output is logged, a live display in a terminal.

`ray job logs` and log files want one line an event and no control codes; a person at a terminal
wants bars, the cards and the time left. Both are drawn from the same ``RunStatus`` and the same
events by the pure functions of ``live_text.py``; the views only write. What needs a terminal is in
``live_display.py``.
"""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

from orchestrator.host import output
from orchestrator.runtime.status import RunStatus
from orchestrator.watching.live_text import printable, summary_line

#: Seconds between summary lines in a log: often enough to see life, seldom enough to read a night.
SUMMARY_INTERVAL_S = 120.0


class View(Protocol):
    """Display of a run's progress."""

    def line(self, text: str) -> None:
        """Say one thing that happened."""

    def show(self, status: RunStatus) -> None:
        """Show how the run stands; called about once a second."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainView:
    """Lines with a time of day, for logs; never a control code."""

    def __init__(self, stream: TextIO, *, interval_s: float = SUMMARY_INTERVAL_S) -> None:
        self._stream = output.guarded(stream, patience_s=output.PATIENCE_S)
        self._interval_s = interval_s
        self._next_summary_at: float | None = None  # in seconds of the run

    def line(self, text: str) -> None:
        """Print one event."""
        output.say(f"{time.strftime('%H:%M:%S')} {printable(text)}", self._stream)

    def show(self, status: RunStatus) -> None:
        """Print a summary when the last is old enough."""
        elapsed_s = status.elapsed_s
        if self._next_summary_at is None:
            self._next_summary_at = elapsed_s + self._interval_s
        if elapsed_s >= self._next_summary_at or status.finished:
            self._next_summary_at = elapsed_s + self._interval_s
            self.line(summary_line(status))

    def close(self) -> None:
        """Do nothing: there is nothing to clean up."""


class QuietView:
    """Says nothing (``--quiet``)."""

    def line(self, text: str) -> None:
        """Say nothing."""

    def show(self, status: RunStatus) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing: there is nothing to clean up."""


def open_view(*, quiet: bool = False, stream: TextIO | None = None) -> View:
    """The view that suits where output goes."""
    if quiet:
        return QuietView()
    stream = output.guarded(stream or sys.stdout, patience_s=output.PATIENCE_S)
    if not stream.isatty():
        return PlainView(stream)
    from orchestrator.watching.live_display import TerminalView

    return TerminalView(output.console(stream))
