"""Workers that tests script, in a module that a worker process imports quickly: without pytest."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.core.events import Progress
from orchestrator.core.job import State
from orchestrator.core.outcome import Attempt, Failure, FailureClass, RankOutcome, WorkerInfo
from workloads.base import Result


class WorkloadsOwn:
    """Part of a result that no other process can read: the module of its class is missing."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("module_of_a_workload_elsewhere",)


def unreadable_result() -> Result:
    part: Any = WorkloadsOwn()
    return Result(samples=(), stop_reason="max_repeats", details={"part": part})


class ScriptedWorker:
    """Runs the Python source it is configured with."""

    def __init__(self, config: dict[str, str]) -> None:
        self.config = config

    def start(self) -> WorkerInfo:
        exec(self.config.get("start", ""))
        return WorkerInfo(
            worker_id=self.config["name"],
            node_name="n",
            pid=os.getpid(),
            device_name="",
            driver_version="",
            emulated=True,
            visible_cards=os.environ.get("CARD", ""),
            threads=1,
            niceness=0,
            versions={"parent": str(os.getppid()), "json": str("json" in sys.modules)},
        )

    def listen(self, address: str) -> Any:
        raise OSError(f"cannot listen on {address}")

    def run(self, attempt: Attempt, rank: int, rendezvous: Any) -> RankOutcome:
        started_at = time.time()
        exec(self.config.get("run", ""))
        return RankOutcome(
            rank=rank, state=State.SUCCEEDED, started_at=started_at, ended_at=time.time()
        )

    def progress(self) -> Progress | None:
        return Progress(worker_id=self.config["name"], attempt_id="a-1", phase="warmup")

    def failure(self, error: BaseException) -> Failure:
        return Failure(failure_class=FailureClass.ERROR, message=str(error))


@dataclass(frozen=True)
class KindConfig:
    kind: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    run: str = ""


class KindWorker(ScriptedWorker):
    """Says in its outcome what kind of process it is, and what it was started with."""

    def __init__(self, config: KindConfig) -> None:
        super().__init__({"name": "k", "run": config.run})
        self.kind = config.kind

    def run(self, attempt: Attempt, rank: int, rendezvous: Any) -> RankOutcome:
        outcome = super().run(attempt, rank, rendezvous)
        said = f"{os.getpid()} {self.kind or 'ordinary'} {os.environ['MODE']}"
        failure = Failure(failure_class=FailureClass.ERROR, message=said)
        return replace(outcome, failure=failure)


class TimedWorker(ScriptedWorker):
    """Says when its timed part was, and has the result that its source has given it."""

    def __init__(self, config: dict[str, str]) -> None:
        super().__init__(config)
        self.result: Result | None = None

    def run(self, attempt: Attempt, rank: int, rendezvous: Any) -> RankOutcome:
        outcome = super().run(attempt, rank, rendezvous)
        return replace(outcome, timed=(1.0, 3.0), result=self.result)
