"""Rows on their way to a tracker: one that it refuses holds up no other.

A row that fails is tried again after the others, and is set aside when it has failed too often,
each time over a new connection. When several have failed with none written between them, it is the
tracker: then all are set aside, since thousands of new connections would bring none of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path

from orchestrator.core.errors import StoreError
from orchestrator.core.measurement import Measurement
from orchestrator.trackers.base import Connection, Tracker, attempt_of, tracked

#: Failures, each over a new connection, after which a row is set aside.
MOST_FAILURES = 3
#: Different rows that fail with none written between them, after which the others are not tried.
MOST_IN_A_ROW = 5
#: Rows set aside that are named; the others are counted.
NAMED = 3


class Backlog:
    """The rows that a tracker may lack."""

    def __init__(self, rows: Iterable[Measurement] = ()) -> None:
        self._rows = deque(rows)
        self._failed: deque[Measurement] = deque()  # tried again after those
        self._failures: Counter[str] = Counter()  # by attempt
        self._in_a_row: set[str] = set()  # attempts that failed since a row was written
        self._refused: dict[str, str] = {}  # the last reason, by job
        self.written = 0

    def __bool__(self) -> bool:
        return bool(self._next)

    @property
    def _next(self) -> deque[Measurement]:
        """The rows of which the first is tried next."""
        return self._rows or self._failed

    def add(self, row: Measurement) -> None:
        """Add a row behind the others."""
        self._rows.append(row)

    def write(self, connection: Connection) -> None:
        """Write every row that is not there yet. Whatever a row raises comes out."""
        while rows := self._next:
            if not connection.has(attempt_of(rows[0])):
                connection.write(tracked(rows[0]))
                self.written += 1
                self._in_a_row.clear()
            rows.popleft()

    def put_back(self, reason: str) -> None:
        """Have the row that failed tried again after the others, or set it aside."""
        row = self._next.popleft()
        attempt = attempt_of(row)
        self._failures[attempt] += 1
        self._in_a_row.add(attempt)
        if self._failures[attempt] < MOST_FAILURES:
            self._failed.append(row)
        else:
            self._refused[row.job_id] = reason
        # Rows that a tracker refuses lie beside each other: those of one experiment. So the next
        # come from the other end, and from the middle.
        if len(self._in_a_row) > 1:
            self._rows.reverse()
        if len(self._in_a_row) == 3:
            self._rows.rotate(len(self._rows) // 2)

    @property
    def hopeless(self) -> bool:
        """Return whether so many rows have failed in a row that the tracker refuses any."""
        return len(self._in_a_row) >= MOST_IN_A_ROW

    def hope(self) -> None:
        """Count anew the rows that fail in a row."""
        self._in_a_row.clear()

    def give_up(self, reason: str) -> None:
        """Set every row aside."""
        reason += f"; {len(self._in_a_row)} in a row failed, so no more were tried"
        for rows in (self._failed, self._rows):
            self._refused |= dict.fromkeys((row.job_id for row in rows), reason)
            rows.clear()

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
            if backlog.hopeless:
                backlog.give_up(str(error))
                return backlog
