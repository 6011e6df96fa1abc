"""LoRA on 100 samples of mixed length beside transformers' Trainer, one pass in batches of ten.

Same model, adapter (rank, targets, first numbers), optimizer, rate, and in each optimizer step the
same ten samples, hence the same loss curve: no step's loss may lie further than 0.001 from the
Trainer's, which is what other orders of sums amount to. The Trainer pads to
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

from benchmarks.figures import Goal, Line, cpu_ratio, distances, rates
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
    "dynamic": {"padding": "dynamic"},
    "uniform-length": {"padding": "uniform-length"},
}
MODEL, MAX_LENGTH, BATCH = "tiny-chatglm3", 512, 10
_DYNAMIC = "Trainer, dynamic padding"
_FAR = "greatest distance of a step's loss from the Trainer's with dynamic padding"
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
                *(MODEL, "advertisegen-synthetic", count, BATCH),
                json.dumps(ADAPTER | {"max_length": MAX_LENGTH} | asked),
            )
            for name, asked in list(OURS.items())[: 1 if setting.smoke else None]
        ]
        turns = setting.turns_of(started, warm_ups=1)
    return _lines(turns), {
        "threads of each": sorted({each["threads"] for told in turns.values() for each in told}),
        "model": MODEL,
        "samples": count,
        "tokens": sum(len(sample.ids) for sample in samples),
        "longest sample": max(len(sample.ids) for sample in samples),
        _FAR: {
            name: max(distances(found, turns[_DYNAMIC]))
            for name, found in turns.items()
            if name not in (_DYNAMIC, "nightgrid, uniform-length")
        },
    }


def _lines(turns: Mapping[str, list[dict[str, Any]]]) -> list[Line]:
    ours = turns[f"nightgrid, {next(iter(OURS))}"]
    goals = {
        "Trainer, fixed padding": Goal(kind="at least", value=3.0),
        _DYNAMIC: Goal(kind="at least", value=1.3),
    }
    lines = [
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
        for name, theirs in turns.items()
        if theirs is not ours
    ]
    far = Line(
        what=f"{_FAR}, {next(iter(OURS))}",
        against="",
        unit="",
        ours=distances(ours, turns[_DYNAMIC]),
        goal=Goal(kind="at most", value=1e-3),
        note=f"losses from {ours[0]['losses'][0]:.4f} to {ours[0]['losses'][-1]:.4f}",
    )
    return [*lines, far]
