"""Requests to end a run: from a signal, another thread, or a notebook."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from orchestrator.core.errors import ControlStoreLost, StoreFull, StoreLocked
from orchestrator.watch.live import View

AT_ONCE = 3  # the third request: leave the loop as it is
FORCE_AFTER_S = 10.0  # later the process ends, whatever it hangs in
EXIT_FORCED = 130


class StopSignal:
    """Stop requests. First: start nothing more; second: stop running attempts too (both write a
    row for every job); third: leave the loop at once."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def request(self, reason: str) -> None:
        """Request a stop; safe in signal handlers and other threads."""
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

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, handler) for number in numbers}
        try:
            yield self
        finally:
            for number, old in before.items():
                signal.signal(number, old)


T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Patience:
    """Retries for transient failures of an executor or a disk."""

    view: View
    stop: StopSignal
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    limit_s: float = 120.0

    def act(self, what: str, attempt: Callable[[], T], last: type[Exception]) -> T:
        """Call ``attempt``, with retries.

        Raises:
            last: it kept failing for ``limit_s``, or the run is to end at once.
            StoreLocked, StoreFull, ControlStoreLost: never retried.
        """
        began, pause = self.clock(), 0.5
        while True:
            try:
                return attempt()
            except (StoreLocked, StoreFull, ControlStoreLost):
                raise  # another driver took the run; or there is no room, and more to do than wait
            except Exception as error:
                if self.clock() - began >= self.limit_s or self.stop.requests >= AT_ONCE:
                    raise last(f"{what} keeps failing: {error}") from error
                self.view.line(f"{what} failed, trying again in {pause:g} s: {error!r}")
            self.sleep(pause)
            pause = min(2 * pause, 15.0)
