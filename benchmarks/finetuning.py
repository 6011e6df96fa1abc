"""LoRA on 100 samples of mixed length beside transformers' Trainer, one pass in batches of ten.

Same model, adapter (rank, targets, first numbers), optimizer, rate, samples in the same order in
the same batches, hence the same losses; how far they lie apart is told. The Trainer pads to
``max_length`` (fixed) or to the longest of a batch (dynamic). Ours packs several samples into a
row, attends within each sample alone and computes logits only where something is learned.
``uniform-length`` also changes which samples meet, hence another curve: shown only.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.figures import Goal, Line, cpu_ratio, rates
from benchmarks.setting import Setting

TITLE = "LoRA on 100 samples of mixed length"
#: Ours first: name, and what it asks for.
OURS = {
    "packing apart, learned logits": {
        "padding": "packing",
        "packed_attention": "apart",
        "logits": "learned",
    },
    "packing, learned logits": {"padding": "packing", "logits": "learned"},
    "packing": {"padding": "packing"},
    "dynamic, learned logits": {"padding": "dynamic", "logits": "learned"},
    "dynamic": {"padding": "dynamic"},
    "uniform-length": {"padding": "uniform-length"},
}
MODEL, MAX_LENGTH, BATCH = "tiny-chatglm3", 512, 10
ADAPTER = {"rank": 8, "alpha": 16, "targets": "q_proj,k_proj,v_proj", "learning_rate": 2e-4}


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from workloads.data.catalog import load_examples
    from workloads.models.loading import load_tokenizer, open_model
    from workloads.training.samples import encode_samples

    count = 2 * BATCH if setting.smoke else 100
    source = open_model(MODEL)
    tokenizer = load_tokenizer(source)
    examples = load_examples("advertisegen-synthetic")
    samples = encode_samples(examples, count, tokenizer, source, MAX_LENGTH)
    file = setting.scratch / "samples.json"
    file.write_text(json.dumps([{"ids": s.ids, "labels": s.labels} for s in samples]))
    with contextlib.ExitStack() as stack:
        started = [
            setting.started(
                stack,
                f"Trainer, {padding} padding",
                setting.peer,
                "finetune_peer.py",
                *(source.path, file, padding, MAX_LENGTH, BATCH, json.dumps(ADAPTER)),
            )
            for padding in (("dynamic",) if setting.smoke else ("fixed", "dynamic"))
        ]
        started += [
            setting.started(
                stack,
                f"nightgrid, {name}",
                sys.executable,
                "finetune_nightgrid.py",
                *(MODEL, count, MAX_LENGTH, BATCH),
                json.dumps(ADAPTER | asked),
            )
            for name, asked in list(OURS.items())[: 1 if setting.smoke else None]
        ]
        turns = setting.turns_of(started, warm_ups=1)
    return _lines(turns), {
        "model": MODEL,
        "samples": count,
        "tokens": sum(len(sample.ids) for sample in samples),
        "longest sample": max(len(sample.ids) for sample in samples),
        "greatest distance of a step's loss from the Trainer's with dynamic padding": {
            name: _distance(found, turns["Trainer, dynamic padding"])
            for name, found in turns.items()
            if name != "nightgrid, uniform-length"
        },
    }


def _lines(turns: Mapping[str, list[dict[str, Any]]]) -> list[Line]:
    ours = turns[f"nightgrid, {next(iter(OURS))}"]
    goals = {
        "Trainer, fixed padding": Goal(kind="at least", value=3.0),
        "Trainer, dynamic padding": Goal(kind="at least", value=1.3),
    }
    lines = []
    for name, theirs in turns.items():
        if theirs is ours:
            continue
        lines.append(
            Line(
                what=f"samples/s, {next(iter(OURS))}",
                against=name,
                unit="samples/s",
                ours=rates(ours),
                theirs=rates(theirs),
                goal=goals.get(name, Goal()),
                cpu_ratio=cpu_ratio(ours, theirs),
                note=f"{ours[0]['positions']:,} positions beside {theirs[0]['positions']:,}",
            )
        )
    return lines


def _distance(mine: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    pairs = zip(mine[0]["losses"], others[0]["losses"], strict=True)
    return max(abs(one - other) for one, other in pairs)
