"""A run that is under way: how far it is, by the status that its driver writes about once a second.

Rows alone cannot say how many jobs are still to come, nor whether anyone is working on them. The
driver's last word can; when that word is old, the driver may be dead, and the report says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.report.units import moment, plural, seconds
from orchestrator.results.lock import driver_lives
from orchestrator.runtime.status import CardStatus, RunStatus

#: A living driver writes its status every second; after this long it is worth a look.
STALE_AFTER_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Underway:
    """A run whose driver has not said that it is finished. Times in seconds since the epoch."""

    done: int
    total: int
    running: int  # attempts
    at: float
    eta_s: float | None
    eta_range_s: tuple[float, float] | None  # while little of the run is done
    silent_s: float  # between the driver's last word and this report
    stopping: str
    driver_died: bool
    cards: tuple[CardStatus, ...]  # that run something

    @property
    def stale(self) -> bool:
        """Return whether the driver has been silent for too long."""
        return self.silent_s > STALE_AFTER_S

    @property
    def sentence(self) -> str:
        """``Under way: 12 of 48 jobs done, 8 running, about 42 min 00 s left.``"""
        words = [f"{self.done:,} of {plural(self.total, 'job')} done"]
        if self.driver_died:
            return (
                f"Not finished: {words[0]}. Its driver died; the same `nightgrid run` resumes "
                f"it. Last heard of at {moment(self.at)}."
            )
        if self.stale:
            return (
                f"Not finished: {words[0]}. The driver has been silent for "
                f"{seconds(self.silent_s)}, since {moment(self.at)}."
            )
        if self.running:
            words.append(f"{self.running:,} running")
        if self.stopping:
            words.append(f"stopping: {self.stopping}")
        elif self.eta_s and self.eta_range_s:
            words.append(" to ".join(map(_rounded, self.eta_range_s)) + " left")
        elif self.eta_s:
            words.append(f"about {_rounded(self.eta_s)} left")
        return f"Under way: {', '.join(words)}."


def _rounded(value: float) -> str:
    return seconds(float(max(1, round(value))))


def as_it_stands(status: RunStatus, run: Path) -> RunStatus:
    """The last status of a run's driver, without what is not true any more if that has died."""
    if not status.finished and driver_lives(run) is False:
        return status.without_driver()
    return status


def underway_of(status: RunStatus | None, now: float) -> Underway | None:
    """The progress of a run at ``now``; None when it is finished, or nothing is known of it."""
    if status is None or status.finished:
        return None
    low_s, high_s = status.eta_low_s, status.eta_high_s
    return Underway(
        done=status.done,
        total=status.total,
        running=status.running,
        at=status.at,
        eta_s=status.eta_s,
        eta_range_s=None if low_s is None or high_s is None else (low_s, high_s),
        silent_s=max(0.0, now - status.at),
        stopping=status.stopping,
        driver_died=status.driver_died,
        cards=tuple(card for card in status.cards if card.job),
    )
