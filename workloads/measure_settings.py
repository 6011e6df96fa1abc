"""Settings of a job's timing; apart from ``api.py``, since a plan needs nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSettings:
    """Settings of a job's timing: when to stop, and what must be paid before timing starts."""

    warmup: int = 1  # untimed repeats, at least; 0: none, and the first meeting of shapes is timed
    min_repeats: int = 3
    max_repeats: int = 20
    confidence: float = 0.95  # level of the interval
    relative_half_width: float = 0.05  # stop when the interval is this tight
    time_limit_s: float = 120.0  # of the timed part
    warmup_limit_s: float = 1800.0  # of what comes before it
    least_s: float = 0.0  # of the timed part: repeats go on until then, so that energy can be read
