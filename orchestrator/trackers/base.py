"""Experiment trackers, such as MLflow: each job gets a run of the tracker.

Each file here declares a tracker in its ``SPEC``; other packages use the entry point group
``nightgrid.trackers``. ``nightgrid export --to NAME`` writes measured rows, ``nightgrid run
--log-to NAME`` each row as it comes. Settings become parameters, numbers metrics, and provenance
and warnings (``emulated``, ``random_weights``, ``synthetic_data``) tags.
"""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

from orchestrator.core.errors import ExtraMissing, StoreError
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.store.store import Store
from workloads.registry import Declared

#: Most characters of a parameter or tag; servers refuse much longer ones.
_LONGEST = 500
_MEASURED = ("load_s", "compile_s", "warmup_s", "weight_bytes", "parameter_count",
             "peak_host_memory_bytes", "peak_device_memory_bytes")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A job's final row as a tracker's run; ``attempt`` identifies the row."""

    attempt: str
    name: str
    parameters: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    started_at: float  # seconds since the epoch
    ended_at: float
    succeeded: bool


class Connection(Protocol):
    """An open tracker for one run; its methods may raise anything."""

    def has(self, attempt: str) -> bool:
        """Return whether a row has been written completely."""

    def write(self, tracked: TrackedRun) -> None:
        """Write a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracker:
    """One experiment tracker."""

    name: str
    title: str
    package: str  # the imported module
    destination: str  # description of a destination, for help and errors
    variable: str  # environment variable with the default destination
    default: str = ""  # destination if neither is given; "": none
    connect: Callable[[str, str, Path], Connection]  # to a destination, for a run's name and path
    explain: Callable[[Exception, str], str]  # one-line reason and remedy of an error

    def destination_of(self, text: str) -> str:
        """Return the destination given, else the environment's, else the default.

        Raises:
            ExtraMissing: the tracker's package is not installed.
            StoreError: there is no destination.
        """
        if importlib.util.find_spec(self.package) is None:
            raise ExtraMissing(self.package, wanted_for=f"Rows in {self.title}")
        named = text or os.environ.get(self.variable) or self.default
        if not named:
            raise StoreError(
                f"{self.title}: no destination is named; give {self.destination}, or set "
                f"{self.variable}"
            )
        return named

    @contextmanager
    def explained(self, destination: str) -> Iterator[None]:
        """Convert exceptions of the tracker's own code to ``StoreError`` with a remedy."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            reason = " ".join(self.explain(error, destination).split())
            raise StoreError(f"{self.title} at {destination}: {reason:.500}") from error


def attempt_of(row: Measurement) -> str:
    """Return the ``TrackedRun.attempt`` of a row."""
    return f"{row.invocation_id}/{row.attempt_id}"


def tracked(row: Measurement) -> TrackedRun:
    """Return a final row for a tracker."""
    at = row.ended_at or row.recorded_at or 0.0
    return TrackedRun(
        attempt=attempt_of(row),
        name=f"{row.model} {row.precision} b={row.batch_size_requested}"[:_LONGEST],
        parameters=_parameters(row),
        metrics=_metrics(row),
        tags=_tags(row),
        started_at=row.started_at or at,
        ended_at=at,
        succeeded=row.state is State.SUCCEEDED,
    )


_IDENTITY = ("workload", "model", "dataset", "accelerator", "cards", "precision", "engine",
             "isolation")  # fmt: skip
_FACTS = ("state", "emulated", "random_weights", "synthetic_data", "git_commit")


def _parameters(row: Measurement) -> dict[str, str]:
    identity = {name: getattr(row, name) for name in _IDENTITY}
    return _texts(identity | {"batch_size": row.batch_size_requested}, "parameters", row.parameters)


def _metrics(row: Measurement) -> dict[str, float]:
    numbers = {field.name: getattr(row.metrics, field.name) for field in fields(Metrics)}
    numbers |= row.workload_metrics
    numbers |= {name: getattr(row, name) for name in _MEASURED}
    return {
        name: float(value)
        for name, value in numbers.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _tags(row: Measurement) -> dict[str, str]:
    facts = {name: getattr(row, name) for name in _FACTS} | {
        "nightgrid.job_id": row.job_id,
        "nightgrid.experiment": row.experiment,
        "reason": row.reason or None,
        "device": row.device_name,
        "nodes": ", ".join(row.nodes) or None,
        "throughput_unit": row.metrics.throughput_unit or None,
    }
    return _texts(facts, "version", row.versions)


def _texts(values: Mapping[str, object], prefix: str, more: Mapping[str, object]) -> dict[str, str]:
    every = {**values, **{f"{prefix}.{name}": value for name, value in sorted(more.items())}}
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)[:_LONGEST]
        for name, value in every.items()
        if value is not None
    }


TRACKERS: Declared[Tracker] = Declared("orchestrator.trackers", Tracker, "nightgrid.trackers")


def tracker_of(text: str) -> tuple[Tracker, str]:
    """Parse ``NAME`` or ``NAME=DESTINATION``.

    Raises:
        StoreError: there is no such tracker, or no destination is known.
        ExtraMissing: its package is not installed.
    """
    name, _, destination = text.partition("=")
    if name not in TRACKERS:
        raise StoreError(f"no rows can be logged to {name!r}; there is: {', '.join(TRACKERS)}")
    tracker = TRACKERS[name]
    return tracker, tracker.destination_of(destination)


# ---------------------------------------------------------------- rows on their way to a tracker

#: Failures, each over a new connection, after which a row is set aside.
MOST_FAILURES = 3
#: Consecutive failures of different rows after which no more are tried: the tracker is at fault.
MOST_IN_A_ROW = 5
NAMED = 3


class Backlog:
    """Rows that a tracker may lack; failed rows are retried after the others, then set aside."""

    def __init__(
        self,
        tracker: Tracker,
        destination: str,
        run: str,
        directory: Path,
        rows: Iterable[Measurement] = (),
    ) -> None:
        self._tracker = tracker
        self._place = (destination, run, directory)
        self._connection: Connection | None = None  # None after a failure
        self._rows = deque(rows)
        self._failed: deque[Measurement] = deque()  # to be retried after the others
        self._failures: Counter[str] = Counter()  # by attempt
        self._in_a_row: set[str] = set()  # attempts that failed since a row was written
        self._refused: dict[str, str] = {}  # the last reason, by job
        self.written = 0

    def add(self, row: Measurement) -> None:
        """Add a row behind the others."""
        self._rows.append(row)

    def flush(self) -> str:
        """Write up to the first failure; return its reason. Raise StoreError if unreachable."""
        destination = self._place[0]
        if self._connection is None:
            with self._tracker.explained(destination):
                self._connection = self._tracker.connect(*self._place)
        try:
            with self._tracker.explained(destination):
                while rows := self._rows or self._failed:
                    if not self._connection.has(attempt_of(rows[0])):
                        self._connection.write(tracked(rows[0]))
                        self.written += 1
                        self._in_a_row.clear()
                    rows.popleft()
        except StoreError as error:
            self._connection = None
            self._put_back((self._rows or self._failed).popleft(), str(error))
            return str(error)
        return ""

    def _put_back(self, row: Measurement, reason: str) -> None:
        """Queue a failed row behind the others, or set it aside."""
        attempt = attempt_of(row)
        self._failures[attempt] += 1
        self._in_a_row.add(attempt)
        if self._failures[attempt] < MOST_FAILURES:
            self._failed.append(row)
        else:
            self._refused[row.job_id] = reason
        # Refused rows tend to be neighbours, so continue at the other end or the middle.
        if len(self._in_a_row) > 1:
            self._rows.reverse()
        if len(self._in_a_row) == 3:
            self._rows.rotate(len(self._rows) // 2)

    @property
    def hopeless(self) -> bool:
        """Return whether so many rows failed in a row that the tracker must refuse all."""
        return len(self._in_a_row) >= MOST_IN_A_ROW

    def try_anew(self) -> None:
        """Reset the count of consecutive failures."""
        self._in_a_row.clear()

    def give_up(self, reason: str) -> None:
        """Set all remaining rows aside."""
        reason += f"; {len(self._in_a_row)} in a row failed, so no more were tried"
        for rows in (self._failed, self._rows):
            self._refused |= dict.fromkeys((row.job_id for row in rows), reason)
            rows.clear()

    @property
    def refusals(self) -> str:
        """The number of rows set aside, with the last reason; "" if there are none."""
        refused = dict(self._refused)  # another thread may still add to it
        if not refused:
            return ""
        named = ", ".join(list(refused)[:NAMED]) + (", …" if len(refused) > NAMED else "")
        return f"{len(refused)} set aside ({named}): {list(refused.values())[-1]}"


def write_rows(
    tracker: Tracker, destination: str, run: str, directory: Path, rows: Iterable[Measurement]
) -> Backlog:
    """Write a run's missing final rows. Raise StoreError if the tracker is unreachable."""
    backlog = Backlog(tracker, destination, run, directory, rows)
    while reason := backlog.flush():
        if backlog.hopeless:
            backlog.give_up(reason)
            break
    return backlog


