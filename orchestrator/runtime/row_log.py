"""Live logging: every final row goes to a tracker (``trackers/``) as it comes.

A thread writes them; nothing waits for it, and whatever fails in it is said and tried again. A row
that fails goes behind the others, and is set aside when it has failed too often: a tracker that
refuses one row gets the rest. Rows are on disk before they come here, so what a tracker lacks at
the end is brought there by the next driver, or by ``nightgrid export``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.domain.measurement import Measurement
from orchestrator.errors import StoreError
from orchestrator.results.store import Store
from orchestrator.trackers.base import Connection, Tracker, attempt_of, tracked

#: Seconds until a tracker that failed is tried again.
AGAIN_S = 30.0
#: Seconds in which the rest is written at the end, and where something hurries.
REST_S = 120.0
HURRIED_S = 10.0
#: Failures, each over a new connection, after which a row is set aside.
MOST_FAILURES = 3
#: Rows set aside that are named at the end; the others are counted.
NAMED = 3


class RowLog:
    """The rows of one run on their way to one tracker.

    Args:
        store: the run; rows that it has already go there first.
        tracker: where rows go.
        destination: of that tracker, see ``Tracker.destination_of``.
    """

    def __init__(
        self, store: Store, tracker: Tracker, destination: str, again_s: float = AGAIN_S
    ) -> None:
        self._store = store
        self._tracker = tracker
        self._destination = destination
        self._again_s = again_s
        self._rows: queue.SimpleQueue[Measurement | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="row log", daemon=True)
        self._written = 0  # over the connection that is open
        self._failures: Counter[str] = Counter()  # by attempt
        self._refused: dict[str, str] = {}  # the last reason, by job
        self.trouble = ""

    def start(self) -> None:
        """Write rows until ``close``."""
        self._thread.start()

    def take(self, row: Measurement) -> bool:
        """Have a row written soon, if it is final."""
        if row.final:
            self._rows.put(replace(row, samples=(), items=(), image=None))
        return row.final

    def end(self) -> None:
        """Have the thread end when it has written the rest."""
        self._ending.set()
        self._rows.put(None)

    def close(self, *, hurry: bool = False) -> str:
        """Write the rest, if that does not take too long; return what to say of it."""
        return close_all([self], hurry=hurry)[0]

    def told(self, *, hurry: bool, ended_at: float) -> str:
        """Wait for the end, which was asked for at that time (monotonic); return what to say."""
        wait_s = HURRIED_S if hurry or self.trouble else REST_S
        self._thread.join(max(0.0, ended_at + wait_s - time.monotonic()))
        where = f"{self._tracker.title} at {self._destination}"
        late = f"{where}: it takes longer than {wait_s:g} s" if self._thread.is_alive() else ""
        why = "; ".join(filter(None, (self.trouble or late, self._told_of_refused())))
        if not why:
            return f"every row is in {where}"
        command = f"nightgrid export {self._destination} --to {self._tracker.name}"
        return f"some rows were not logged: {why}; {command} --run {self._store.run} brings them"

    def _told_of_refused(self) -> str:
        refused = dict(self._refused)  # the thread may still add to it
        if not refused:
            return ""
        named = ", ".join(list(refused)[:NAMED]) + (", …" if len(refused) > NAMED else "")
        return f"{len(refused)} set aside ({named}): {list(refused.values())[-1]}"

    def _work(self) -> None:
        left: deque[Measurement] | None = None
        while True:
            self._written = 0
            connected = False
            try:
                with self._tracker.explained(self._destination):
                    connection = self._tracker.connect(
                        self._destination, self._store.run, self._store.path
                    )
                    connected = True
                    left = self._earlier(connection) if left is None else left
                    self._write(connection, left)
                    return
            except StoreError as error:
                self.trouble = str(error)
                if connected and left:
                    self._put_back(left)
            if self._ending.is_set():
                if not (connected and left is not None):
                    return
            elif not self._written:  # else the connection worked until this row came
                self._ending.wait(self._again_s)  # an end that comes meanwhile has one more try

    def _earlier(self, connection: Connection) -> deque[Measurement]:
        """The rows of earlier drivers that are not there: those may have died before."""
        from orchestrator.report.grouping import newest_final
        from orchestrator.results.bulk import read_lean

        rows = newest_final(read_lean(self._store).measurements)
        return deque(row for row in rows if not connection.has(attempt_of(row)))

    def _put_back(self, left: deque[Measurement]) -> None:
        """Move the row that failed behind the others, or set it aside."""
        row = left.popleft()
        attempt = attempt_of(row)
        self._failures[attempt] += 1
        if self._failures[attempt] < MOST_FAILURES:
            left.append(row)
        else:
            self._refused[row.job_id] = self.trouble

    def _write(self, connection: Connection, left: deque[Measurement]) -> None:
        """Write what is left and what comes, until the end."""
        while True:
            while left:
                if not connection.has(attempt_of(left[0])):
                    connection.write(tracked(left[0]))
                    self._written += 1
                left.popleft()
            self.trouble = ""
            row = self._rows.get()
            if row is None:
                return
            left.append(row)


def close_all(logs: Sequence[RowLog], *, hurry: bool) -> list[str]:
    """Write the rest of every log at the same time; return what to say of each."""
    ended_at = time.monotonic()
    for log in logs:
        log.end()
    return [log.told(hurry=hurry, ended_at=ended_at) for log in logs]
