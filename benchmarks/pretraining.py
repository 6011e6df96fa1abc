"""BERT pretraining beside transformers' Trainer as its example script runs it, one pass.

Same weights, chunks, optimizer, schedule and clipping (the Trainer's defaults), and a batch in each
step. The Trainer masks by its own collator, as ``run_mlm.py`` does. Once more it is given the masks
that ours has drawn, hence the same loss curve: no step's loss may lie further than 0.001 from it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Goal, Line, cpu_ratio, rates
from benchmarks.setting import MANY, Setting, Takes

TITLE = "BERT pretraining, chunks of 128 tokens"
TAKES_S = Takes(whole=40, quick=17)
MODEL, LENGTH, BATCH, RATE = "tiny-bert", 128, 8, 1e-3
_OURS, _OWN, _GIVEN = "nightgrid", "Trainer, its own masks", "Trainer, our masks"
_FAR = "greatest distance of a step's loss from the Trainer's with our masks"


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from workloads.models.loading import open_model

    steps = setting.sized(24, 6, 2)
    source = open_model(MODEL)
    file = setting.scratch / "chunks.json"
    _write_chunks(file, steps)
    with contextlib.ExitStack() as stack:
        started = [
            setting.started(
                stack,
                name,
                setting.peer,
                "pretrain_peer.py",
                *(source.path, file, masks, BATCH, RATE),
            )
            for name, masks in ((_OWN, "own"), (_GIVEN, "given"))
        ]
        started.append(
            setting.started(
                stack,
                _OURS,
                sys.executable,
                "pretrain_nightgrid.py",
                *(MODEL, steps, LENGTH, BATCH, RATE),
            )
        )
        turns = setting.turns_of(started, warm_ups=1, turns=max(MANY, setting.turns))
    return _lines(turns), {
        "threads of each": sorted({each["threads"] for told in turns.values() for each in told}),
        "model": MODEL,
        "chunks": steps * BATCH,
        "tokens of a chunk": LENGTH,
        _FAR: max(_distances(turns[_OURS], turns[_GIVEN])),
        "last loss": {name: told[-1]["losses"][-1] for name, told in turns.items()},
    }


def _write_chunks(file: Path, steps: int) -> None:
    """The chunks of all steps, and the masks that ours draws in each."""
    from transformers import AutoConfig

    from workloads.data.datasets import load_examples
    from workloads.models.loading import load_tokenizer, open_model
    from workloads.training.data import SampleFormat
    from workloads.training.masking import draw, encode

    source = open_model(MODEL)
    form = SampleFormat(
        tokenizer=load_tokenizer(source),
        source=source,
        config=AutoConfig.from_pretrained(source.path),
        parameters={"max_length": LENGTH, "masked_share": 0.15},
        pad_token_id=0,
        context_length=LENGTH,
    )
    chunks: list[Any] = list(
        encode(load_examples("english-corpus-synthetic"), steps * BATCH, form).samples
    )
    drawn = [
        chunk
        for step in range(steps)
        for chunk in draw(chunks[step * BATCH : (step + 1) * BATCH], form, step)
    ]
    rows = [
        {
            "input_ids": chunk.ids.tolist(),
            "special_tokens_mask": chunk.special.astype(int).tolist(),
            "masked_ids": masked.ids.tolist(),
            "labels": masked.labels.tolist(),
        }
        for chunk, masked in zip(chunks, drawn, strict=True)
    ]
    file.write_text(json.dumps(rows))


def _lines(turns: Mapping[str, list[dict[str, Any]]]) -> list[Line]:
    ours = turns[_OURS]
    lines = [
        Line(
            what="samples/s, one sample is one chunk",
            against=name,
            unit="samples/s",
            ours=rates(ours),
            theirs=rates(turns[name]),
            goal=Goal(kind="at least", value=1.0),
            cpu_ratio=cpu_ratio(ours, turns[name]),
        )
        for name in (_OWN, _GIVEN)
    ]
    far = Line(
        what=_FAR,
        against="",
        unit="",
        ours=_distances(ours, turns[_GIVEN]),
        goal=Goal(kind="at most", value=1e-3),
        note=f"losses from {ours[0]['losses'][0]:.4f} to {ours[0]['losses'][-1]:.4f}",
    )
    return [*lines, far]


def _distances(
    mine: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> tuple[float, ...]:
    """The greatest distance of any step's loss, turn by turn."""
    return tuple(
        max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True))
        for one, other in zip(mine, others, strict=True)
    )