#: Seconds until a failed tracker is retried.
AGAIN_S = 30.0
#: Seconds to write the rest at the end, and when in a hurry.
REST_S = 120.0
HURRIED_S = 10.0


class RowLog:
    """Background writer of final rows, existing ones first. Rows are on disk already, so
    ``nightgrid export`` can add what the tracker lacks."""

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
        self._backlog = Backlog(tracker, destination, store.run, store.path)
        self.trouble = ""

    def start(self) -> None:
        """Write rows until ``end``."""
        self._thread.start()

    def take(self, row: Measurement) -> bool:
        """Queue a row if it is final; return whether it is."""
        if row.final:
            self._rows.put(replace(row, samples=(), items=(), image=None))
        return row.final

    def end(self) -> None:
        """Ask the thread to end after writing the rest."""
        self._rows.put(None)
        self._ending.set()

    def outcome(self, *, hurry: bool, ended_at: float) -> str:
        """Wait for the end, requested at ``ended_at`` (monotonic); return a message."""
        wait_s = HURRIED_S if hurry or self.trouble else REST_S
        self._thread.join(max(0.0, ended_at + wait_s - time.monotonic()))
        where = f"{self._tracker.title} at {self._destination}"
        late = f"{where}: it takes longer than {wait_s:g} s" if self._thread.is_alive() else ""
        why = "; ".join(filter(None, (self.trouble or late, self._backlog.refusals)))
        if not why:
            return f"every row is in {where}"
        command = f"nightgrid export {self._destination} --to {self._tracker.name}"
        return f"some rows were not logged: {why}; {command} --run {self._store.run} brings them"

    def _work(self) -> None:
        from orchestrator.analysis.selection import newest_final

        backlog, ended = self._backlog, False
        try:
            for row in newest_final(self._store.measurements(samples=False)):
                backlog.add(row)
        except StoreError as error:
            self.trouble = str(error)
            return
        while True:
            written, reached = backlog.written, True
            try:
                self.trouble = backlog.flush()
            except StoreError as error:
                self.trouble, reached = str(error), False
            if ended and backlog.hopeless:
                backlog.give_up(self.trouble)
                self.trouble = ""  # the rows' messages include it
            if ended and not (self.trouble and reached):
                return
            if ended or (self.trouble and backlog.written > written):
                continue  # the connection worked until this row came
            if self.trouble:  # a tracker that refuses all rows is retried only at the end
                self._ending.wait(None if backlog.hopeless else self._again_s)
            ended = self._add_new(wait=not self.trouble)
            if ended:
                backlog.try_anew()

    def _add_new(self, *, wait: bool) -> bool:
        """Add new rows, or wait for one; return whether they were the last."""
        while True:
            try:
                row = self._rows.get(block=wait)
            except queue.Empty:
                return False
            if row is None:
                return True
            self._backlog.add(row)
            wait = False


def close_all(logs: Sequence[RowLog], *, hurry: bool) -> list[str]:
    """Write the rest of all logs in parallel; return a message for each."""
    ended_at = time.monotonic()
    for log in logs:
        log.end()
    return [log.outcome(hurry=hurry, ended_at=ended_at) for log in logs]
