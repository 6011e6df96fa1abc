"""Replicates of a grid: each turn runs every cell once, on a worker in a process of its own.

``replicates.py GRID REPLICATES OUT FIRST``: turns are numbered from FIRST; turn n is replicate
n % REPLICATES + 1 of run n // REPLICATES and writes its rows to OUT/rows-n.parquet, and the
processor's passport to OUT/turn-n. As in a run, processes are forked from one that has imported the
libraries and computed nothing.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.contender import serve
from orchestrator.core.card_check import Passport
from orchestrator.core.events import RecordRow
from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.measurement import Measurement
from orchestrator.core.outcome import Attempt, Outcome
from orchestrator.core.topology import Card
from orchestrator.grid.parser import load_grid
from orchestrator.results import paths
from orchestrator.results.derive import measurement_of
from orchestrator.results.passports import passports_table
from orchestrator.results.tables import to_table
from orchestrator.scheduler.queues import drawn
from orchestrator.worker import card_worker
from orchestrator.worker.acquisition import WorkerConfig
from orchestrator.worker.card_worker import CardWorker
from orchestrator.worker.host_server import PRELOAD
from orchestrator.worker.process_server import preload
from orchestrator.worker.turns import turn as turn_of_host
from workloads.bench.card_check import check_card
from workloads.devices import device_for

CARD = Card(node_id="here", index=0, accelerator=Accelerator("CPU"))


def main() -> None:
    """Be ready; a turn is a process."""
    preload(PRELOAD)
    replicates, out = int(sys.argv[2]), Path(sys.argv[3])
    jobs = [job for job in load_grid(sys.argv[1]).jobs() if job.replicate == 1]
    turns = itertools.count(int(sys.argv[4]))
    # Turns among its own processes alone: in the host's queue it would wait for other runs, and
    # what it loses to them without is in the rows.
    card_worker.turn = partial(turn_of_host, paths=(out / "turns.lock",))  # type: ignore[assignment]

    def turn() -> Mapping[str, Any]:
        number = next(turns)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run, replicate = divmod(number, replicates)
                rows, passport = _rows(jobs, run, replicate + 1)
                (directory := out / f"turn-{number}").mkdir(exist_ok=True)
                (directory / paths.PASSPORTS).write_bytes(passports_table([passport]))
                pq.write_table(to_table(rows), unnamed := out / "rows.partial")
                unnamed.rename(out / f"rows-{number}.parquet")
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"turn {number} ended with {status}")
        return {"work": len(jobs)}

    serve(turn)


def _rows(jobs: list[Job], run: int, replicate: int) -> tuple[list[Measurement], Passport]:
    """The rows of all cells, in an order that the run's seed draws, and the processor's passport
    before them; a model is loaded once."""
    mine = sorted(
        (replace(job, replicate=replicate) for job in jobs),
        key=lambda job: (drawn(run, f"{job.residency_key}|{replicate}"), drawn(run, job.job_id)),
    )
    config = WorkerConfig(worker_id="one", card=CARD, node_name="here", emulated=False, threads=1)
    worker = CardWorker(config)
    info = worker.start()
    passport = Passport(
        run=str(run),
        taken_at=time.time(),
        node=info.node_name,
        card_index=CARD.index,
        accelerator=str(CARD.accelerator),
        device_name=info.device_name,
        emulated=False,
        threads=info.threads,
        **check_card(device_for(CARD.accelerator.device)),
    )
    return [_row(worker, job, run) for job in mine], passport


def _row(worker: CardWorker, job: Job, run: int) -> Measurement:
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
    return measurement_of(record, run=f"run-{run}", invocation_id=str(run), recorded_at=time.time())


if __name__ == "__main__":
    main()
