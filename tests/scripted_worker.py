"""Workers that tests script, in a module that a worker process imports quickly: without pytest."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.events import Progress
from orchestrator.core.job import State
from orchestrator.core.outcome import Attempt, Failure, FailureClass, RankOutcome, WorkerInfo
from workloads.base import Result


class WorkloadsOwn:
    """Part of a result that no other process can read: the module of its class is missing."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("module_of_a_workload_elsewhere",)


def result_of(**details: Any) -> Result:
    return Result(samples=(), stop_reason="max_repeats", details=details)


@dataclass(frozen=True, kw_only=True)
class Script:
    """Python source of a worker; its kind and variables follow the job's."""

    name: str = "w"
    start: str = ""
    run: str = ""
    kind: str = ""
    world_size: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


class ScriptedWorker:
    """Runs the source it is configured with, which may set the ``result``."""

    def __init__(self, config: Script) -> None:
        self.config = config
        self.result: Result | None = None

    def start(self) -> WorkerInfo:
        exec(self.config.start)
        return WorkerInfo(
            worker_id=self.config.name,
            node_name="n",
            pid=os.getpid(),
            device_name="",
            driver_version="",
            emulated=True,
            visible_cards=os.environ.get("CARD", ""),
            threads=1,
            niceness=0,
            versions={"parent": str(os.getppid())},
        )

    def listen(self, address: str) -> Any:
        raise OSError(f"cannot listen on {address}")

    def run(self, attempt: Attempt, rank: int, rendezvous: Any) -> RankOutcome:
        started_at = time.time()
        exec(self.config.run)
        return RankOutcome(
            rank=rank,
            state=State.SUCCEEDED,
            started_at=started_at,
            ended_at=time.time(),
            timed=(1.0, 3.0),
            result=self.result,
        )

    def progress(self) -> Progress | None:
        return Progress(worker_id=self.config.name, attempt_id="a-1", phase="warmup")

    def failure(self, error: BaseException) -> Failure:
        return Failure(FailureClass.ERROR, str(error))
