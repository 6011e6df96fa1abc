"""diffusers' own pipeline over given texts; needs torch, transformers and diffusers only.

    images_peer.py PIPELINE_DIRECTORY TEXTS.json STEPS BATCH_SIZE BATCHES

Timed is from the first call to the last image, without loading. The progress bar, which is the
library's default, goes to the log.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline

from benchmarks.contender import serve

SEED = 42


def main() -> None:
    directory, texts_file, steps, batch_size, batches = sys.argv[1:6]
    texts: list[str] = json.loads(Path(texts_file).read_text())
    pipeline: Any = StableDiffusionPipeline.from_pretrained(directory, safety_checker=None)
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    size = int(batch_size)

    def turn() -> dict[str, Any]:
        images: list[Any] = []
        cpu, wall = time.process_time(), time.perf_counter()
        for batch in range(int(batches)):
            numbers = range(batch * size, (batch + 1) * size)
            images += pipeline(
                [texts[number % len(texts)] for number in numbers],
                num_inference_steps=int(steps),
                guidance_scale=7.5,
                generator=[torch.Generator().manual_seed(SEED + number) for number in numbers],
            ).images
        return {
            "work": len(images),
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "threads": torch.get_num_threads(),
            "first": list(images[0].convert("RGB").tobytes()),
        }

    turn()  # as ours, which loads in one
    serve(turn)


if __name__ == "__main__":
    main()
