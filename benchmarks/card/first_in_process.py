"""First in a process or later: passes of generation, and LoRA as first and as fifth job.

    python -m benchmarks.card.first_in_process MODEL OUT [--accelerator CPU] [--seconds 200]

Every pair is of one fresh process. All processes import first, beside each other; then they take
the card one after the other. ``order`` (LoRA, product defaults) comes in five pairs, and once with
cuDNN's attention; ``pass`` (generation, one prompt) alternates between on and off; one LoRA has
expandable segments. Rows are written as they come, so a limit of time cuts off the end alone.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.card.prepared import THREADS
from orchestrator.core.job import Accelerator, Job
from orchestrator.core.outcome import Attempt
from orchestrator.core.topology import Card
from orchestrator.worker.protocol import pickled
from workloads.base import MeasureSettings
from workloads.devices.cuda import CUDNN_ATTENTION

SMALL = "tiny-chatglm3"


def attempt(name: str, job: Job) -> Attempt:
    """One try at a job on the one card."""
    card = Card(node_id="here", index=0, accelerator=job.accelerator)
    return Attempt(attempt_id=name, job_id=job.job_id, number=1, job=job, cards=(card,))


def lora(model: str, accelerator: Accelerator, *, steps: int, batch: int) -> Job:
    """LoRA in bf16 with dynamic padding: nearly every step has a new shape."""
    return Job(
        experiment="order",
        workload="finetuning",
        model=model,
        dataset="advertisegen-synthetic",
        accelerator=accelerator,
        cards=1,
        precision="bf16",
        batch_size=batch,
        parameters=(("method", "lora"), ("samples", 640), ("steps", steps)),
        measure=MeasureSettings(warmup=2, time_limit_s=60),
    )


def generation(model: str, accelerator: Accelerator, tokens: int, repeats: int) -> Job:
    """One prompt of 128 tokens, and as many tokens again as is asked for."""
    return Job(
        experiment="pass",
        workload="text-generation",
        model=model,
        dataset="advertisegen-synthetic",
        accelerator=accelerator,
        cards=1,
        precision="bf16",
        batch_size=1,
        parameters=(
            ("ignore_eos", True),
            ("input_tokens", 128),
            ("output_tokens", tokens),
            ("prompts", 1),
        ),
        measure=MeasureSettings(warmup=1, min_repeats=repeats, max_repeats=repeats),
    )


def main() -> int:
    """Start all processes, then let each have the card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--accelerator", type=Accelerator, default=Accelerator.GPU)
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no process later")
    parser.add_argument("--only", help="numbers of processes, by comma")
    args = parser.parse_args()
    began = time.monotonic()
    big = args.accelerator is not Accelerator.CPU
    measured = lora(args.model, args.accelerator, steps=16 if big else 2, batch=16 if big else 2)
    small = lora(SMALL, args.accelerator, steps=2, batch=2)
    one = generation(args.model, args.accelerator, 128 if big else 4, 2)
    five = [measured, small, generation(SMALL, args.accelerator, 4, 1), small, measured]
    with_cudnn = {CUDNN_ATTENTION: "1"}
    expanding = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    series: list[tuple[str, dict[str, str], list[Job]]] = [
        ("pass", with_cudnn, [one]),
        ("pass", {}, [one]),
        *[("order", {}, five)] * 5,
        ("order", with_cudnn, five),
        ("order", expanding, [measured]),
        ("pass", {}, [one]),
        ("pass", with_cudnn, [one]),
    ]
    if args.only:
        series = [series[int(number)] for number in args.only.split(",")]
    processes = [
        _start(more, args.out / f"process-{number}.log")
        for number, (_, more, _) in enumerate(series)
    ]
    for process in processes:
        print(process.stdout.readline().strip(), flush=True)  # type: ignore[union-attr]
    print(f"all imported after {time.monotonic() - began:.1f} s", flush=True)
    with (args.out / "first_in_process.jsonl").open("w") as out:
        for number, (kind, more, jobs) in enumerate(series):
            if time.monotonic() - began < args.seconds:
                for row in _run(processes[number], jobs):
                    told = {"series": number, "kind": kind, "environment": more} | row
                    out.write(json.dumps(told) + "\n")
                    out.flush()
                    print(
                        json.dumps({k: v for k, v in told.items() if k != "computed"}), flush=True
                    )
            processes[number].stdin.close()  # type: ignore[union-attr]
            processes[number].wait()
    return 0


def _start(more: dict[str, str], log: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != CUDNN_ATTENTION}
    environment |= more | {
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": str(THREADS),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.card.prepared"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        env=environment,
        text=True,
    )


def _run(process: subprocess.Popen[str], jobs: list[Job]) -> list[dict[str, Any]]:
    assert process.stdin is not None and process.stdout is not None
    rows: list[dict[str, Any]] = []
    for number, job in enumerate(jobs, 1):
        message = base64.b64encode(pickled(attempt(f"{number}", job)))
        process.stdin.write(message.decode() + "\n")
        process.stdin.flush()
        row: dict[str, Any] = {}
        while "attempt" not in row:
            line = process.stdout.readline()
            if not line:
                return [*rows, {"died": process.wait()}]
            if line.startswith("{"):
                row |= json.loads(line)
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
