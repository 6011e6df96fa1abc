"""transformers' Trainer on masked words; needs torch, transformers and accelerate only.

    pretrain_peer.py MODEL_DIRECTORY CHUNKS.json own|given BATCH_SIZE LEARNING_RATE

Masks are those of the library's collator, or given. All else is the Trainer's default.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
)

from benchmarks.contender import serve
from benchmarks.contenders.timed_trainer import timed


def main() -> None:
    directory, file, masks, batch_size, rate = sys.argv[1:6]
    chunks = json.loads(Path(file).read_text())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if masks == "own":
        rows = [{k: chunk[k] for k in ("input_ids", "special_tokens_mask")} for chunk in chunks]
        collator: Any = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    else:
        rows = [{"input_ids": each["masked_ids"], "labels": each["labels"]} for each in chunks]

        def collator(some: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            return {name: torch.tensor([row[name] for row in some]) for name in some[0]}

    def turn() -> dict[str, Any]:
        model = AutoModelForMaskedLM.from_pretrained(directory, dtype=torch.float32)
        return timed(
            model,
            rows,
            collator,
            per_device_train_batch_size=int(batch_size),
            learning_rate=float(rate),
            remove_unused_columns=False,
        )

    serve(turn)


if __name__ == "__main__":
    main()
