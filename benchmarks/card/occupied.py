"""Occupy a real card while a run begins: the run waits, and takes the card once it is free.

    python -m benchmarks.card.occupied OUT

A process takes most of the card's memory; `nightgrid run` then begins a grid of two jobs. The
holder ends ``HOLD_S`` later. What happened when is in ``OUT/occupied.json``; the run's rows and log
stand beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GRID = """
name: occupied
defaults: {model: tiny-chatglm3, dataset: advertisegen-synthetic, accelerator: GPU}
experiments:
  - name: decoding
    workload: text-generation
    axes: {batch_size: [1, 2]}
    prompts: 4
    output_tokens: 8
"""
HOLDER = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(int(free * 0.9), dtype=torch.uint8, device="cuda")
print("holds", flush=True)
sys.stdin.read()
"""
HOLD_S = 25.0


def main(out: Path) -> int:
    """Hold the card, start the run, let go of it."""
    out.mkdir(parents=True, exist_ok=True)
    grid = out / "occupied.yaml"
    grid.write_text(GRID)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdin is not None
    holder.stdout.readline()
    started = time.monotonic()
    command = [sys.executable, "-m", "orchestrator", "run", str(grid)]
    run = subprocess.Popen([*command, "--results", str(out), "--no-restart"])
    times: dict[str, Any] = {"first_attempts_at_s": None, "card_free_at_s": None}
    while run.poll() is None:
        seconds = round(time.monotonic() - started, 2)
        if times["first_attempts_at_s"] is None and _attempts(out / "occupied" / "status.json"):
            times["first_attempts_at_s"] = seconds
        if times["card_free_at_s"] is None and seconds > HOLD_S:
            holder.stdin.close()
            holder.wait()
            times["card_free_at_s"] = seconds
        time.sleep(0.1)
    times |= {"ended_s": round(time.monotonic() - started, 2), "exit": run.returncode}
    holder.kill()
    (out / "occupied.json").write_text(json.dumps(times))
    print(json.dumps(times), flush=True)
    return int(run.returncode)


def _attempts(status: Path) -> int:
    """Attempts that the run has made so far."""
    try:
        return int(json.loads(status.read_text())["attempts"])
    except (OSError, ValueError, KeyError):
        return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
