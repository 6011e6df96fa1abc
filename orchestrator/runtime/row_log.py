"""Live logging: every final row goes to a tracker (``trackers/``) as it comes.

A thread writes them; nothing waits for it, and whatever fails in it is said and tried again. Rows
are on disk before they come here, so what a tracker lacks at the end is brought there by the next
driver, or by ``nightgrid export``.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

from orchestrator.domain.measurement import Measurement
from orchestrator.errors import StoreError
from orchestrator.results.store import Store
from orchestrator.trackers.base import Connection, TrackedRun, Tracker, tracked

#: Seconds until a tracker that failed is tried again.
AGAIN_S = 30.0
#: Seconds in which the rest is written at the end, and where something hurries.
REST_S = 120.0
HURRIED_S = 10.0


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
        self.trouble = ""

    def start(self) -> None:
        """Write rows until ``close``."""
        self._thread.start()

    def take(self, row: Measurement) -> bool:
        """Have a row written soon, if it is final."""
        if row.final:
            self._rows.put(replace(row, samples=(), items=(), image=None))
        return row.final

    def close(self, *, hurry: bool = False) -> str:
        """Write the rest, if that does not take too long; return what to say of it."""
        self._ending.set()
        self._rows.put(None)
        wait_s = HURRIED_S if hurry or self.trouble else REST_S
        self._thread.join(wait_s)
        where = f"{self._tracker.title} at {self._destination}"
        if not self._thread.is_alive() and not self.trouble:
            return f"every row is in {where}"
        why = self.trouble or f"{where}: it takes longer than {wait_s:g} s"
        command = f"nightgrid export {self._destination} --to {self._tracker.name}"
        return f"some rows were not logged: {why}; {command} --run {self._store.run} brings them"

    def _work(self) -> None:
        left: list[TrackedRun] | None = None
        while True:
            try:
                with self._tracker.explained(self._destination):
                    connection = self._tracker.connect(
                        self._destination, self._store.run, self._store.path
                    )
                    left = self._earlier() if left is None else left
                    self._write(connection, left)
                    return
            except StoreError as error:
                self.trouble = str(error)
            if self._ending.is_set():
                return
            self._ending.wait(self._again_s)  # an end that comes meanwhile has one more try

    def _earlier(self) -> list[TrackedRun]:
        """The rows of earlier drivers, which may have died before they were logged."""
        from orchestrator.report.grouping import newest_final

        return [*map(tracked, newest_final(self._store.measurements(samples=False)))]

    def _write(self, connection: Connection, left: list[TrackedRun]) -> None:
        """Write what is left and what comes, until the end."""
        while True:
            while left:
                if not connection.has(left[0].attempt):
                    connection.write(left[0])
                del left[0]
            self.trouble = ""
            row = self._rows.get()
            if row is None:
                return
            left.append(tracked(row))
