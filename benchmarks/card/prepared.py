"""A process that has imported everything, then takes jobs from standard input and a card for them.

Each line is a pickled attempt in base 64; each answer is a line with the times of its batches.
The card is opened when the first line comes. It is the product's own worker, so a process is as
warm or as fresh here as in a run.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time

import datasets  # noqa: F401 - paid for here
import peft  # noqa: F401
import torch
import transformers  # noqa: F401

from orchestrator.core.outcome import Attempt, WorkerInfo
from orchestrator.worker.protocol import WorkerConfig, unpickled
from orchestrator.worker.worker import CardWorker
from workloads import finetuning, text_generation  # noqa: F401

THREADS = 8


def main() -> None:
    """Answer until the input ends."""
    print(json.dumps({"ready": os.getpid()}), flush=True)
    worker: CardWorker | None = None
    for line in sys.stdin:
        attempt: Attempt = unpickled(base64.b64decode(line))
        if worker is None:
            worker = CardWorker(
                WorkerConfig(
                    worker_id="w",
                    card=attempt.cards[0],
                    node_name="here",
                    emulated=False,
                    threads=THREADS,
                )
            )
            began = time.perf_counter()
            info: WorkerInfo = worker.start()
            told = {"started_s": round(time.perf_counter() - began, 2), "device": info.device_name}
            told |= {"driver": info.driver_version, "torch": torch.__version__}
            print(json.dumps(told), flush=True)
        began = time.perf_counter()
        outcome = worker.run(attempt)
        result = outcome.result
        row = {
            "attempt": attempt.attempt_id,
            "state": str(outcome.state),
            "wall_s": round(time.perf_counter() - began, 3),
            "failure": outcome.failure.message if outcome.failure else None,
            "details": dict(result.details) if result else {},
            "load_s": result.load_s if result else None,
            "peak_allocated": result.peak_device_memory_bytes if result else None,
            "warmup": [round(s.wall_s, 5) for s in result.samples if s.warmup] if result else [],
            "timed": [round(s.wall_s, 5) for s in result.samples if not s.warmup] if result else [],
            "computed": [s.computed_tokens for s in result.samples] if result else [],
            "ttft": [s.ttft_s for s in result.samples] if result else [],
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
