"""Kill one worker and freeze another in the middle of their jobs on a real card.

    python -m benchmarks.card.ended_workers MODEL OUT [--accelerator CPU]

`nightgrid run` measures a small grid on the Ray cluster of this machine. The first fine-tuning job
is killed (SIGKILL) while it is timed, the first generation of batch 32 is frozen (SIGSTOP), which
the watchdog ends. Meanwhile this process reads the memory in use on the card every 10 ms. The rows
are the run's; what was observed is printed and kept in ``OUT/ended_workers.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.card.card_memory import MIB, CardMemory, workers

#: Seconds that a timed part may take in this run; `nightgrid` itself has more patience.
HANG_S = 14.0

GRID = """
name: ended-workers
defaults: {{model: {model}, dataset: advertisegen-synthetic, accelerator: {accelerator}}}
experiments:
  - name: killed
    workload: finetuning
    method: lora
    precision: bf16
    batch_size: {train}
    steps: {steps}
    samples: 640
    measure: {{warmup: 2, time_limit_s: 60}}
  - name: frozen
    workload: text-generation
    precision: bf16
    batch_size: {batch}
    prompts: {batch}
    input_tokens: 128
    output_tokens: {tokens}
    ignore_eos: true
    measure: {{warmup: 1, min_repeats: {repeats}, max_repeats: {repeats}, time_limit_s: 60}}
  - name: one prompt
    workload: text-generation
    precision: bf16
    batch_size: 1
    prompts: 1
    input_tokens: 128
    output_tokens: {tokens}
    ignore_eos: true
    measure: {{warmup: 1, min_repeats: 2, max_repeats: 2, time_limit_s: 30}}
  - name: prompts out of memory
    workload: text-generation
    precision: bf16
    batch_size: {many}
    prompts: {many}
    input_tokens: 2048
    output_tokens: 4
    ignore_eos: true
    measure: {{warmup: 1, min_repeats: 1, max_repeats: 1, time_limit_s: 20}}
  - name: samples out of memory
    workload: finetuning
    method: lora
    precision: bf16
    batch_size: {many_samples}
    samples: 256
    steps: 1
    padding: fixed
    measure: {{warmup: 1, time_limit_s: 20}}
"""


def nightgrid(arguments: list[str]) -> int:
    """Run one command with a watchdog of little patience."""
    from orchestrator.cli.main import main as command
    from orchestrator.driver import board

    limits: Any = board.PHASE_LIMITS_S
    limits.update(measure=HANG_S)
    setattr(board, "MEASURE_FACTOR", 0.0)  # noqa: B010
    return command(arguments)


def main() -> int:
    """Start the run, end its workers, tell what the card did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--accelerator", default="GPU")
    args = parser.parse_args()
    small = args.accelerator == "CPU"
    grid = args.out / "ended-workers.yaml"
    grid.write_text(
        GRID.format(
            model=args.model,
            accelerator=args.accelerator,
            train=4 if small else 16,
            steps=40 if small else 20,
            repeats=2,
            tokens=16 if small else 128,
            batch=8 if small else 32,
            many=2 if small else 768,
            many_samples=2 if small else 256,
        )
    )
    memory = CardMemory()
    began = time.monotonic()
    results = args.out / "ended-workers"
    command = [sys.executable, "-m", "benchmarks.card.ended_workers", "nightgrid", "run"]
    command += [str(grid), "--results", str(results), "--no-restart"]
    command += ["--address", os.environ.get("RAY_ADDRESS") or "auto"]
    run = subprocess.Popen(command)
    idle = memory.used
    ends = [_End("finetuning", signal.SIGKILL), _End("b=8" if small else "b=32", signal.SIGSTOP)]
    while run.poll() is None:
        status = _status(results / "ended-workers" / "status.json")
        for end in ends:
            end.look(status, memory)
        time.sleep(0.05)
    memory.close()
    found = {
        "exit": run.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "idle_mib": idle // MIB,
        "processes_listed_at_most": max(listed for _, _, listed in memory.readings),
        "ends": [end.observed(memory, idle, began) for end in ends],
        "memory_s_mib": memory.thinned(began, 512 * MIB),
    }
    (args.out / "ended_workers.json").write_text(json.dumps(found, indent=1))
    for end in found["ends"]:
        print(json.dumps(end), flush=True)
    return int(run.returncode)


class _End:
    """The end of one worker: when, and what the card's memory did."""

    def __init__(self, job: str, number: signal.Signals) -> None:
        self.job, self.number = job, number
        self.at: float | None = None
        self.seen: dict[str, Any] = {}

    def look(self, status: dict[str, Any], memory: CardMemory) -> None:
        """Send the signal once the job is timed."""
        for card in status.get("cards", ()):
            if self.at is None and self.job in card["job"] and card["phase"] == "measure":
                found = workers()
                if not found:  # it is gone, and the status is of a second ago
                    continue
                worker = max(found, key=lambda process: process.memory_info().rss)
                self.seen = {
                    "job": card["job"],
                    "attempt": card["attempt_id"],
                    "signal": self.number.name,
                    "pid": worker.pid,
                    "visible_cards_of_the_process": _variable(worker, "CUDA_VISIBLE_DEVICES"),
                    "used_mib_before": memory.used // MIB,
                }
                self.at = time.monotonic()
                os.kill(worker.pid, self.number)
                print(f"{self.number.name} to {worker.pid}: {card['job']}", flush=True)

    def observed(self, memory: CardMemory, idle: int, began: float) -> dict[str, Any]:
        """Seconds from the signal until the memory began to fall, was free, and rose again."""
        if self.at is None:
            return {"signal": self.number.name, "job": self.job, "at": None}
        before = self.seen["used_mib_before"] * MIB
        falls = free = rises = None
        least = before
        for at, used, _ in memory.readings:
            if at < self.at:
                continue
            least = min(least, used)
            if falls is None and used < before - 64 * MIB:
                falls = at
            if free is None and used <= idle + 256 * MIB:
                free = at
            if free is not None and rises is None and used > idle + 256 * MIB:
                rises = at
        since = {"falls": falls, "is_free": free, "rises_again": rises}
        return (
            self.seen
            | {"at_s": round(self.at - began, 3), "least_mib_afterwards": least // MIB}
            | {f"{name}_after_s": at and round(at - self.at, 3) for name, at in since.items()}
        )


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except psutil.Error:
        return None


def _status(path: Path) -> dict[str, Any]:
    try:
        status: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["nightgrid"]:
        sys.exit(nightgrid(sys.argv[2:]))
    sys.exit(main())
