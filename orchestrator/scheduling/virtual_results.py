"""Outcomes of simulated attempts, and their results as far as searches for a batch size read them.
Pure.

Throughput rises with the batch size to a peak that each work has at another size, and falls after
it; memory is a line that meets the card's limit where batches cease to fit.
"""

from __future__ import annotations

from math import exp, log2
from random import Random

from orchestrator.core.job import Job, State
from orchestrator.core.outcome import Failure, Outcome, RankOutcome, WorkerInfo
from workloads.base import Result, Sample

_FIXED, _LIMIT = 2 * 10**9, 10**11  # bytes: of the weights, and of a card
_REPEATS = 3


def simulated_result(job: Job, fits_up_to: int | None, noise: float, random: Random) -> Result:
    """The result of an attempt at ``job``, with this much noise in its throughput."""
    assert isinstance(job.batch_size, int)
    rate = true_rate(job)
    samples = tuple(
        Sample(
            repeat=repeat,
            batch=0,
            warmup=False,
            complete=True,
            wall_s=job.batch_size / (rate * exp(random.gauss(0.0, noise))),
            cpu_s=0.0,
            items=job.batch_size,
            input_tokens=job.batch_size,
            output_tokens=job.batch_size,
            computed_tokens=job.batch_size,
        )
        for repeat in range(_REPEATS)
    )
    per_item = (_LIMIT - _FIXED) / ((fits_up_to or 4096) + 0.5)
    return Result(
        samples=samples,
        stop_reason="max_repeats",
        peak_device_memory_bytes=int(_FIXED + per_item * job.batch_size),
        details={"card_memory_bytes": str(_LIMIT)},
    )


def true_rate(job: Job) -> float:
    """Throughput of a job without noise: one peak, between batch sizes 4 and 512."""
    assert isinstance(job.batch_size, int)
    work = (job.workload, job.model, job.dataset, job.precision, job.parameters)
    peak = Random(repr(work)).uniform(2.0, 9.0)
    away = log2(job.batch_size) - peak
    return 1000.0 * exp(-0.1 * away * away)


def outcome_of(
    attempt_id: str,
    state: State,
    width: int,
    started_at: float,
    ended_at: float,
    failure: Failure | None = None,
    failed_rank: int = 0,
) -> Outcome:
    """The outcome of an attempt on ``width`` cards; times are seconds. Ranks that did well are left
    out of a failed gang's outcome, as when they are killed."""
    ranks = range(width) if failure is None else [failed_rank]
    return Outcome(
        attempt_id=attempt_id,
        state=state,
        failure=failure,
        ranks=tuple(
            RankOutcome(
                rank=rank, state=state, started_at=started_at, ended_at=ended_at, failure=failure
            )
            for rank in ranks
        ),
    )


WORKER_INFO = WorkerInfo(
    worker_id="simulated",
    node_name="simulated",
    pid=0,
    device_name="simulated",
    driver_version="",
    emulated=True,
    visible_cards="",
    threads=1,
    niceness=0,
)
