"""The energy that a card took over a stretch of time, from readings taken outside its worker.

Where the card has a counter of energy, the difference of two readings is exact but for the ends of
the stretch, which lie between readings; without one the power is integrated. Readings are never as
dense as one would wish, so a stretch that is not much longer than the time between them, or that
was not watched throughout, has no energy: None, and never a guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workloads.devices.monitoring.telemetry import CardTelemetry

#: A stretch has to be this many times as long as the longest time between two of its readings:
#: what happens between readings at its two ends is only interpolated.
STRETCH_PER_GAP = 4.0

Source = Literal["counter", "power"]
Reading = tuple[float, CardTelemetry]  # when, on the host's monotonic clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy that one card took."""

    energy_j: float
    duration_s: float
    source: Source  # the card's own counter, or its power integrated

    @property
    def power_w(self) -> float:
        """The mean power."""
        return self.energy_j / self.duration_s


def energy_between(readings: Sequence[Reading], start: float, end: float) -> Energy | None:
    """The energy from ``start`` to ``end``, by readings in the order of time.

    None where the stretch was not watched from before its start to after its end, where it is too
    short for how often the card was read, or where neither counter nor power is known throughout.
    """
    if end <= start:
        return None
    first = max((i for i, (at, _) in enumerate(readings) if at <= start), default=None)
    last = min((i for i, (at, _) in enumerate(readings) if at >= end), default=None)
    if first is None or last is None:
        return None
    watched = readings[first : last + 1]
    gap = max(later - earlier for (earlier, _), (later, _) in itertools.pairwise(watched))
    if end - start < STRETCH_PER_GAP * gap:
        return None
    energy_j, source = _by_counter(watched, start, end), "counter"
    if energy_j is None:
        energy_j, source = _by_power(watched, start, end), "power"
    if energy_j is None:
        return None
    return Energy(energy_j=energy_j, duration_s=end - start, source=source)  # type: ignore[arg-type]


def _by_counter(readings: Sequence[Reading], start: float, end: float) -> float | None:
    """Energy by the card's counter; None where a reading lacks it, or where the counter went back
    because the card's driver was loaded again."""
    points = [(at, read.energy_j) for at, read in readings if read.energy_j is not None]
    if len(points) != len(readings):
        return None
    if any(later < earlier for (_, earlier), (_, later) in itertools.pairwise(points)):
        return None
    return _at(points[-2:], end) - _at(points[:2], start)


def _by_power(readings: Sequence[Reading], start: float, end: float) -> float | None:
    """Straight lines between the readings of power; None where one is missing."""
    points = [(at, read.power_w) for at, read in readings if read.power_w is not None]
    if len(points) != len(readings):
        return None
    inner = [(at, power) for at, power in points if start < at < end]
    cut = [(start, _at(points[:2], start)), *inner, (end, _at(points[-2:], end))]
    return sum((b - a) * (p + q) / 2 for (a, p), (b, q) in itertools.pairwise(cut))


def _at(line: Sequence[tuple[float, float]], moment: float) -> float:
    """The value at a moment of the straight line through two points."""
    (a, p), (b, q) = line
    return p if b == a else p + (q - p) * (moment - a) / (b - a)
