"""Requests to end a run: from a signal, another thread, or a notebook."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

AT_ONCE = 3  # the third request: leave the loop as it is
FORCE_AFTER_S = 10.0  # later the process ends, whatever it hangs in
EXIT_FORCED = 130


class StopSignal:
    """Requests to end. The first lets what runs end and starts nothing more, the second stops
    what runs, both with a row for every job; the third leaves the loop as it is."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def request(self, reason: str) -> None:
        """Ask for an end; safe in a signal handler and from another thread."""
        self._reasons.append(reason)

    @property
    def requests(self) -> int:
        """Count the requests to stop."""
        return len(self._reasons)

    @property
    def reason(self) -> str:
        """Reason of the last request."""
        return self._reasons[-1] if self._reasons else ""

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[StopSignal]:
        """Let SIGINT and SIGTERM request an end while the block runs (main thread only)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def handler(number: int, _frame: FrameType | None) -> None:
            self.request(f"{signal.Signals(number).name} received")
            if self.requests == AT_ONCE:
                # A call into a dead cluster can hang beyond the reach of any exception.
                force = threading.Timer(FORCE_AFTER_S, os._exit, [EXIT_FORCED])
                force.daemon = True
                force.start()

        before = {
            number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield self
        finally:
            for number, old in before.items():
                signal.signal(number, old)
