"""An attempt is one try at a job on given cards; an outcome is what a worker says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.cluster import CardSet
from orchestrator.energy import Energy
from orchestrator.failure import Failure
from orchestrator.job import Job, State
from workloads.api import Result

#: ``probe`` asks only whether a batch size fits (``batch_size: max``); ``measure`` is the real one.
Purpose = Literal["measure", "probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try. ``job_id`` is the grid's job; ``job`` is what runs, which differs from it only in
    ``batch_size`` when the grid asked for ``max``."""

    attempt_id: str  # "<job_id>-<number>", unique in the run
    job_id: str
    number: int  # from 1
    job: Job
    cards: CardSet
    purpose: Purpose = "measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker is and had, taken once in its process: the row's provenance."""

    worker_id: str
    node_name: str
    pid: int
    device_name: str  # e.g. "Gaudi2", "NVIDIA H200", "AMD EPYC 9B14"
    driver_version: str
    emulated: bool
    visible_cards: str  # the value of HABANA_VISIBLE_MODULES / CUDA_VISIBLE_DEVICES
    threads: int  # OpenMP threads
    niceness: int
    versions: Mapping[str, str] = field(default_factory=dict)  # python, torch, ray, habana, …


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """How one rank of an attempt ended. One-card attempts have one."""

    rank: int
    state: State  # SUCCEEDED, OUT_OF_MEMORY, UNSUPPORTED, FAILED, TIMED_OUT or LOST
    started_at: float  # seconds since the epoch
    ended_at: float
    result: Result | None = None
    failure: Failure | None = None
    worker: WorkerInfo | None = None
    jobs_before: int = 0  # attempts this worker had run before
    model_was_resident: bool = False
    timed: tuple[float, float] | None = None  # start and end of the timed part, epoch seconds
    energy: Energy | None = None  # of this rank's card in that part


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended, all ranks together; ``state`` is the worst of the ranks'."""

    attempt_id: str
    state: State
    ranks: tuple[RankOutcome, ...]
    failure: Failure | None = None  # of the rank that failed first
