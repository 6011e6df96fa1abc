"""A worker that times the work of the package ``planted``, without torch: it starts at once."""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import replace
from typing import Any

from orchestrator.core.job import State
from orchestrator.core.outcome import Attempt, RankOutcome, WorkerInfo
from orchestrator.worker.protocol import WorkerConfig
from workloads.base import Result, whole_sample

#: Repeats of a process.
REPEATS = 20
#: Of the wheels: 0.01 s of a core.
SOURCE = """
def work():
    total = 0
    for number in range({steps}):
        total += number * number
    return total
"""
STEPS = 250_000


class PlantedWorker:
    """Runs ``planted.work`` in place of every job."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config

    def start(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self.config.worker_id,
            node_name=self.config.node_name,
            pid=os.getpid(),
            device_name="",
            driver_version="",
            emulated=True,
            visible_cards="",
            threads=1,
            niceness=0,
        )

    def run(self, attempt: Attempt, rank: int, rendezvous: Any) -> RankOutcome:
        planted = importlib.import_module("planted")
        samples = []
        for repeat in range(REPEATS):
            wall, processor = time.perf_counter(), time.process_time()
            planted.work()
            sample = whole_sample(
                wall_s=time.perf_counter() - wall,
                cpu_s=time.process_time() - processor,
                items=1,
                input_tokens=1,
            )
            samples.append(replace(sample, repeat=repeat))
        return RankOutcome(
            rank=rank,
            state=State.SUCCEEDED,
            started_at=0.0,
            ended_at=1.0,
            result=Result(samples=tuple(samples), stop_reason="max_repeats"),
        )

    def progress(self) -> None:
        return None

    def failure(self, error: Exception) -> None:
        raise error
