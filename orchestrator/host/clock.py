"""Two clocks: the time of day, for people and rows, and one that never jumps, for durations.

The time of day (``time.time``) is set: by hand, by a time server that finds it wrong, by a virtual
machine that wakes up. A duration, a timeout or a backoff that was counted by it would be hours too
long or end at once. So all of them, and the events, are counted by ``time.monotonic``. The time of
day is read where somebody will read it: rows, notes, the status, locks; and for ``--deadline``,
which is a time of day (``CallAt`` here, ``ClockSet`` in the schedule). An interval that rows hold
begins at a time of day and ends as much later as the steady clock says (``Interval``).
``tests/project/test_architecture.py`` lists every function that may read the time of day, and why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: A difference that no two reads of two clocks explain: the time of day was set.
STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Starts when it is made. Its end is as far from its start as time has really passed."""

    started_at: float = field(default_factory=time.time)  # seconds since the epoch
    _began: float = field(default_factory=time.monotonic)

    def until_now(self) -> float:
        """Now, in seconds since the epoch by the clock as it was at the start."""
        return self.started_at + (time.monotonic() - self._began)


class CallAt:
    """Calls a function once at a time of day, however often that is set meanwhile."""

    def __init__(
        self,
        moment: float,
        act: Callable[[], object],
        *,
        wall: Callable[[], float] = time.time,
        look_every_s: float = 1.0,
    ) -> None:
        self._moment, self._act, self._wall = moment, act, wall
        self._look_every_s = look_every_s
        self._cancelled = threading.Event()
        threading.Thread(target=self._wait, name="deadline", daemon=True).start()

    def cancel(self) -> None:
        """Do not call it any more."""
        self._cancelled.set()

    def _wait(self) -> None:
        while (left := self._moment - self._wall()) > 0:
            if self._cancelled.wait(min(left, self._look_every_s)):
                return
        if not self._cancelled.is_set():
            self._act()
