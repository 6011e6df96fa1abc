"""The job of the chaos tests, as a workload of grids, and its worker: no torch, so that 24 fit on
two cores. A job either works for some seconds and then has samples, or goes wrong as it was told.
"""

from __future__ import annotations

import os
import sys
import time
from types import MappingProxyType
from typing import Literal

from fake_workers import FakeWorker

from orchestrator.core.events import Progress
from orchestrator.core.outcome import Attempt, Failure, FailureClass
from workloads import registry
from workloads.base import (
    JobContext,
    Phase,
    Request,
    Result,
    Sample,
)
from workloads.registry import WorkloadSpec
from workloads.settings import WorkloadParameters, setting

Behaviour = Literal[
    "work", "segfault", "abort", "allocate", "hold-gil", "hang", "stubborn", "raise", "grow"
]
#: A job that works is seen to go on: each stretch is told as another phase, "warmup" at first.
STRETCH_S = 4.0
#: Variables: a file that, once it is there, ends jobs that work; a directory for workers' logs.
HURRY = "NIGHTGRID_CHAOS_HURRY"
LOGS = "NIGHTGRID_CHAOS_LOGS"
_LOOK_S = 0.5


class ChaosParameters(WorkloadParameters):
    behaviour: Behaviour = setting("work", role="work", description="What the job does.")
    seconds: float = setting(5.0, role="work", description="How long it works.")
    number: int = setting(0, role="neutral", description="Tells jobs apart.")
    largest: int = setting(4, role="work", description="Batch size that still fits, for grow.")


def register() -> None:
    entry = WorkloadSpec(
        name="chaos",
        function="chaos_worker:never_called",
        parameters=ChaosParameters,
        summary="works, or goes wrong as asked",
    )
    registry.WORKLOADS = MappingProxyType({**registry.WORKLOADS, "chaos": entry})


def never_called(request: Request, context: JobContext) -> Result:
    raise NotImplementedError


class ChaosWorker(FakeWorker):
    """A worker whose jobs say in their parameters what they do."""

    _grows = False  # whether the job's batch may be too large for the card

    def asked(self, attempt: Attempt) -> tuple[str, str, str]:
        parameters = dict(attempt.job.parameters)
        behaviour, seconds = str(parameters["behaviour"]), str(parameters["seconds"])
        self._grows = behaviour == "grow"
        if self._grows:
            assert isinstance(attempt.job.batch_size, int)
            fits = attempt.job.batch_size <= int(str(parameters["largest"]))
            behaviour = "work" if fits else "allocate"
        if behaviour == "work":
            return "sleep", ":", seconds
        if behaviour == "hang":
            return "sleep", ":", "3600"
        return behaviour, ":", seconds

    def failure(self, error: BaseException) -> Failure:
        """A batch that does not fit is too large for the card; all else is as it is."""
        if isinstance(error, MemoryError) and self._grows:
            return Failure(FailureClass.OUT_OF_MEMORY, "out of card memory")
        return super().failure(error)

    def work(self, attempt: Attempt, seconds: float) -> None:
        if seconds >= 3600:  # the one that hangs says nothing more
            time.sleep(seconds)
        end = time.monotonic() + seconds
        phases: tuple[Phase, ...] = ("warmup", "measure")
        stretch = 0
        print("begun:", attempt.attempt_id, file=sys.stderr)
        while (left := end - time.monotonic()) > 0:
            self._progress = Progress(
                worker_id=self.config.worker_id,
                attempt_id=attempt.attempt_id,
                phase=phases[stretch % 2],
            )
            stretch += 1
            for line in range(100):  # as training jobs do, wherever their log lies
                print(f"{attempt.attempt_id}: stretch {stretch}, line {line} of what jobs print")
            sys.stdout.flush()
            self._sleep(min(left, STRETCH_S))
            if os.path.exists(os.environ.get(HURRY, "")):
                end = 0.0

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
            if os.path.exists(os.environ.get(HURRY, "")):
                return

    def samples(self) -> tuple[Sample, ...]:
        return tuple(
            Sample(
                repeat=repeat,
                batch=0,
                warmup=False,
                complete=True,
                wall_s=1.0 + (os.getpid() % 7) / 100 + repeat / 1000,
                cpu_s=0.01,
                items=1,
                input_tokens=16,
                output_tokens=16,
                computed_tokens=32,
            )
            for repeat in range(3)
        )
