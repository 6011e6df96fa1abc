"""A job, its earlier row and a worker for tests that care for a few of their fields."""

from __future__ import annotations

from typing import Any

from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.outcome import WorkerInfo
from orchestrator.core.plan import PastRow
from workloads.base import Sample

_JOB: dict[str, Any] = {
    "experiment": "case",
    "workload": "text-generation",
    "model": "tiny-chatglm3",
    "dataset": "advertisegen-synthetic",
    "accelerator": Accelerator.HPU,
    "cards": 1,
    "precision": "fp32",
    "batch_size": 1,
}
_WORKER: dict[str, Any] = {
    "worker_id": "w",
    "node_name": "hpu-1",
    "pid": 4711,
    "device_name": "emulated HPU on CPU",
    "driver_version": "",
    "emulated": True,
    "visible_cards": "0",
    "threads": 1,
    "niceness": 0,
}


_SAMPLE: dict[str, Any] = {
    "repeat": 0,
    "batch": 0,
    "warmup": False,
    "complete": True,
    "wall_s": 1.0,
    "cpu_s": 0.5,
    "items": 4,
    "input_tokens": 40,
    "output_tokens": 100,
    "computed_tokens": 160,
}


def a_sample(**changes: Any) -> Sample:
    return Sample(**(_SAMPLE | changes))


def a_job(**changes: Any) -> Job:
    """A one-card text-generation job; ``changes`` are fields of ``Job``."""
    return Job(**(_JOB | changes))


def a_past_row(of: Job, busy_s: float | None = 3.0, **changes: Any) -> PastRow:
    """A successful final row of a job on an emulated card; the model was loaded already."""
    fields: dict[str, Any] = {
        "job_id": of.job_id,
        "state": State.SUCCEEDED,
        "final": True,
        "emulated": True,
        "workload": of.workload,
        "model": of.model,
        "precision": of.precision,
        "batch_size": of.batch_size,
        "accelerator": of.accelerator,
        "cards": of.cards,
        "parameters": of.parameters,
        "busy_s": busy_s,
        "load_s": 0.0,
    }
    return PastRow(**(fields | changes))


def a_worker(**changes: Any) -> WorkerInfo:
    """The statement of a worker on an emulated card."""
    return WorkerInfo(**(_WORKER | changes))


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now
