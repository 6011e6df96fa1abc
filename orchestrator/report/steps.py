"""Shares of a training step's time, by its parts, from the row's raw samples. Pure.

Forward, backward, optimizer and data follow each other; what is left of the wall time is between
them. Waiting for other cards happens inside of these parts and is told beside them, not added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from workloads.base import Sample

#: Parts that follow each other in a step, in this order; fields of ``workloads.base.Sample``.
PARTS = ("data_s", "forward_s", "backward_s", "optimizer_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Shares (0 to 1) of the timed steps' wall time, all ranks together. None: not known."""

    row: Measurement
    step_s: float  # mean wall time of a step
    data: float | None
    forward: float | None
    backward: float | None
    optimizer: float | None
    communication: float | None  # within the others: waiting for cards that computing did not hide


def step_times_of(rows: Sequence[Measurement]) -> tuple[StepTime, ...]:
    """One entry for each succeeded row that trained, in the order of the rows."""
    found = (_step_time(row) for row in rows if row.state is State.SUCCEEDED)
    return tuple(one for one in found if one is not None)


def _step_time(row: Measurement) -> StepTime | None:
    timed = [sample for _, sample in row.samples if not sample.warmup]
    wall_s = math.fsum(sample.wall_s for sample in timed)
    if not wall_s or all(sample.forward_s is None for sample in timed):
        return None
    data, forward, backward, optimizer = (_share(timed, part, wall_s) for part in PARTS)
    return StepTime(
        row=row,
        step_s=wall_s / len(timed),
        data=data,
        forward=forward,
        backward=backward,
        optimizer=optimizer,
        communication=_share(timed, "communication_s", wall_s),
    )


def _share(samples: Sequence[Sample], part: str, wall_s: float) -> float | None:
    times: list[float | None] = [getattr(sample, part) for sample in samples]
    known = [time for time in times if time is not None]
    return math.fsum(known) / wall_s if len(known) == len(times) else None
