"""Programs that follow experiments, such as MLflow: each gets one run for each job of ours.

Each file here declares one in its ``SPEC``, under the file's name; another installed package can
declare one under the entry points ``nightgrid.trackers``. ``nightgrid export --to NAME`` writes
what was measured, ``nightgrid run --log-to NAME`` every row as it comes (``trackers/live.py``).
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from orchestrator.core.errors import ExtraMissing, StoreError
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement, Metrics
from workloads.registry import Declared

# The seam of trackers: a declaration, a connection, and a job's row as such programs have it.
#
# The mapping is the same for all: settings are parameters, numbers are metrics, provenance and what
# is not real about a row (``emulated``, ``random_weights``, ``synthetic_data``) are tags.

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
            told = " ".join(self.explain(error, destination).split())
            raise StoreError(f"{self.title} at {destination}: {told:.500}") from error


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


def _parameters(row: Measurement) -> dict[str, str]:
    """The identity of the job."""
    told: dict[str, object] = {
        "workload": row.workload,
        "model": row.model,
        "dataset": row.dataset,
        "accelerator": row.accelerator,
        "cards": row.cards,
        "precision": row.precision,
        "batch_size": row.batch_size_requested,
        "engine": row.engine,
        "isolation": row.isolation,
    }
    return _texts({**told, **_prefixed("parameters", row.parameters)})


def _metrics(row: Measurement) -> dict[str, float]:
    """Every finite number that was derived or measured."""
    told = {field.name: getattr(row.metrics, field.name) for field in fields(Metrics)}
    told |= row.workload_metrics
    told |= {name: getattr(row, name) for name in _MEASURED}
    return {
        name: float(value)
        for name, value in told.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _tags(row: Measurement) -> dict[str, str]:
    """Its end, its place and versions, and what is not real about it."""
    told: dict[str, object] = {
        "nightgrid.job_id": row.job_id,
        "nightgrid.experiment": row.experiment,
        "state": row.state,
        "reason": row.reason or None,
        "emulated": row.emulated,
        "random_weights": row.random_weights,
        "synthetic_data": row.synthetic_data,
        "device": row.device_name,
        "nodes": ", ".join(row.nodes) or None,
        "throughput_unit": row.metrics.throughput_unit or None,
        "git_commit": row.git_commit,
    }
    return _texts({**told, **_prefixed("version", row.versions)})


def _prefixed(prefix: str, values: Mapping[str, object]) -> dict[str, object]:
    return {f"{prefix}.{name}": value for name, value in sorted(values.items())}


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    known = ((name, value) for name, value in values.items() if value is not None)
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)[:_LONGEST]
        for name, value in known
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
