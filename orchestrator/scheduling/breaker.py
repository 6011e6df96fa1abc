"""The circuit breaker: when everything fails at once in the same way, the run stops.

A broken driver, a missing package or a wrong image makes every attempt fail within seconds. Left
alone, the retries would burn the night and leave a thousand rows that say the same. The breaker
watches only the beginning of a run: the first success, or the first failure of another kind,
disarms it for good.
"""

from __future__ import annotations

from orchestrator.failure import FailureClass
from orchestrator.retry import POLICIES


class Breaker:
    """Counts the first failures; ``limit`` alike ones, each of another job or card, trip it."""

    def __init__(self, limit: int, within_s: float) -> None:
        self._limit = limit
        self._within_s = within_s
        self._armed = True
        self._class: FailureClass | None = None
        self._subjects: set[str] = set()

    def success(self) -> None:
        """Something worked: the surroundings are sound."""
        self._armed = False

    def failure(
        self, failure_class: FailureClass, subject: str, took_s: float, message: str
    ) -> str | None:
        """Count a failure of a job or card; returns why the run must stop, when it must."""
        if not self._armed:
            return None
        alike = self._class is None or failure_class is self._class
        if not alike or POLICIES[failure_class].job_specific or took_s > self._within_s:
            self._armed = False
            return None
        self._class = failure_class
        self._subjects.add(subject)
        if len(self._subjects) < self._limit:
            return None
        self._armed = False
        return (
            f"circuit breaker: the first {self._limit} attempts all failed at once with "
            f"{failure_class} (the last: {message}); nothing else would fare better"
        )
