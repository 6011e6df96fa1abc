"""Nightgrid's pretraining workload: MODEL STEPS MAX_LENGTH BATCH_SIZE LEARNING_RATE."""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.contender import serve
from benchmarks.contenders.alone import WARMED, Alone, request, timed


def main() -> None:
    model, steps, max_length, batch_size, rate = sys.argv[1:6]
    asked = request(
        "pretraining",
        model=model,
        dataset="english-corpus-synthetic",
        batch_size=int(batch_size),
        measure=WARMED,
        parameters={
            "initial_weights": "checkpoint",
            "steps": int(steps) - 1,
            "samples": int(steps) * int(batch_size),
            "max_length": int(max_length),
            "learning_rate": float(rate),
            "optimizer": "adamw-fused",  # the Trainer's default
        },
    )
    alone = Alone()

    def turn() -> dict[str, Any]:
        done = alone.run(asked).samples
        return {
            **timed(done),
            "losses": [step.loss for step in done],
            "threads": torch.get_num_threads(),
        }

    serve(turn)


if __name__ == "__main__":
    main()
