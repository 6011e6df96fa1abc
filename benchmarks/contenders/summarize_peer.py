"""transformers' Seq2SeqTrainer as its example script for summarization sets it up; needs torch,
transformers and accelerate only.

    summarize_peer.py MODEL_DIRECTORY PAIRS.json BATCH_SIZE SETTINGS.json

Pairs are tokenized as ``run_summarization.py`` does: the prefix before every article, both sides
cut at their length, labels masked at padding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from benchmarks.contender import serve
from benchmarks.contenders.timed_trainer import timed


def main() -> None:
    directory, pairs_file, batch_size, settings = sys.argv[1:5]
    told = json.loads(settings)
    pairs = json.loads(Path(pairs_file).read_text())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    read = tokenizer(
        [told["source_prefix"] + pair["article"] for pair in pairs],
        max_length=told["max_source_length"],
        truncation=True,
    )
    labels = tokenizer(
        text_target=[pair["highlights"] for pair in pairs],
        max_length=told["max_target_length"],
        truncation=True,
    )["input_ids"]
    samples = [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(read["input_ids"], read["attention_mask"], labels, strict=True)
    ]
    positions: list[int] = []

    def turn() -> dict[str, Any]:
        positions.clear()
        model = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
        collator = DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100)

        def collate(batch: list[dict[str, Any]]) -> Any:
            made = collator(batch)
            positions.append(made["input_ids"].numel() + made["labels"].numel())
            return made

        done = timed(
            model,
            samples,
            collate,
            trainer=Seq2SeqTrainer,
            arguments=Seq2SeqTrainingArguments,
            per_device_train_batch_size=int(batch_size),
            learning_rate=told["learning_rate"],
            weight_decay=0.0,
            gradient_checkpointing=told["gradient_checkpointing"],
            gradient_checkpointing_kwargs={"use_reentrant": False},
            seed=0,
        )
        return {**done, "positions": sum(positions)}

    serve(turn)


if __name__ == "__main__":
    main()
