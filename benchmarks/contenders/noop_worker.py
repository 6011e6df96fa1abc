"""A worker that runs nothing: the interface of ``CardWorker``, no torch."""

from __future__ import annotations

import os
import time
from typing import Any

from orchestrator.core.events import Progress
from orchestrator.core.job import State
from orchestrator.core.outcome import Attempt, Failure, RankOutcome, WorkerInfo, classify
from orchestrator.worker.protocol import WorkerConfig
from workloads.base import Result


class NoopWorker:
    """Says at once that a job is done."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._info: WorkerInfo | None = None

    def start(self) -> WorkerInfo:
        """Nothing to start."""
        self._info = WorkerInfo(
            worker_id=self._config.worker_id,
            node_name=self._config.node_name,
            pid=os.getpid(),
            device_name="nothing",
            driver_version="",
            emulated=self._config.emulated,
            visible_cards="",
            threads=1,
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
        )
        return self._info

    def listen(self, address: str) -> Any:
        """No rendezvous."""
        return None

    def progress(self) -> Progress | None:
        """Never busy for long enough to tell."""
        return None

    def failure(self, error: BaseException) -> Failure:
        """As any worker does."""
        return Failure(failure_class=classify(error), message=str(error))

    def run(self, attempt: Attempt, rank: int, rendezvous: Any) -> RankOutcome:
        """Nothing."""
        now = time.time()
        return RankOutcome(
            rank=rank,
            state=State.SUCCEEDED,
            started_at=now,
            ended_at=time.time(),
            timed=(now, now),
            result=Result(samples=(), stop_reason="max_repeats"),
            worker=self._info,
        )
