"""transformers' Trainer with peft's LoRA; needs torch, transformers, peft and accelerate only.

    finetune_peer.py MODEL_DIRECTORY SAMPLES.json fixed|dynamic MAX_LENGTH BATCH_SIZE ADAPTER.json

Timed is from the beginning of the first step to the end of the last: no loading, no setting up.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.contender import serve


def in_order(trainer: Any) -> Any:
    """A trainer of the library that takes samples in their order."""

    class InOrder(trainer):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

    return InOrder


class Clock(TrainerCallback):
    """When steps begin and end, and their losses."""

    def __init__(self) -> None:
        self.began: tuple[float, float] | None = None
        self.ended = (0.0, 0.0)
        self.losses: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = self.began or (time.perf_counter(), time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended = (time.perf_counter(), time.process_time())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def main() -> None:
    directory, samples_file, padding, max_length, batch_size, adapter = sys.argv[1:7]
    samples = json.loads(Path(samples_file).read_text())
    told = json.loads(adapter)
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
        clock = Clock()
        with tempfile.TemporaryDirectory() as output:
            arguments = TrainingArguments(
                output_dir=output,
                per_device_train_batch_size=int(batch_size),
                num_train_epochs=1,
                learning_rate=told["learning_rate"],
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                weight_decay=0.0,
                optim="adamw_torch",
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                use_cpu=True,
                remove_unused_columns=False,
                disable_tqdm=True,
                seed=0,
                dataloader_pin_memory=False,
            )
            in_order(Trainer)(
                model=model,
                args=arguments,
                train_dataset=samples,
                data_collator=collate,
                callbacks=[clock],
            ).train()
        assert clock.began is not None
        return {
            "work": len(samples),
            "wall_s": clock.ended[0] - clock.began[0],
            "cpu_s": clock.ended[1] - clock.began[1],
            "losses": clock.losses,
            "positions": sum(positions),
            "threads": torch.get_num_threads(),
        }

    serve(turn)


if __name__ == "__main__":
    main()
