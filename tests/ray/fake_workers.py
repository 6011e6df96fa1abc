"""Workers for the Ray tests: the interface of CardWorker, no torch, and every way to go wrong."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.core.events import Progress
from orchestrator.core.job import State
from orchestrator.core.outcome import Attempt, Failure, RankOutcome, WorkerInfo, classify
from orchestrator.worker.protocol import WorkerConfig
from workloads.base import Result, Sample

#: A child that ignores the polite signal too, in the worker's group or in a session of its own.
STUBBORN_CHILD = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(3600)
"""


class FakeWorker:
    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self._progress: Progress | None = None
        self._info: WorkerInfo | None = None

    def start(self) -> WorkerInfo:
        if self.config.worker_id.startswith("broken"):
            raise ImportError("No module named 'habana_frameworks'")
        self._info = WorkerInfo(
            worker_id=self.config.worker_id,
            node_name=self.config.node_name,
            pid=os.getpid(),
            device_name="fake",
            driver_version="",
            emulated=self.config.emulated,
            visible_cards=os.environ.get(self.config.card.accelerator.spec.visible_variable, ""),
            threads=int(os.environ["OMP_NUM_THREADS"]),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
        )
        return self._info

    def listen(self, address: str) -> Any:
        return {"address": address, "pid": os.getpid()}

    def progress(self) -> Progress | None:
        return self._progress

    def failure(self, error: BaseException) -> Failure:
        return Failure(classify(error), str(error))

    def run(self, attempt: Attempt, rank: int, rendezvous: Any) -> RankOutcome:
        started_at, began = time.time(), time.monotonic()
        self._progress = Progress(
            worker_id=self.config.worker_id,
            attempt_id=attempt.attempt_id,
            phase="measure",
        )
        details = {"rendezvous": repr(rendezvous), "rank": str(rank)}
        action, _, argument = self.asked(attempt)
        if action == "sleep":
            self.work(attempt, float(argument))
        elif action == "segfault":
            print("about to read address zero", flush=True)
            ctypes.string_at(0)
        elif action == "hold-gil":
            time.sleep(1.0)  # as long as it takes to tell the phase
            ctypes.PyDLL(None).sleep(600)
        elif action == "allocate":
            allocate_until_refused()
        elif action == "abort":  # what native code does where Python would raise
            with contextlib.suppress(MemoryError):
                allocate_until_refused()
            os.abort()
        elif action == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for session in (False, True):
                subprocess.Popen([sys.executable, "-c", STUBBORN_CHILD], start_new_session=session)
            time.sleep(3600)
        elif action == "raise":
            raise RuntimeError(f"as asked: {argument}")
        self._progress = None
        ended_at = started_at + time.monotonic() - began
        return RankOutcome(
            rank=rank,
            state=State.SUCCEEDED,
            started_at=started_at,
            ended_at=ended_at,
            timed=(began, time.monotonic()),
            result=Result(samples=self.samples(), stop_reason="max_repeats", details=details),
            worker=self._info,
        )

    def asked(self, attempt: Attempt) -> tuple[str, str, str]:
        return attempt.job.model.partition(":")

    def work(self, attempt: Attempt, seconds: float) -> None:
        time.sleep(seconds)

    def samples(self) -> tuple[Sample, ...]:
        return ()


def allocate_until_refused(limit_bytes: int = 256 * 2**20) -> None:
    """Take memory until this process's limit refuses more.

    Raises:
        MemoryError: always.
    """
    import resource

    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + limit_bytes, resource.RLIM_INFINITY))
    kept = []
    try:
        while True:
            kept.append(bytearray(8 * 2**20))
    finally:
        kept.clear()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
