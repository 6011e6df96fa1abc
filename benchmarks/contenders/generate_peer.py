"""transformers' own generation over given prompts; needs torch and transformers only.

    generate_peer.py MODEL_DIRECTORY PROMPTS.json OUTPUT_TOKENS static BATCH_SIZE
    generate_peer.py MODEL_DIRECTORY PROMPTS.json OUTPUT_TOKENS sorted BATCH_SIZE
    generate_peer.py MODEL_DIRECTORY PROMPTS.json OUTPUT_TOKENS continuous ROWS

``static`` is ``generate`` in batches, in the order given, padded on the left; ``sorted`` the same
on prompts sorted by length, which leaves least to pad, with a static cache; ``continuous`` is
``generate_batch``, with at most ROWS texts in a batch where ROWS is not 0.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from benchmarks.contender import serve


def main() -> None:
    directory, prompts_file, output_tokens, kind, size = sys.argv[1:6]
    logging.disable_progress_bar()
    prompts: list[list[int]] = json.loads(Path(prompts_file).read_text())
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = model.generation_config.eos_token_id
    ends = sorted(found) if isinstance(found, list) else [found]
    pad = model.generation_config.pad_token_id
    config = GenerationConfig(
        max_new_tokens=int(output_tokens),
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=ends[0] if pad is None else pad,
    )
    if kind == "sorted":
        config.cache_implementation = "static"
    run = {"static": static, "sorted": by_length, "continuous": continuous}[kind]

    least = copy.deepcopy(config)
    least.max_new_tokens = 2
    run(model, prompts[:1], least, 1)  # as ours is warmed up

    def turn() -> dict[str, Any]:
        texts = [cut(ids, ends) for ids in run(model, prompts, config, int(size))]
        threads = torch.get_num_threads()
        return {"work": sum(map(len, texts)), "texts": texts, "threads": threads}

    serve(turn)


def cut(ids: list[int], ends: list[int]) -> list[int]:
    """Up to and including the first token that ends the text."""
    return next((ids[: n + 1] for n, token in enumerate(ids) if token in ends), ids)


def static(
    model: Any, prompts: list[list[int]], config: GenerationConfig, size: int
) -> list[list[int]]:
    """``generate``, batch by batch."""
    made: list[list[int]] = []
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        longest = max(map(len, batch))
        ids = torch.full((len(batch), longest), config.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        made += output[:, longest:].tolist()
    return made


def by_length(
    model: Any, prompts: list[list[int]], config: GenerationConfig, size: int
) -> list[list[int]]:
    """``static`` on prompts from the longest to the shortest; texts in the order given."""
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    made = static(model, [prompts[number] for number in order], config, size)
    return [text for _, text in sorted(zip(order, made, strict=True))]


def continuous(
    model: Any, prompts: list[list[int]], config: GenerationConfig, rows: int
) -> list[list[int]]:
    """``generate_batch``: its continuous batching with a paged cache."""
    from transformers import ContinuousBatchingConfig

    longest = max(map(len, prompts)) + config.max_new_tokens
    page = 32
    settings: dict[str, Any] = {"page_size": page, "max_batch_tokens": 1024}
    if rows:
        settings |= {"num_blocks": rows * -(-longest // page), "max_requests_per_batch": rows}
    output = model.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        warmup=False,
    )
    by_prompt = {tuple(found.prompt_ids): list(found.generated_tokens) for found in output.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


if __name__ == "__main__":
    main()
