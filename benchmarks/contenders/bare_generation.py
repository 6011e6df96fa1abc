"""A plain script that measures generation: no grid, no worker, the same loop.

bare_generation.py MODEL_DIRECTORY PROMPTS.json OUTPUT_TOKENS BATCH_SIZE REPEATS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.contender import forget_peak, peak_bytes, serve


def main() -> None:
    directory, prompts_file, output_tokens, batch_size, repeats = sys.argv[1:6]
    prompts: list[list[int]] = json.loads(Path(prompts_file).read_text())
    size = int(batch_size)

    loaded: list[tuple[Any, float]] = []  # the model and the seconds that it took, once there

    def turn() -> dict[str, Any]:
        if not loaded:
            began = time.perf_counter()
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            loaded.append((model, time.perf_counter() - began))
            forget_peak()  # of loading
        model, load_s = loaded[0]
        config = GenerationConfig(
            max_new_tokens=int(output_tokens), do_sample=False, eos_token_id=None, pad_token_id=0
        )
        batches = [padded(prompts[start : start + size]) for start in range(0, len(prompts), size)]
        tokens = int(output_tokens) * len(prompts)
        rates, cpu_rates = [], []
        for repeat in range(1 + int(repeats)):
            wall, cpu = time.perf_counter(), time.process_time()
            for ids, mask in batches:
                model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
            if repeat:
                rates.append(tokens / (time.perf_counter() - wall))
                cpu_rates.append(tokens / (time.process_time() - cpu))
        return {
            "work": tokens,
            "tokens_per_s": median(rates),
            "tokens_per_cpu_s": median(cpu_rates),
            "load_s": load_s,
            "peak_mib": peak_bytes() / 2**20,
        }

    serve(turn)


def padded(batch: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [batch, longest], filled up on the left."""
    longest = max(map(len, batch))
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(batch):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


if __name__ == "__main__":
    main()
