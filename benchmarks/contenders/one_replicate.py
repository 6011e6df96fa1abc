"""One replicate of a grid in this fresh process: every cell once, on a worker as a run has it.

``one_replicate.py GRID REPLICATE SEED OUT``: writes the rows as Parquet to OUT.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.contender import serve
from orchestrator.domain.attempt import Attempt, Outcome
from orchestrator.domain.events import RecordRow
from orchestrator.domain.job import Accelerator, Job, State
from orchestrator.domain.measurement import Measurement
from orchestrator.domain.topology import Card
from orchestrator.grid.reader import load_grid
from orchestrator.results.derive import measurement_of
from orchestrator.results.schema import to_table
from orchestrator.scheduling.replicates import drawn
from orchestrator.worker.card_worker import CardWorker, WorkerConfig

CARD = Card(node_id="here", index=0, accelerator=Accelerator("CPU"))


def main() -> None:
    """Be ready with a worker that has its card; a turn runs all cells."""
    grid, replicate, seed, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    jobs = [replace(j, replicate=replicate) for j in load_grid(grid).jobs() if j.replicate == 1]
    jobs.sort(key=lambda job: drawn(seed, job.job_id))
    config = WorkerConfig(worker_id="one", card=CARD, node_name="here", emulated=False, threads=1)
    worker = CardWorker(config)
    worker.start()

    def turn() -> Mapping[str, Any]:
        rows = [_row(worker, job, seed) for job in jobs]
        pq.write_table(to_table(rows), out)
        return {"work": len(rows)}

    serve(turn)


def _row(worker: CardWorker, job: Job, seed: int) -> Measurement:
    attempt = Attempt(
        attempt_id=f"{job.job_id}-1", job_id=job.job_id, number=1, job=job, cards=(CARD,)
    )
    rank = worker.run(attempt)
    if rank.state is not State.SUCCEEDED:
        raise RuntimeError(f"{job.label}: {rank.failure}")
    outcome = Outcome(attempt_id=attempt.attempt_id, state=rank.state, ranks=(rank,))
    record = RecordRow(
        job=job, state=rank.state, reason="", final=True, attempt=attempt, outcome=outcome
    )
    return measurement_of(
        record, run=f"run-{seed}", invocation_id=str(seed), recorded_at=time.time()
    )


if __name__ == "__main__":
    main()
