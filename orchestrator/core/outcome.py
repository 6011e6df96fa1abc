"""Attempts (one try at a job on given cards), their outcomes and classes of failure.

A failure inside an attempt is never an exception of ``errors.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from orchestrator.core.job import Job, State
from orchestrator.core.readings import Energy, ProcessorUse, Turn
from orchestrator.core.topology import CardSet
from workloads import base
from workloads.base import Result


class FailureClass(str, Enum):
    """Each class has a row and a policy (``retry.py``)."""

    OUT_OF_MEMORY = "out_of_memory"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    UNSUPPORTED = "unsupported"
    BAD_CONFIGURATION = "bad_configuration"
    DATA_MISSING = "data_missing"
    NODE_STORAGE = "node_storage"
    COMPILE = "compile"
    ACQUIRE = "acquire"
    CARD_FAULTY = "card_faulty"
    COLLECTIVE = "collective"
    HANG = "hang"
    CRASH = "crash"  # the process died of a signal or exit
    NODE_LOST = "node_lost"
    CANCELLED = "cancelled"  # its task, in Ray
    IMPORT = "import"
    ERROR = "error"  # an exception of no known class

    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of an attempt, as its row keeps it."""

    failure_class: FailureClass
    message: str  # one line
    tail: str = ""  # end of the traceback or of stderr
    log: str = ""  # where the whole log lies, as host:path


_BY_TYPE: tuple[tuple[type[BaseException], FailureClass], ...] = (
    (base.OutOfMemory, FailureClass.OUT_OF_MEMORY),
    (base.Unsupported, FailureClass.UNSUPPORTED),
    (base.BadConfiguration, FailureClass.BAD_CONFIGURATION),
    (base.DataMissing, FailureClass.DATA_MISSING),
    (base.NodeStorage, FailureClass.NODE_STORAGE),
    (base.CompileFailed, FailureClass.COMPILE),
    (base.CardNotAcquired, FailureClass.ACQUIRE),
    (base.CardFaulty, FailureClass.CARD_FAULTY),
    (base.CollectiveFailed, FailureClass.COLLECTIVE),
    (base.ServerSilent, FailureClass.HANG),
    (MemoryError, FailureClass.HOST_OUT_OF_MEMORY),
    (ImportError, FailureClass.IMPORT),
    (FileNotFoundError, FailureClass.DATA_MISSING),
)


def classify(exception: BaseException) -> FailureClass:
    """The failure class of an exception that a worker caught, after ``Device.classify``."""
    for kind, failure_class in _BY_TYPE:
        if isinstance(exception, kind):
            return failure_class
    return FailureClass.ERROR


#: ``probe``: does a batch size fit (``max``); ``trial``: time it roughly (``best``).
Purpose = Literal["measure", "probe", "trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try. ``job_id`` is the grid's job; in a search ``job``, which runs, has another batch
    size and timing."""

    attempt_id: str  # "<job_id>-<number>", unique in the run
    job_id: str
    number: int  # from 1
    job: Job
    cards: CardSet
    purpose: Purpose = "measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Provenance of a row: facts about a worker and its host, taken once in its process."""

    worker_id: str
    node_name: str
    pid: int
    device_name: str  # e.g. "Gaudi2", "NVIDIA H200", "AMD EPYC 9B14"
    driver_version: str
    emulated: bool
    visible_cards: str  # the value of HABANA_VISIBLE_MODULES / CUDA_VISIBLE_DEVICES
    threads: int  # OpenMP threads
    niceness: int
    cores: int | None = None  # of its host that the process may use
    versions: Mapping[str, str] = field(default_factory=dict)  # python, torch, ray, habana, …


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """Outcome of one rank of an attempt. One-card attempts have one."""

    rank: int
    state: State  # SUCCEEDED, OUT_OF_MEMORY, UNSUPPORTED, FAILED, TIMED_OUT or LOST
    started_at: float  # seconds since the epoch
    ended_at: float  # as much later as it lasted, even if the clock was set meanwhile
    result: Result | None = None
    failure: Failure | None = None
    worker: WorkerInfo | None = None
    jobs_before: int = 0  # attempts this worker had run before
    model_was_resident: bool = False
    timed: tuple[float, float] | None = None  # the timed part, on its host's monotonic clock
    energy: Energy | None = None  # of this rank's card in that part
    card_check: Mapping[str, float] | None = None  # figures of its card, if requested
    processor: ProcessorUse | None = None  # of this rank's process in that part
    turn: Turn | None = None  # None: its device shares no processors, or turns are impossible


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of an attempt, all ranks together; ``state`` is the worst of the ranks'."""

    attempt_id: str
    state: State
    ranks: tuple[RankOutcome, ...]
    failure: Failure | None = None  # of the rank that failed first

    @classmethod
    def of_rank(cls, attempt_id: str, rank: RankOutcome) -> Outcome:
        """Outcome of an attempt that has this rank's alone."""
        return cls(attempt_id=attempt_id, state=rank.state, ranks=(rank,), failure=rank.failure)

    @property
    def message(self) -> str:
        """The message of its failure; empty where it did not fail."""
        return self.failure.message if self.failure is not None else ""
