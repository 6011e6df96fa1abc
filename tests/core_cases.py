"""A job and a worker for tests that care for a few of their fields."""

from __future__ import annotations

from typing import Any

from orchestrator.core.job import Accelerator, Job
from orchestrator.core.outcome import WorkerInfo

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


def a_job(**changes: Any) -> Job:
    """A one-card text-generation job; ``changes`` are fields of ``Job``."""
    return Job(**(_JOB | changes))


def a_worker(**changes: Any) -> WorkerInfo:
    """The statement of a worker on an emulated card."""
    return WorkerInfo(**(_WORKER | changes))
