"""Sampler of this host's cards, in one thread of the node's agent.

The interval follows the cost of a reading (a library call takes 1 ms, a vendor's tool 0.5 s): the
host's cores belong to the benchmark.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from orchestrator.core.readings import Energy, Reading, card_readings, energy_between
from workloads.devices.monitor.host import CardTelemetry

Read = Callable[[], Mapping[int, CardTelemetry]]

#: A reading may take this share of a core.
SHARE = 0.05
SHORTEST_S, LONGEST_S = 0.25, 5.0
#: Readings are kept this long, which is longer than any timed part.
KEEP_S = 2 * 3600.0
#: Age beyond which ``latest`` ignores a reading.
FRESH_S = 15.0
#: Empty readings in a row after which sampling ends.
EMPTY_READINGS = 3


class CardSampler:
    """The readings of one host. ``start`` once; the other methods from any thread."""

    def __init__(self, read: Read, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._readings: deque[tuple[float, Mapping[int, CardTelemetry]]] = deque()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Read in a thread of its own until there is nothing to read."""
        threading.Thread(target=self._sample, name="card-sampler", daemon=True).start()

    def latest(self) -> Mapping[int, CardTelemetry]:
        """The newest reading by card index; empty when it is old, or there is none."""
        with self._lock:
            if self._readings and self._clock() - self._readings[-1][0] <= FRESH_S:
                return self._readings[-1][1]
        return {}

    def energy(self, index: int, start: float, end: float) -> Energy | None:
        """Energy of a card between two past moments of the monotonic clock; None where unknown.

        Takes a reading if there is none yet after ``end``.
        """
        with self._lock:
            watched = bool(self._readings)
            seen = watched and self._readings[-1][0] >= end
        if watched and not seen:
            self.take()
        return energy_between(self._of(index), start, end)

    def readings(self, index: int, start: float, end: float) -> Mapping[str, str]:
        """Readings of a card between two moments that have passed, as details of a row."""
        return card_readings(self._of(index), start, end)

    def _of(self, index: int) -> list[Reading]:
        with self._lock:
            return [(at, cards[index]) for at, cards in self._readings if index in cards]

    def take(self) -> bool:
        """Take one reading now; return False if it is empty or fails."""
        began = self._clock()
        try:
            cards = self._read()
        except Exception:  # a monitor's failure is not the run's
            return False
        if not cards:
            return False
        # The tool looked at some moment while it ran.
        at = (began + self._clock()) / 2
        with self._lock:
            if not self._readings or at >= self._readings[-1][0]:
                self._readings.append((at, cards))
            while at - self._readings[0][0] > KEEP_S:
                self._readings.popleft()
        return True

    def _sample(self) -> None:
        empty = 0
        while empty < EMPTY_READINGS:
            began = time.monotonic()
            empty = 0 if self.take() else empty + 1
            took = time.monotonic() - began
            time.sleep(min(LONGEST_S, max(SHORTEST_S, took / SHARE)))
