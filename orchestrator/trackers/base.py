"""Programs that follow experiments, such as MLflow: each gets one run for each job of ours.

Each file here declares one in its ``SPEC``, under the file's name; another installed package can
declare one under the entry points ``nightgrid.trackers``. ``nightgrid export --to NAME`` writes
what was measured, ``nightgrid run --log-to NAME`` every row as it comes.

The mapping is the same for all: settings are parameters, numbers are metrics, provenance and what
is not real about a row (``emulated``, ``random_weights``, ``synthetic_data``) are tags.
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

#: Characters of a parameter or tag; servers refuse much longer ones.
_LONGEST = 500
_MEASURED = ("load_s", "compile_s", "warmup_s", "weight_bytes", "parameter_count",
             "peak_host_memory_bytes", "peak_device_memory_bytes")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A job's final row as a run of a tracker. ``attempt`` tells it from every other row."""

    attempt: str
    name: str
    parameters: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    started_at: float  # seconds since the epoch
    ended_at: float
    succeeded: bool


class Connection(Protocol):
    """A tracker that is being written to, for one run of ours. Its methods may raise anything."""

    def has(self, attempt: str) -> bool:
        """Return whether a row is there already, and whole."""

    def write(self, tracked: TrackedRun) -> None:
        """Write a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracker:
    """One program that follows experiments.

    Attributes:
        name: as commands write it.
        title: as people write it.
        package: the module that is imported for it; ``extra`` of ours installs it.
        destination: what a destination is, for helps and errors.
        variable: of the environment, with the destination where none is named.
        default: the destination where neither is given; "": there is none.
        connect: opens the tracker for a run, given the destination, the run's name and directory.
        explain: says in one line why an error came, and what would be right.
    """

    name: str
    title: str
    package: str
    extra: str
    destination: str
    variable: str
    default: str = ""
    connect: Callable[[str, str, Path], Connection]
    explain: Callable[[Exception, str], str]

    def destination_of(self, text: str) -> str:
        """The destination that a text names, or the environment, or the default.

        Raises:
            ExtraMissing: the tracker's package is not installed.
            StoreError: none of them names one.
        """
        if importlib.util.find_spec(self.package) is None:
            raise ExtraMissing(self.package, extra=self.extra, wanted_for=f"Rows in {self.title}")
        named = text or os.environ.get(self.variable) or self.default
        if not named:
            raise StoreError(
                f"{self.title}: no destination is named; give {self.destination}, or set "
                f"{self.variable}"
            )
        return named

    @contextmanager
    def explained(self, destination: str) -> Iterator[None]:
        """Turn whatever the tracker's own code raises into a message.

        Raises:
            StoreError: with the tracker, the destination, the reason and the way out.
        """
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            reason = " ".join(self.explain(error, destination).split())
            raise StoreError(f"{self.title} at {destination}: {reason:.500}") from error


def attempt_of(row: Measurement) -> str:
    """The ``TrackedRun.attempt`` of a row."""
    return f"{row.invocation_id}/{row.attempt_id}"


def tracked(row: Measurement) -> TrackedRun:
    """A final row, for a tracker."""
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


#: Columns that are the identity of a job, and those that say where and of what a row is.
_IDENTITY = (
    *("workload", "model", "dataset", "accelerator", "cards", "precision", "engine"),
    "isolation",
)
_FACTS = ("state", "emulated", "random_weights", "synthetic_data", "git_commit")


def _parameters(row: Measurement) -> dict[str, str]:
    """The identity of the job."""
    identity = {name: getattr(row, name) for name in _IDENTITY}
    return _texts(identity | {"batch_size": row.batch_size_requested}, "parameters", row.parameters)


def _metrics(row: Measurement) -> dict[str, float]:
    """Every finite number that was derived or measured."""
    numbers = {field.name: getattr(row.metrics, field.name) for field in fields(Metrics)}
    numbers |= row.workload_metrics
    numbers |= {name: getattr(row, name) for name in _MEASURED}
    return {
        name: float(value)
        for name, value in numbers.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _tags(row: Measurement) -> dict[str, str]:
    """Its end, its place and versions, and what is not real about it."""
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
    """Values as text, and more under a prefix; what is not known is left out."""
    every = {**values, **{f"{prefix}.{name}": value for name, value in sorted(more.items())}}
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)[:_LONGEST]
        for name, value in every.items()
        if value is not None
    }


#: Every tracker by name.
TRACKERS: Declared[Tracker] = Declared("orchestrator.trackers", Tracker, "nightgrid.trackers")


def tracker_of(text: str) -> tuple[Tracker, str]:
    """The tracker and the destination that ``NAME`` or ``NAME=DESTINATION`` names.

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
#: Different rows that fail with none written between them, after which the others are not tried:
#: it is the tracker, and thousands of new connections would bring none of them.
MOST_IN_A_ROW = 5
#: Rows set aside that are named; the others are counted.
NAMED = 3


