"""Deadline of a run, report included: ``--deadline 08:00`` or ``--budget 9h``. Pure.

Every attempt must have ended somewhat earlier: the reserve is for processes to end and the report.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

#: The reserve grows with the rows that the report has to read and draw.
STOP_S = 30.0  # for workers to end, and the cards to be given back
REPORT_S = 30.0
REPORT_S_PER_JOB = 0.02
#: Largest share of a short budget that the reserve may take.
MOST_OF_BUDGET = 0.25

_BUDGET = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+)s)?")
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_UNITS_S = (86400.0, 3600.0, 60.0, 1.0)
_LONGEST_S = 400 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Moment by which the report must be there. Times are seconds since the epoch."""

    at: float
    reserve_s: float  # before it

    @property
    def work_until(self) -> float:
        """Moment by which the last attempt must have ended."""
        return self.at - self.reserve_s

    @property
    def stop_s(self) -> float:
        """Part of the reserve that is for processes to end; the rest is for the report."""
        return min(STOP_S, self.reserve_s / 2)

    @classmethod
    def of(cls, at: float, *, now: float, jobs: int) -> Deadline:
        """The deadline of a run of so many jobs that starts now."""
        wanted = STOP_S + REPORT_S + REPORT_S_PER_JOB * jobs
        return cls(at=at, reserve_s=min(wanted, MOST_OF_BUDGET * max(0.0, at - now)))


def parse_budget(text: str) -> float:
    """Seconds of ``9h``, ``90m``, ``1h30m``, ``45s``, ``1d`` or ``1.5h``; else ValueError."""
    compact = text.strip().lower().replace(" ", "")
    match = _BUDGET.fullmatch(compact)
    if not compact or match is None:
        raise ValueError(f"'{text}' is not a length of time; write 9h, 90m or 1h30m")
    seconds = sum(
        float(number) * unit
        for number, unit in zip(match.groups(), _UNITS_S, strict=True)
        if number is not None
    )
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(f"'{text}' is {'no time at all' if not seconds else 'over a year'}")
    return seconds


def parse_deadline(
    text: str, now: datetime, local: Callable[[datetime], datetime] = datetime.astimezone
) -> datetime:
    """Moment of ``08:00`` (the next one) or ``2026-11-22T08:00+01:00``; raises ValueError if it is
    neither, has no zone, or is past. ``now`` has the user's zone; ``local`` adds that zone to a
    time without one (clocks may change before it)."""
    clock = _CLOCK.fullmatch(text.strip())
    if clock is not None:
        hour, minute = map(int, clock.groups())
        today = now.replace(tzinfo=None, hour=hour, minute=minute, second=0, microsecond=0)
        moment = local(today)
        return moment if moment > now else local(today + timedelta(days=1))
    try:
        # Python 3.10 does not know the suffix Z.
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.strip()))
    except ValueError:
        raise ValueError(
            f"'{text}' is not a time; write 08:00, or with date and zone 2026-11-22T08:00+01:00"
        ) from None
    if moment.tzinfo is None:
        raise ValueError(f"'{text}' has no time zone; write {text.strip()}+01:00, or ...Z for UTC")
    if moment <= now:
        raise ValueError(f"'{text}' is past: it is {now.isoformat(timespec='minutes')}")
    return moment
