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
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

from orchestrator.analysis.selection import newest_final
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


def tracked(row: Measurement) -> TrackedRun:
    """Return a final row for a tracker."""
    at = row.ended_at or row.recorded_at or 0.0
    settings = {name: getattr(row, name) for name in _IDENTITY}
    numbers = {field.name: getattr(row.metrics, field.name) for field in fields(Metrics)}
    numbers |= row.workload_metrics
    numbers |= {name: getattr(row, name) for name in _MEASURED}
    facts = {name: getattr(row, name) for name in _FACTS} | {
        "nightgrid.job_id": row.job_id,
        "nightgrid.experiment": row.experiment,
        "reason": row.reason or None,
        "device": row.device_name,
        "nodes": ", ".join(row.nodes) or None,
        "throughput_unit": row.metrics.throughput_unit or None,
    }
    return TrackedRun(
        attempt=f"{row.invocation_id}/{row.attempt_id}",
        name=f"{row.model} {row.precision} b={row.batch_size_requested}"[:_LONGEST],
        parameters=_texts(
            settings | {"batch_size": row.batch_size_requested}, "parameters", row.parameters
        ),
        metrics={
            name: float(value)
            for name, value in numbers.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        },
        tags=_texts(facts, "version", row.versions),
        started_at=row.started_at or at,
        ended_at=at,
        succeeded=row.state is State.SUCCEEDED,
    )


_IDENTITY = ("workload", "model", "dataset", "accelerator", "cards", "precision", "engine",
             "isolation")  # fmt: skip
_FACTS = ("state", "emulated", "random_weights", "synthetic_data", "git_commit")


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

#: Passes over the rest at the end, each over a new connection, after which it is set aside.
MOST_PASSES = 3
#: Consecutive failures that end a pass: the tracker is at fault, not the rows.
MOST_IN_A_ROW = 5
NAMED = 3


class Backlog:
    """Rows that a tracker may lack; ``rows`` may grow meanwhile."""

    def __init__(self, tracker: Tracker, destination: str, run: str, directory: Path) -> None:
        self._tracker = tracker
        self._place = (destination, run, directory)
        self._connection: Connection | None = None  # None after a failure
        self.rows: deque[Measurement] = deque()
        self._failed: list[Measurement] = []  # in this pass
        self.refusals = ""  # the number of rows set aside, with the last reason
        self.written = 0

    def write(self) -> str:
        """Try each row once; return the last reason why one failed, "" if none did. Raise
        StoreError if the tracker is unreachable."""
        destination, reason, in_a_row = self._place[0], "", 0
        self.rows += self._failed
        self._failed.clear()
        while self.rows and in_a_row < MOST_IN_A_ROW:
            if self._connection is None:
                with self._tracker.explained(destination):
                    self._connection = self._tracker.connect(*self._place)
            row = self.rows.popleft()
            try:
                with self._tracker.explained(destination):
                    run = tracked(row)
                    if not self._connection.has(run.attempt):
                        self._connection.write(run)
                        self.written += 1
                in_a_row = 0
            except StoreError as error:
                self._connection, reason, in_a_row = None, str(error), in_a_row + 1
                self._failed.append(row)
                # Refused rows tend to be neighbours, so continue amid the others.
                self.rows.rotate(len(self.rows) // 2)
        return reason

    def finish(self) -> None:
        """Write the rest, and set aside what fails. Raise StoreError as ``write``."""
        for _ in range(MOST_PASSES):
            written = self.written
            if not (reason := self.write()):
                return
            if self.rows and self.written == written:
                reason += f"; {MOST_IN_A_ROW} in a row failed, so no more were tried"
                break
        refused = list(dict.fromkeys(row.job_id for row in (*self._failed, *self.rows)))
        named = ", ".join(refused[:NAMED]) + ", …" * (len(refused) > NAMED)
        self.refusals = f"{len(refused)} set aside ({named}): {reason}"


#: Seconds until a failed tracker is retried.
AGAIN_S = 30.0
#: Seconds to write the rest at the end, and when in a hurry.
REST_S = 120.0
HURRIED_S = 10.0


class RowLog(Backlog):
    """Background writer of final rows, existing ones first. Rows are on disk already, so
    ``nightgrid export`` can add what the tracker lacks."""

    def __init__(
        self, store: Store, tracker: Tracker, destination: str, again_s: float = AGAIN_S
    ) -> None:
        super().__init__(tracker, destination, store.run, store.path)
        self._store = store
        self._again_s = again_s
        self._came, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="row log", daemon=True)
        self.trouble = ""

    def start(self) -> None:
        """Write rows until ``end``."""
        self._thread.start()

    def take(self, row: Measurement) -> bool:
        """Queue a row if it is final; return whether it is."""
        if row.final:
            self.rows.append(replace(row, samples=(), items=(), image=None))
            self._came.set()
        return row.final

    def end(self) -> None:
        """Ask the thread to end after writing the rest."""
        self._ended.set()
        self._came.set()

    def outcome(self, *, hurry: bool, ended_at: float) -> str:
        """Wait for the end, requested at ``ended_at`` (monotonic); return a message."""
        wait_s = HURRIED_S if hurry or self.trouble else REST_S
        self._thread.join(max(0.0, ended_at + wait_s - time.monotonic()))
        destination = self._place[0]
        where = f"{self._tracker.title} at {destination}"
        late = f"{where}: it takes longer than {wait_s:g} s" if self._thread.is_alive() else ""
        why = "; ".join(filter(None, (self.trouble or late, self.refusals)))
        if not why:
            return f"every row is in {where}"
        command = f"nightgrid export {destination} --to {self._tracker.name}"
        return f"some rows were not logged: {why}; {command} --run {self._store.run} brings them"

    def _work(self) -> None:
        try:
            earlier = newest_final(self._store.measurements(samples=False))
            self.rows.extendleft(reversed(earlier))
            while True:
                self._came.clear()
                if self._ended.is_set():
                    break
                try:
                    self.trouble = self.write()
                except StoreError as error:
                    self.trouble = str(error)
                if self.trouble:
                    self._ended.wait(self._again_s)
                else:
                    self._came.wait()
            self.finish()
            self.trouble = ""
        except StoreError as error:
            self.trouble = str(error)


def close_all(logs: Sequence[RowLog], *, hurry: bool) -> list[str]:
    """Write the rest of all logs in parallel; return a message for each."""
    ended_at = time.monotonic()
    for log in logs:
        log.end()
    return [log.outcome(hurry=hurry, ended_at=ended_at) for log in logs]
