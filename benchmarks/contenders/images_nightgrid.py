"""Nightgrid's text-to-image workload: MODEL STEPS BATCH_SIZE BATCHES PARAMETERS.json."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import torch

from benchmarks.contender import serve
from benchmarks.contenders.alone import Alone, request


def main() -> None:
    from PIL import Image

    model, steps, batch_size, batches, parameters = sys.argv[1:6]
    asked = request(
        "text-to-image",
        model=model,
        dataset="image-prompts",
        engine="diffusers",
        batch_size=int(batch_size),
        parameters={
            "steps": int(steps),
            "images": int(batch_size) * int(batches),
            "warmup_batches": 0,
            **json.loads(parameters),
        },
    )
    alone = Alone()

    def turn() -> dict[str, Any]:
        result = alone.run(asked)
        assert result.image is not None
        return {
            "work": sum(sample.items for sample in result.samples),
            "wall_s": sum(sample.wall_s for sample in result.samples),
            "cpu_s": sum(sample.cpu_s for sample in result.samples),
            "threads": torch.get_num_threads(),
            "first": list(Image.open(io.BytesIO(result.image)).convert("RGB").tobytes()),
        }

    turn()  # loads
    serve(turn)


if __name__ == "__main__":
    main()
