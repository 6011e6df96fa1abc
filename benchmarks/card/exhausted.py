"""Fill a real card from a generation and a training step, and keep torch's messages whole.

    python -m benchmarks.card.exhausted OUT.jsonl

The model is of the shape of a small LLaMA with random weights made on the card. Whether segments
expand is decided by the environment (``PYTORCH_CUDA_ALLOC_CONF``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> int:
    """Run out of memory twice; each message is a line."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
    )
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)

    def generate() -> None:
        ids = torch.randint(0, 32000, (1024, 2048), device="cuda")
        with torch.no_grad():
            model.generate(ids, max_new_tokens=4, do_sample=False)

    def train() -> None:
        ids = torch.randint(0, 32000, (64, 2048), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()

    with open(sys.argv[1], "a", encoding="utf-8") as out:
        for name, work in (("generation", generate), ("training", train)):
            message = _message(work)
            torch.cuda.empty_cache()
            told = {"what": name, "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")}
            told |= {"torch": torch.__version__, "card": torch.cuda.get_device_name(0), **message}
            settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
            told["expandable_segments"] = settings.get("expandable_segments")
            out.write(json.dumps(told) + "\n")
            print(json.dumps(told), flush=True)
    return 0


def _message(work: Callable[[], None]) -> dict[str, Any]:
    try:
        work()
    except RuntimeError as error:
        return {"type": type(error).__name__, "message": str(error)}
    return {"type": None, "message": "it fitted"}


if __name__ == "__main__":
    sys.exit(main())
