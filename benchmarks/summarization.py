"""T5 fine-tuned on 96 articles beside transformers' Seq2SeqTrainer, one pass.

Same weights, and the settings of the library's example script for summarization: the prefix, both
sides cut at a length and padded to the longest of the batch, padding masked in the labels, fused
AdamW with a rate that falls on a straight line, gradients clipped to a norm of 1. In each step the
same articles meet, hence the same loss curve: no step's loss may lie further than 0.001 from the
Trainer's. In batches of one, as T5-3B was published on Gaudi2, with and without gradient
checkpointing, and in batches of eight, which a small size leaves out: it would time two steps.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from benchmarks.figures import Goal, Line, cpu_ratio, distances, rates, values
from benchmarks.setting import MANY, Setting, Takes

TITLE = "T5 on 96 articles with highlights"
TAKES_S = Takes(whole=85, quick=14)
MODEL, COUNT = "tiny-t5", 96
DATASET = "cnn-dailymail-synthetic"
ASKED = {
    "source_prefix": "summarize: ",
    "max_source_length": 256,
    "max_target_length": 64,
    "learning_rate": 5e-4,
}
#: What only Nightgrid has to be told, since the Trainer does it anyway.
OURS = {
    "method": "full",
    "optimizer": "adamw-fused",
    "learning_rate_schedule": "linear",
    "max_gradient_norm": 1.0,
}
#: Size of a batch, and whether layers are checkpointed.
KINDS = {
    "batches of 1": (1, False),
    "batches of 1, checkpointing": (1, True),
    "batches of 8": (8, False),
}


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from workloads.data.datasets import load_examples
    from workloads.models.loading import open_model

    count = setting.sized(COUNT, 24, 8)
    source = open_model(MODEL)
    file = setting.scratch / "pairs.json"
    pairs = [
        {"article": one.content, "highlights": one.summary}
        for one in load_examples(DATASET)[:count]
    ]
    file.write_text(json.dumps(pairs))
    kinds = dict(list(KINDS.items())[setting.sized(slice(None), slice(1), slice(1))])
    with contextlib.ExitStack() as stack:
        started = []
        for kind, (batch, checkpointed) in kinds.items():
            asked = ASKED | {"gradient_checkpointing": checkpointed}
            started += [
                setting.started(
                    stack,
                    f"Seq2SeqTrainer, {kind}",
                    setting.peer,
                    "summarize_peer.py",
                    *(source.path, file, batch, json.dumps(asked)),
                ),
                setting.started(
                    stack,
                    f"nightgrid, {kind}",
                    sys.executable,
                    "finetune_nightgrid.py",
                    *(MODEL, DATASET, count, batch, json.dumps(asked | OURS)),
                ),
            ]
        # Turns of one second scatter: those of a batch of eight are more.
        often = max(MANY, setting.turns)
        fewer = {each.name: setting.turns for each in started if "batches of 8" not in each.name}
        turns = setting.turns_of(started, warm_ups=1, turns=often, fewer=fewer)
    lines = []
    for kind in kinds:
        ours, theirs = turns[f"nightgrid, {kind}"], turns[f"Seq2SeqTrainer, {kind}"]
        lines += [
            Line(
                what=f"samples/s, {kind}",
                against="Seq2SeqTrainer",
                unit="samples/s",
                ours=rates(ours),
                theirs=rates(theirs),
                goal=Goal(kind="at least", value=1.0),
                cpu_ratio=cpu_ratio(ours, theirs),
                note=f"{ours[0]['positions']:,} positions beside {theirs[0]['positions']:,}",
            ),
            Line(
                what=f"greatest distance of a step's loss from the Trainer's, {kind}",
                against="",
                unit="",
                ours=distances(ours, theirs),
                goal=Goal(kind="at most", value=1e-3),
                note=f"losses from {ours[0]['losses'][0]:.4f} to {ours[0]['losses'][-1]:.4f}",
            ),
        ]
    return lines, {
        "threads of each": sorted({each["threads"] for told in turns.values() for each in told}),
        "model": MODEL,
        "samples": count,
        "positions": {name: sorted(values(told, "positions")) for name, told in turns.items()},
    }
