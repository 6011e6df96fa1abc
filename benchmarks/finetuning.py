"""LoRA on samples of mixed length beside transformers' Trainer, one pass.

Same model, adapter (rank, targets, first numbers), optimizer, rate, and in each optimizer step the
same samples, hence the same loss curve: no step's loss may lie further than 0.001 from the
Trainer's, which is what other orders of sums amount to. The Trainer pads to the longest sample of
all (fixed) or of a batch (dynamic); with samples sorted by length there is least to pad. TRL's
writes a batch into one row and masks what belongs to other samples; its packing, which also groups
samples anew, would be another curve. In each step it also finds the entropy and the share of right
tokens, which neither the Trainer nor ours does. Ours puts a batch into one row without padding,
attends within each sample alone, and computes the logits of learned positions together with their
loss. Where the processor multiplies bf16, both are also told to round the factors of fp32 products
to it (``matmul_precision: medium``). Where it does not, that switch has oneDNN multiply in fp32,
and on processors on which that is faster than PyTorch's own choice, MKL, ours is also told to
(``matmul_backend: onednn``), and so is the Trainer. Compiling is not timed, nor is anyone's first
step. In it ours takes the memory of the longest, as a job does; the Trainer's process keeps that of
the turn before.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Goal, Line, cpu_ratio, distances, rates
from benchmarks.setting import Setting, Takes

TITLE = "LoRA on samples of mixed length"
TAKES_S = Takes(whole=480, quick=30)
ADAPTER = {"rank": 8, "alpha": 16, "targets": "q_proj,k_proj,v_proj", "learning_rate": 2e-4}
MAX_LENGTH = 512
_ONE_ROW = {"padding": "packing", "packed_attention": "apart", "logits": "chunked"}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train; ``asked`` is what ours is told, ``padding`` what the Trainer does."""

    name: str
    sorted: bool = False  # samples by length, instead of the order of the data
    asked: Mapping[str, Any] | None = field(default=None, hash=False)
    padding: str = "dynamic"
    products: str = "highest"  # the Trainer's matmul precision


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way of ours beside others on the same samples in the same order."""

    model: str
    samples: int
    batch: int
    ours: Way
    others: Mapping[Way, float | None]  # with the ratio that is wanted
    same_curve: str  # the name of the other whose losses are to be ours
    products: str = "fp32"  # of ours, as ``_products`` finds them on a processor


_TRL = Way("TRL without padding, length-sorted", True, padding="none")
_TRAINER, _SORTED = Way("Trainer, dynamic padding"), Way("Trainer, length-sorted", True)
_MINE = Way("nightgrid, one row", asked=_ONE_ROW)
_MINE_SORTED = Way("nightgrid, one row, length-sorted", True, _ONE_ROW)
_LAYERS = {"torch_compile": True, "compile_scope": "layers"}
_BF16 = _ONE_ROW | {"matmul_precision": "medium"}
_SORTED_BF16 = Way("Trainer, length-sorted, bf16 products", True, products="medium")
_MINE_BF16 = Way("nightgrid, one row, length-sorted, bf16 products", True, _BF16)
_COMPILED = Way(
    "nightgrid, one row, length-sorted, bf16 products, compiled layers",
    True,
    _BF16 | _LAYERS,
)
_ONEDNN = _ONE_ROW | {"matmul_backend": "onednn"}
_SORTED_ONEDNN = Way("Trainer, length-sorted, oneDNN", True, products="medium")
_MINE_ONEDNN = Way("nightgrid, one row, length-sorted, oneDNN", True, _ONEDNN)
_COMPILED_ONEDNN = Way(
    "nightgrid, one row, length-sorted, oneDNN, compiled layers",
    True,
    _ONEDNN | _LAYERS,
)
#: How much faster oneDNN has to be to be compared.
_FASTER = 1.2
COMPARISONS = (
    Comparison(
        "tiny-chatglm3",
        100,
        10,
        _MINE,
        {
            Way("Trainer, all padded to the longest sample", padding="fixed"): None,
            _TRAINER: 1.3,
        },
        _TRAINER.name,
    ),
    Comparison("tiny-chatglm3", 100, 10, _MINE_SORTED, {_SORTED: 2.0, _TRL: None}, _SORTED.name),
    Comparison("smollm2-135m-instruct", 12, 4, _MINE_SORTED, {_SORTED: 2.0}, _SORTED.name),
    Comparison(
        "tiny-chatglm3",
        100,
        10,
        _COMPILED,
        {_SORTED: 2.0, _SORTED_BF16: None},
        _SORTED.name,
        "bf16",
    ),
    Comparison(
        "smollm2-135m-instruct",
        12,
        4,
        _MINE_BF16,
        {_SORTED: 2.0, _SORTED_BF16: None},
        _SORTED.name,
        "bf16",
    ),
    Comparison(
        "tiny-chatglm3",
        100,
        10,
        _COMPILED_ONEDNN,
        {_SORTED: 2.0, _SORTED_ONEDNN: None},
        _SORTED.name,
        "onednn",
    ),
    Comparison(
        "smollm2-135m-instruct",
        12,
        4,
        _MINE_ONEDNN,
        {_SORTED: 2.0, _SORTED_ONEDNN: None},
        _SORTED.name,
        "onednn",
    ),
)


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    lines: list[Line] = []
    farthest: list[float] = []  # of each comparison
    facts: dict[str, Any] = {}
    products = {"fp32", _products()}
    facts["ways to multiply fp32 on this processor"] = sorted(products)
    for number, comparison in enumerate(
        setting.sized(COMPARISONS, COMPARISONS[1:2], COMPARISONS[:1])
    ):
        if comparison.products not in products:
            continue
        turns, told = _compare(setting, comparison, setting.scratch / f"samples-{number}")
        lines += _lines(comparison, turns)
        if comparison.same_curve in turns:
            farthest.append(
                max(distances(turns[comparison.ours.name], turns[comparison.same_curve]))
            )
        facts |= {f"{comparison.model}, {comparison.ours.name}: {k}": v for k, v in told.items()}
        facts["threads of each"] = sorted({e["threads"] for told in turns.values() for e in told})
    same_curve = Line(
        what="greatest distance of a step's loss from the Trainer's, comparison by comparison",
        against="",
        unit="",
        ours=tuple(farthest),
        goal=Goal(kind="at most", value=1e-3),
    )
    return [*lines, same_curve], facts


def _products() -> str:
    """Name the products of fp32 numbers here where PyTorch's switch for bf16 is on: ``bf16``;
    ``onednn`` in fp32, by another library that is faster; ``fp32`` as otherwise."""
    import torch

    from workloads.base import Unsupported
    from workloads.devices import device_for
    from workloads.training.techniques.precision import in_force, multiply_by_onednn

    device, left, right = device_for("cpu"), torch.randn(1024, 512), torch.randn(512, 512)

    def seconds() -> float:
        turns = []
        for _ in range(20):
            began = time.perf_counter()
            left @ right
            turns.append(time.perf_counter() - began)
        return min(turns)

    before, usual_s = torch.get_float32_matmul_precision(), seconds()
    try:
        with contextlib.suppress(Unsupported):
            multiply_by_onednn(device)
            return "onednn" if _FASTER * seconds() < usual_s else "fp32"
        with contextlib.suppress(Unsupported):
            in_force("medium", device)
            return "bf16"
        return "fp32"
    finally:
        torch.set_float32_matmul_precision(before)


def _compare(
    setting: Setting, comparison: Comparison, files: Path
) -> tuple[Mapping[str, list[dict[str, Any]]], dict[str, Any]]:
    """Turns of all contenders, and facts of the samples."""
    from workloads.data.datasets import load_examples
    from workloads.models.loading import load_tokenizer, open_model
    from workloads.training.data import encode_samples

    count = setting.sized(comparison.samples, 4 * comparison.batch, 2 * comparison.batch)
    count = min(count, comparison.samples)
    source = open_model(comparison.model)
    examples = load_examples("advertisegen-synthetic")[:count]
    tokenizer = load_tokenizer(source)
    encoded = encode_samples(examples, count, tokenizer, source, MAX_LENGTH).samples
    order = list(range(count))
    if comparison.ours.sorted:
        order.sort(key=lambda index: (encoded[index].tokens, index))
    samples = [encoded[index] for index in order]
    longest = max(sample.tokens for sample in samples)
    told = [{"ids": sample.ids, "labels": sample.labels} for sample in samples]
    texts = [{"content": examples[i].content, "summary": examples[i].summary} for i in order]
    files.with_suffix(".json").write_text(json.dumps(told))
    files.with_suffix(".jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    others = [_TRAINER] if setting.smoke else [*comparison.others]
    with contextlib.ExitStack() as stack:
        started = []
        for each in (*others, comparison.ours):
            program = "finetune_peer.py" if each.asked is None else "finetune_nightgrid.py"
            python = setting.peer if each.asked is None else sys.executable
            asked = ADAPTER | {"max_length": MAX_LENGTH} | dict(each.asked or {})
            arguments = (
                (source.path, files.with_suffix(".json"), each.padding, longest)
                if each.asked is None
                else (comparison.model, files.with_suffix(".jsonl"), count)
            )
            given = ADAPTER | {"matmul_precision": each.products} if each.asked is None else asked
            started.append(
                setting.started(
                    stack,
                    each.name,
                    python,
                    program,
                    *(*arguments, comparison.batch, json.dumps(given)),
                )
            )
        turns = setting.turns_of(started, warm_ups=1)
    return turns, {
        "samples": count,
        "tokens": sum(sample.tokens for sample in samples),
        "longest sample": longest,
        "learned tokens": sum(sample.learned_tokens for sample in samples),
    }


def _lines(comparison: Comparison, turns: Mapping[str, list[dict[str, Any]]]) -> list[Line]:
    name = comparison.ours.name
    ours, where = turns[name], f"{comparison.model}, {name.removeprefix('nightgrid, ')}"
    return [
        Line(
            what=f"samples/s, {where}",
            against=other.name,
            unit="samples/s",
            ours=rates(ours),
            theirs=rates(turns[other.name]),
            goal=Goal() if wanted is None else Goal(kind="at least", value=wanted),
            cpu_ratio=cpu_ratio(ours, turns[other.name]),
            note=f"{ours[0]['positions']:,} positions beside {turns[other.name][0]['positions']:,}",
        )
        for other, wanted in comparison.others.items()
        if other.name in turns
    ]
