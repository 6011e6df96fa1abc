"""BERT masked language modelling and T5 training by transformers' Trainer and by a bare loop.

    python -m benchmarks.card.stock_training OUT.jsonl [--tiny]

Random weights made on the card, random ids, no tokenizer. Samples/s is all samples over all time
after the warm-up steps. Trainer is used as it comes: its fused AdamW, its data loader, autocast.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
import transformers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

TINY = "--tiny" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARMUP = 2 if TINY else 5


def synchronize() -> None:
    """Wait for the card."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random rows, made once on the host."""

    def __init__(self, kind: str, count: int) -> None:
        draw = torch.Generator().manual_seed(0)
        if kind == "bert":
            length = 32 if TINY else 512
            ids = torch.randint(1000, 30000, (count, length), generator=draw)
            masked = torch.rand(ids.shape, generator=draw) < 0.15
            labels = ids.masked_fill(~masked, -100)
            ids = ids.masked_fill(masked, 103)
            self.rows = [
                {"input_ids": i, "labels": o, "attention_mask": torch.ones_like(i)}
                for i, o in zip(ids, labels, strict=True)
            ]
        else:
            source, target = (32, 8) if TINY else (1024, 128)
            ids = torch.randint(10, 32000, (count, source), generator=draw)
            labels = torch.randint(10, 32000, (count, target), generator=draw)
            self.rows = [
                {"input_ids": i, "labels": o, "attention_mask": torch.ones_like(i)}
                for i, o in zip(ids, labels, strict=True)
            ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class Clock(TrainerCallback):
    """Times of the ends of steps."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the optimizer."""
        synchronize()
        self.times.append(time.perf_counter())


def model_of(kind: str) -> Any:
    """BERT-base or T5-base with random weights, made on the card."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        if kind == "bert":
            sizes: Any = {"num_hidden_layers": 1, "hidden_size": 96} if TINY else {}
            return BertForMaskedLM(BertConfig(**sizes))
        sizes = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
        if TINY:
            sizes = {"d_model": 64, "d_ff": 64, "num_layers": 1, "num_heads": 2}
        return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def by_trainer(
    model: Any, rows: Rows, batch: int, steps: int, bf16: bool, checkpointing: bool
) -> tuple[list[float], float]:
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=batch,
            max_steps=WARMUP + steps,
            bf16=bf16,
            gradient_checkpointing=checkpointing,
            learning_rate=5e-5,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=DEVICE == "cpu",
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[clock])
        done = trainer.train()
    return clock.times, float(done.training_loss)


def by_loop(
    model: Any, rows: Rows, batch: int, steps: int, bf16: bool, checkpointing: bool
) -> tuple[list[float], float]:
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    loader = torch.utils.data.DataLoader(rows, batch_size=batch, pin_memory=DEVICE == "cuda")
    times: list[float] = []
    loss = torch.zeros(())
    for inputs in loader:
        moved = {name: value.to(DEVICE, non_blocking=True) for name, value in inputs.items()}
        with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
            loss = model(**moved).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        times.append(time.perf_counter())
        if len(times) == WARMUP + steps:
            break
    return times, float(loss.detach())


def main() -> int:
    """Each case by both."""
    cases = [
        ("bert", 32, True, False, 20),
        ("bert", 64, True, False, 20),
        ("t5", 8, True, False, 20),
        ("t5", 8, True, True, 20),
        ("bert", 32, False, False, 8),
        ("bert", 64, False, False, 6),
    ]
    with open(sys.argv[1], "a", encoding="utf-8") as out:
        for kind, batch, bf16, checkpointing, steps in cases:
            if TINY:
                batch, steps = 2, 2
            rows = Rows(kind, batch * (WARMUP + steps))
            for name, work in (("trainer", by_trainer), ("loop", by_loop)):
                if DEVICE == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                model = model_of(kind)
                times, loss = work(model, rows, batch, steps, bf16, checkpointing)
                took = times[-1] - times[WARMUP - 1]
                walls = [b - a for a, b in zip(times[WARMUP - 1 :], times[WARMUP:], strict=False)]
                told = {
                    "model": kind,
                    "by": name,
                    "batch": batch,
                    "precision": "bf16-autocast" if bf16 else "fp32",
                    "checkpointing": checkpointing,
                    "steps": len(walls),
                    "samples_per_s": round(batch * len(walls) / took, 2),
                    "step_s": [round(wall, 5) for wall in walls],
                    "loss": round(loss, 4),
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "attention": model.config._attn_implementation,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                }
                if DEVICE == "cuda":
                    told["peak_allocated"] = torch.cuda.max_memory_allocated()
                    told["card"] = torch.cuda.get_device_name(0)
                    told["cudnn_attention"] = torch.backends.cuda.cudnn_sdp_enabled()
                out.write(json.dumps(told) + "\n")
                out.flush()
                print(json.dumps({k: v for k, v in told.items() if k != "step_s"}), flush=True)
                del model
    return 0


if __name__ == "__main__":
    sys.exit(main())
