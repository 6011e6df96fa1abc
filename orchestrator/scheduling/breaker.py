"""The circuit breaker: when everything fails at once in the same way, the run stops.

A broken driver, a missing package or a wrong image makes every attempt fail within seconds. Left
alone, the retries would burn the night and leave a thousand rows that say the same. The breaker
watches the first few things that are begun, in the order in which they are begun (not that in
which they fail: among a thousand cards a few bad ones fail first). One of them that does well, or
fails late or in another way, disarms it for good.
"""

from __future__ import annotations

from orchestrator.domain.failure import FailureClass
from orchestrator.scheduling.retry import POLICIES


class Breaker:
    """Watches the first ``limit`` subjects (jobs, or cards); all must fail alike to trip it."""

    def __init__(self, what: str, limit: int, within_s: float) -> None:
        self._what = what  # e.g. "attempts"
        self._limit = limit
        self._within_s = within_s
        self._armed = True
        self._class: FailureClass | None = None
        self._failed: dict[str, bool] = {}  # of the watched

    def begun(self, subject: str) -> None:
        """A job's attempt, or a card's worker, has been started."""
        if self._armed and len(self._failed) < self._limit:
            self._failed.setdefault(subject, False)

    def withdrawn(self, subject: str) -> None:
        """It was stopped before it could do well or fail: the next one is watched in its place."""
        if self._failed.get(subject) is False:
            del self._failed[subject]

    def success(self) -> None:
        """Something worked: the surroundings are sound."""
        self._armed = False

    def failure(
        self, failure_class: FailureClass, subject: str, took_s: float, message: str
    ) -> str | None:
        """A job or card has failed; returns why the run must stop, when it must."""
        if not self._armed or subject not in self._failed:
            return None
        alike = self._class is None or failure_class is self._class
        if not alike or POLICIES[failure_class].job_specific or took_s > self._within_s:
            self._armed = False
            return None
        self._class = failure_class
        self._failed[subject] = True
        if len(self._failed) < self._limit or not all(self._failed.values()):
            return None
        self._armed = False
        return (
            f"circuit breaker: the first {self._limit} {self._what} all failed at once with "
            f"{failure_class} (the last: {message}); nothing else would fare better"
        )
