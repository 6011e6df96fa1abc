"""The circuit breaker: when everything fails at once in the same way, the run stops.

A broken driver, a missing package or a wrong image makes every attempt fail within seconds. Left
alone, the retries would burn the night and leave a thousand rows that say the same. The breaker
watches the first few things that are begun, in the order in which they are begun (not that in
which they fail: among a thousand cards a few bad ones fail first). Anything that does well disarms
it for good, and so does one of them that fails late or in another way. What was stopped, or lost
with its node, says nothing: the next in order is watched in its place, also one that has failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from orchestrator.core.outcome import FailureClass
from orchestrator.scheduling.retry import POLICIES


@dataclass(frozen=True, slots=True)
class _Failed:
    """The last failure of a subject."""

    failure_class: FailureClass
    took_s: float
    message: str


class Breaker:
    """Watches the first ``limit`` subjects (jobs, or cards); all must fail alike to trip it.

    ``tripped`` says why the run must stop, when it must.
    """

    def __init__(self, what: str, limit: int, within_s: float) -> None:
        self.tripped = ""
        self._what = what  # e.g. "attempts"
        self.limit = limit
        self._within_s = within_s
        self._armed = True
        self.subjects: dict[str, _Failed | None] = {}  # in this order; emptied when it is disarmed

    def begun(self, subject: str) -> None:
        """A job's attempt, or a card's worker, has been started."""
        if self._armed:
            self.subjects.setdefault(subject, None)

    def withdrawn(self, subject: str) -> None:
        """Forget a subject that ended before it could succeed or fail; the next takes its place."""
        if subject in self.subjects and self.subjects[subject] is None:
            del self.subjects[subject]
            self._look()

    def success(self) -> None:
        """Something worked: the surroundings are sound."""
        self._armed = False
        self.subjects.clear()

    def failure(
        self, failure_class: FailureClass, subject: str, took_s: float, message: str
    ) -> None:
        """A job or card has failed."""
        if failure_class is FailureClass.NODE_LOST:
            self.withdrawn(subject)
        elif subject in self.subjects:
            self.subjects[subject] = _Failed(failure_class, took_s, message)
            self._look()

    def _look(self) -> None:
        """Trip, or disarm, if what is watched says so."""
        watched = list(islice(self.subjects.values(), self.limit))
        failed = [each for each in watched if each is not None]
        own = any(
            POLICIES[each.failure_class].job_specific or each.took_s > self._within_s
            for each in failed
        )
        if own or len({each.failure_class for each in failed}) > 1:
            self.success()
        elif len(failed) == self.limit:
            self.tripped = (
                f"circuit breaker: the first {self.limit} {self._what} all failed at once with "
                f"{failed[0].failure_class} (the last: {failed[-1].message}); nothing else would "
                "fare better"
            )
            self.success()