class Backlog:
    """The rows that a tracker may lack. One that it refuses holds up no other: it is tried again
    after them, and set aside when it has failed too often.

    Args:
        tracker: where rows go; ``destination`` is of it, see ``Tracker.destination_of``.
        run: name of the run, whose files lie in ``directory``.
        rows: the first ones.
    """

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
        self._connection: Connection | None = None  # until something fails
        self._rows = deque(rows)
        self._failed: deque[Measurement] = deque()  # tried again after those
        self._failures: Counter[str] = Counter()  # by attempt
        self._in_a_row: set[str] = set()  # attempts that failed since a row was written
        self._refused: dict[str, str] = {}  # the last reason, by job
        self.written = 0

    def add(self, row: Measurement) -> None:
        """Add a row behind the others."""
        self._rows.append(row)

    def flush(self) -> str:
        """Write the rows that are not there yet, up to the first that fails; return the reason, ""
        without one.

        Raises:
            StoreError: the tracker cannot be reached.
        """
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
        """Have a row that failed tried again after the others, or set it aside."""
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

    def try_anew(self) -> None:
        """Count anew the rows that fail in a row."""
        self._in_a_row.clear()

    def give_up(self, reason: str) -> None:
        """Set every row aside."""
        reason += f"; {len(self._in_a_row)} in a row failed, so no more were tried"
        for rows in (self._failed, self._rows):
            self._refused |= dict.fromkeys((row.job_id for row in rows), reason)
            rows.clear()

    @property
    def refusals(self) -> str:
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
    backlog = Backlog(tracker, destination, run, directory, rows)
    while reason := backlog.flush():
        if backlog.hopeless:
            backlog.give_up(reason)
            break
    return backlog


#: Seconds until a tracker that failed is tried again.
AGAIN_S = 30.0
#: Seconds in which the rest is written at the end, and where something hurries.
REST_S = 120.0
HURRIED_S = 10.0


class RowLog:
    """Writes the final rows of one run to one tracker as they come, in a thread of its own: nothing
    waits for it. Rows are on disk before they come here, so ``nightgrid export`` brings what the
    tracker lacks at the end.

    Args:
        store: the run; rows that it has already go there first, some of which may be missing.
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
        self._backlog = Backlog(tracker, destination, store.run, store.path)
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
        self._rows.put(None)
        self._ending.set()

    def close(self, *, hurry: bool = False) -> str:
        """Write the rest, if that does not take too long; return what to say of it."""
        return close_all([self], hurry=hurry)[0]

    def outcome(self, *, hurry: bool, ended_at: float) -> str:
        """Wait for the end, which was asked for at that time (monotonic); return what to say."""
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
                self.trouble = ""  # what is said of the rows has it
            if ended and not (self.trouble and reached):
                return
            if ended or (self.trouble and backlog.written > written):
                continue  # the connection worked until this row came
            if self.trouble:  # a tracker that refuses any row is left alone until the end
                self._ending.wait(None if backlog.hopeless else self._again_s)
            ended = self._add_new(wait=not self.trouble)
            if ended:
                backlog.try_anew()

    def _add_new(self, *, wait: bool) -> bool:
        """Add the rows that came, or wait for one; return whether these were the last."""
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
    """Write the rest of every log at the same time; return what to say of each."""
    ended_at = time.monotonic()
    for log in logs:
        log.end()
    return [log.outcome(hurry=hurry, ended_at=ended_at) for log in logs]
