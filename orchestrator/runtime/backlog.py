"""Rows on their way to a tracker: one that it refuses holds up no other.

A row that fails goes behind the others, and is set aside when it has failed too often, each time
over a new connection.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path

from orchestrator.domain.measurement import Measurement
from orchestrator.errors import StoreError
from orchestrator.trackers.base import Connection, Tracker, attempt_of, tracked

#: Failures, each over a new connection, after which a row is set aside.
MOST_FAILURES = 3
#: Rows set aside that are named; the others are counted.
NAMED = 3


class Backlog:
    """The rows that a tracker may lack."""

    def __init__(self, rows: Iterable[Measurement] = ()) -> None:
        self._rows = deque(rows)
        self._failures: Counter[str] = Counter()  # by attempt
        self._refused: dict[str, str] = {}  # the last reason, by job
        self.written = 0

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: Measurement) -> None:
        """Add a row behind the others."""
        self._rows.append(row)

    def write(self, connection: Connection) -> None:
        """Write every row that is not there yet. Whatever a row raises comes out."""
        while self._rows:
            if not connection.has(attempt_of(self._rows[0])):
                connection.write(tracked(self._rows[0]))
                self.written += 1
            self._rows.popleft()

    def put_back(self, reason: str) -> None:
        """Move the row that failed behind the others, or set it aside."""
        row = self._rows.popleft()
        attempt = attempt_of(row)
        self._failures[attempt] += 1
        if self._failures[attempt] < MOST_FAILURES:
            self._rows.append(row)
        else:
            self._refused[row.job_id] = reason

    @property
    def told_of_refused(self) -> str:
        """The rows set aside, with the last reason; empty if there are none."""
        refused = dict(self._refused)  # another thread may still add to it
        if not refused:
            return ""
        named = ", ".join(list(refused)[:NAMED]) + (", …" if len(refused) > NAMED else "")
        return f"{len(refused)} set aside ({named}): {list(refused.values())[-1]}"


def write_rows(
    tracker: Tracker, destination: str, run: str, directory: Path, rows: Iterable[Measurement]
) -> Backlog:
    """Write those of a run's final rows that are not there yet; how many, and what was refused.

    Raises:
        StoreError: the tracker cannot be reached.
    """
    backlog = Backlog(rows)
    while True:
        with tracker.explained(destination):
            connection = tracker.connect(destination, run, directory)
        try:
            with tracker.explained(destination):
                backlog.write(connection)
            return backlog
        except StoreError as error:
            backlog.put_back(str(error))
