"""Nightgrid's fine-tuning workload: MODEL DATASET SAMPLES BATCH_SIZE PARAMETERS.json."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from benchmarks.contender import serve
from benchmarks.contenders.alone import WARMED, Alone, request, timed
from workloads.isolation import ProcessState


def main() -> None:
    model, dataset, samples, batch_size, parameters = sys.argv[1:6]
    asked = request(
        "finetuning",
        model=model,
        dataset=dataset,
        batch_size=int(batch_size),
        measure=WARMED,
        parameters={
            "method": "lora",
            "steps": int(samples) // int(batch_size) - 1,
            "samples": int(samples),
            **json.loads(parameters),
        },
    )
    alone, before = Alone(), ProcessState.now()

    def turn() -> dict[str, Any]:
        before.restore()  # as a worker does
        result = alone.run(asked)
        steps = result.samples
        return {
            **timed(steps),
            "compile_s": result.compile_s,
            "losses": [step.loss for step in steps],
            "positions": sum(step.computed_tokens for step in steps),
            "threads": torch.get_num_threads(),
        }

    serve(turn)


if __name__ == "__main__":
    main()
