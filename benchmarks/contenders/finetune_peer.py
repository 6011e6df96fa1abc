"""transformers' Trainer with peft's LoRA; needs torch, transformers, peft and accelerate only.

With padding ``none`` TRL's SFTTrainer, which then writes a batch into one row (trl and datasets).

finetune_peer.py MODEL_DIRECTORY SAMPLES.json fixed|dynamic|none MAX_LENGTH BATCH_SIZE ADAPTER.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.contender import serve
from benchmarks.contenders.timed_trainer import timed


def main() -> None:
    directory, samples_file, padding, max_length, batch_size, adapter = sys.argv[1:7]
    samples = json.loads(Path(samples_file).read_text())
    told = json.loads(adapter)
    torch.set_float32_matmul_precision(told.get("matmul_precision", "highest"))
    positions: list[int] = []

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(sample["ids"]) for sample in batch)
        length = int(max_length) if padding == "fixed" else longest
        positions.append(length * len(batch))

        def filled(values: list[int], filling: int) -> list[int]:
            return [*values, *[filling] * (length - len(values))]

        return {
            "input_ids": torch.tensor([filled(sample["ids"], 0) for sample in batch]),
            "labels": torch.tensor([filled(sample["labels"], -100) for sample in batch]),
            "attention_mask": torch.tensor([filled([1] * len(s["ids"]), 0) for s in batch]),
        }

    def turn() -> dict[str, Any]:
        positions.clear()
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        torch.manual_seed(0)
        model = get_peft_model(
            model,
            LoraConfig(
                r=told["rank"],
                lora_alpha=told["alpha"],
                target_modules=told["targets"].split(","),
                task_type="CAUSAL_LM",
            ),
        )
        way = _without_padding(samples) if padding == "none" else (samples, collate, {})
        data, joined, more = way
        done = timed(
            model,
            data,
            joined,
            **more,
            per_device_train_batch_size=int(batch_size),
            learning_rate=told["learning_rate"],
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            weight_decay=0.0,
            optim="adamw_torch",
            remove_unused_columns=False,
            seed=0,
        )
        packed = sum(len(sample["ids"]) for sample in samples)
        return {**done, "positions": sum(positions) or packed}

    serve(turn)


def _without_padding(samples: list[dict[str, Any]]) -> tuple[Any, None, dict[str, Any]]:
    """The samples as TRL takes them, with its own collator; its trainer and settings."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"input_ids": s["ids"], "labels": s["labels"]} for s in samples])
    settings = {
        "trainer": SFTTrainer,
        "arguments": SFTConfig,
        "padding_free": True,
        "max_length": None,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return data, None, settings


if __name__ == "__main__":
    main()
