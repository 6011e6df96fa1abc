"""OpenVINO GenAI's continuous batching over given prompts; needs its environment only.

    generate_openvino.py CONVERTED_DIRECTORY PROMPTS.json OUTPUT_TOKENS PRECISION ROWS END,END...

At most ROWS texts are in a batch. Weights, arithmetic and key/value cache have PRECISION (f32 or
bf16): its default, a cache in 8 bits, computes something else. It has as many threads as cores.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.contender import serve


def main() -> None:
    directory, prompts_file, output_tokens, precision, rows, ends = sys.argv[1:7]
    prompts: list[list[int]] = json.loads(Path(prompts_file).read_text())
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = int(rows)
    scheduler.max_num_batched_tokens = 1 << 16  # as ours: a tenth faster here than 1024
    scheduler.cache_size = 4  # GB, more than these prompts fill
    scheduler.enable_prefix_caching = False  # no prompt is to be read for free in a second turn
    threads = len(os.sched_getaffinity(0))
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": threads,
    }
    pipeline = genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", properties)
    config = genai.GenerationConfig()
    config.do_sample = False
    config.stop_token_ids = {int(end) for end in ends.split(",")}
    tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    config.max_new_tokens = 2
    pipeline.generate(tensors[:1], [config])  # as ours is warmed up
    config.max_new_tokens = int(output_tokens)

    def turn() -> dict[str, Any]:
        made = pipeline.generate(tensors, [config] * len(tensors))
        texts = [[int(token) for token in found.m_generation_ids[0]] for found in made]
        return {"work": sum(map(len, texts)), "texts": texts, "threads": threads}

    serve(turn)


if __name__ == "__main__":
    main()
