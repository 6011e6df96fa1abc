"""Live logging: every final row goes to a tracker (``trackers/``) as it comes.

A thread writes them; nothing waits for it, and whatever fails in it is said and tried again; only a
row that the tracker refuses while it takes others is left out, and named at the end. Rows
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
#: Rows in succession that fail until the connection is taken for broken.
MOST_FAILED = 3


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
        self._over = False  # no row comes any more
        self._failed: set[str] = set()  # attempts that failed at least once
        self._refused: list[str] = []
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
            if not self._refused:
                return f"every row is in {where}"
            count = f"{len(self._refused)} row" + "s" * (len(self._refused) > 1)
            return f"every row is in {where} but {count} that it refused, first {self._refused[0]}"
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
        """Write what is left and what comes, until the end. A row that failed before, and fails
        again once another was written, is set aside: else it would hold up all after it.

        Raises:
            StoreError: nothing is written over this connection any more.
        """
        failed: dict[str, StoreError] = {}
        works = False
        while not self._rows.empty():
            self._take_next(left)
        left.sort(key=lambda each: each.attempt in self._failed)  # others are tried first
        while True:
            run = next((each for each in left if each.attempt not in failed), None)
            if run is None and self._over:
                if failed:
                    raise next(iter(failed.values()))
                self.trouble = ""
                return
            if run is None:
                self.trouble = self.trouble if failed else ""
                if failed and self._rows.empty():
                    raise next(iter(failed.values()))
                self._take_next(left)
                continue
            try:
                with self._tracker.explained(self._destination):
                    there = connection.has(run.attempt)
                    if not there:
                        connection.write(run)
            except StoreError as error:
                if works and run.attempt in self._failed:
                    left.remove(run)
                    self._refused.append(f"{run.name}: {error}")
                    continue
                failed[run.attempt] = error
                self._failed.add(run.attempt)
                if len(failed) == MOST_FAILED:
                    raise
                continue
            left.remove(run)
            if not there:
                works = True
                failed.clear()

    def _take_next(self, left: list[TrackedRun]) -> None:
        """Wait for a row, or the end; this thread alone takes them."""
        row = self._rows.get()
        if row is None:
            self._over = True
        else:
            left.append(tracked(row))
