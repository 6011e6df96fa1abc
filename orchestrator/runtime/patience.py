"""Patience with what may fail for a moment: an executor, a disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.errors import ControlStoreLost, StoreFull, StoreLocked
from orchestrator.runtime.stop_signal import AT_ONCE, StopSignal
from orchestrator.watching.live import View

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Patience:
    """Tries again what may fail for a moment, up to a limit."""

    view: View
    stop: StopSignal
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    limit_s: float = 120.0

    def act(self, what: str, attempt: Callable[[], T], last: type[Exception]) -> T:
        """Do something that may fail for a moment.

        Raises:
            last: it kept failing for ``limit_s``, or the run is to end at once.
            StoreLocked, StoreFull, ControlStoreLost: at once, since waiting does not help.
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
