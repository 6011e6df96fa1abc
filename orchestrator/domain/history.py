"""Earlier rows, in the few fields that planning and estimating need."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.domain.job import Accelerator, Scalar, State

#: Detail of a row that names the savings of what its job took by name.
TOOK = "took"


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRow:
    """One earlier attempt."""

    job_id: str
    state: State
    final: bool
    emulated: bool
    workload: str
    model: str
    precision: str
    batch_size: int | None
    accelerator: Accelerator
    cards: int
    busy_s: float | None  # from start to end of the attempt
    took: str = ""  # savings of what it took by name
    load_s: float | None
    queued_s: float | None = None  # of busy_s, waiting for a turn on processors that others use
    reason: str = ""
    attempt_number: int = 0  # 0 when the job never ran
    parameters: tuple[tuple[str, Scalar], ...] = ()  # the workload's own, sorted by name
