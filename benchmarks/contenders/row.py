"""Believable rows: jobs of 5 repeats with 25 decoding steps each, no two times alike."""

from __future__ import annotations

import random
import time

from orchestrator.core.events import RecordRow
from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.measurement import Measurement
from orchestrator.core.outcome import Attempt, Outcome, RankOutcome
from orchestrator.core.topology import Card
from orchestrator.results.derive import measurement_of
from workloads.base import Item, Result, Sample


def row(number: int) -> Measurement:
    """The row of the job of this number."""
    job = Job(
        experiment="night",
        workload="text-generation",
        model="m",
        dataset=str(number),
        accelerator=Accelerator.HPU,
        cards=1,
        precision="bf16",
        batch_size=8,
    )
    card = Card(node_id="n1", index=0, accelerator=Accelerator.HPU)
    attempt = Attempt(
        attempt_id=f"{job.job_id}-1", job_id=job.job_id, number=1, job=job, cards=(card,)
    )
    chance = random.Random(number)
    samples = tuple(
        Sample(
            repeat=repeat,
            batch=0,
            warmup=repeat == 0,
            complete=True,
            wall_s=chance.uniform(0.9, 1.1),
            cpu_s=1.0,
            items=8,
            input_tokens=800,
            output_tokens=200,
            computed_tokens=1200,
            ttft_s=chance.uniform(0.09, 0.11),
            step_s=tuple(chance.uniform(0.03, 0.04) for _ in range(25)),
        )
        for repeat in range(5)
    )
    items = tuple(
        Item(
            index=index,
            input_tokens=100,
            output_tokens=25,
            latency_s=chance.uniform(0.9, 1.1),
            ttft_s=0.1,
        )
        for index in range(8)
    )
    now = time.time()
    rank = RankOutcome(
        rank=0,
        state=State.SUCCEEDED,
        started_at=now - 30,
        ended_at=now,
        result=Result(samples=samples, items=items, stop_reason="max_repeats"),
    )
    record = RecordRow(
        job=job,
        state=State.SUCCEEDED,
        reason="",
        final=True,
        attempt=attempt,
        outcome=Outcome(attempt_id=attempt.attempt_id, state=State.SUCCEEDED, ranks=(rank,)),
    )
    return measurement_of(record, run="night", invocation_id="bench", recorded_at=now)
