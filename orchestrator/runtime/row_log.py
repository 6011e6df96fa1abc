"""Live logging: every final row goes to a tracker (``trackers/``) as it comes.

A thread writes them; nothing waits for it, and whatever fails in it is said and tried again. A row
that the tracker refuses is set aside in the end (``backlog.py``); a tracker that refuses any row is
left alone until the run ends, and tried once more then. Rows are on disk before they come here, so
what a tracker lacks at the end is brought there by the next driver, or by ``nightgrid export``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.core.errors import StoreError
from orchestrator.core.measurement import Measurement
from orchestrator.results.store import Store
from orchestrator.runtime.backlog import Backlog
from orchestrator.trackers.base import Connection, Tracker

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
        self._backlog = Backlog()
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
        why = "; ".join(filter(None, (self.trouble or late, self._backlog.told_of_refused)))
        if not why:
            return f"every row is in {where}"
        command = f"nightgrid export {self._destination} --to {self._tracker.name}"
        return f"some rows were not logged: {why}; {command} --run {self._store.run} brings them"

    def _work(self) -> None:
        left, known, last_try = self._backlog, False, False
        while True:
            written = left.written
            connected = False
            try:
                with self._tracker.explained(self._destination):
                    connection = self._tracker.connect(
                        self._destination, self._store.run, self._store.path
                    )
                    connected = True
                    if not known:
                        self._add_earlier()
                        known = True
                    self._write(connection)
                    return
            except StoreError as error:
                self.trouble = str(error)
                if connected and left:
                    left.put_back(self.trouble)
            if left.hopeless and last_try:
                left.give_up(self.trouble)
                self.trouble = ""  # what is said of the rows has it
                return
            if left.hopeless:
                self._take_rest()
                left.hope()
                last_try = True
            elif self._ending.is_set():
                if not (connected and known):
                    return
            elif left.written == written:  # else the connection worked until this row came
                self._ending.wait(self._again_s)  # an end that comes meanwhile has one more try

    def _add_earlier(self) -> None:
        """Add the rows of earlier drivers, some of which may not be there: those died before."""
        from orchestrator.analysis.selection import newest_final
        from orchestrator.results.bulk import read_lean

        for row in newest_final(read_lean(self._store).measurements):
            self._backlog.add(row)

    def _take_rest(self) -> None:
        """Add what comes until the end, which ``_write`` is told once more."""
        while (row := self._rows.get()) is not None:
            self._backlog.add(row)
        self._rows.put(None)

    def _write(self, connection: Connection) -> None:
        """Write what is left and what comes, until the end."""
        while True:
            self._backlog.write(connection)
            self.trouble = ""
            row = self._rows.get()
            if row is None:
                return
            self._backlog.add(row)


def close_all(logs: Sequence[RowLog], *, hurry: bool) -> list[str]:
    """Write the rest of every log at the same time; return what to say of each."""
    ended_at = time.monotonic()
    for log in logs:
        log.end()
    return [log.told(hurry=hurry, ended_at=ended_at) for log in logs]
