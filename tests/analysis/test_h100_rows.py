"""The report on rows of a real card, with all that disturbed them (results/h100)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pyarrow.parquet as pq

from orchestrator.analysis.summary import Summary, summarize
from orchestrator.core.measurement import Measurement
from orchestrator.store.codec import from_table

ROWS = Path(__file__).resolve().parents[2] / "results" / "h100" / "grids.parquet"


@cache
def rows() -> tuple[Measurement, ...]:
    return tuple(from_table(pq.read_table(ROWS), source=str(ROWS)))


@cache
def summary(run: str) -> Summary:
    return summarize([row for row in rows() if row.run == run])


def effects(run: str) -> dict[tuple[str, str, str, str], set[str]]:
    found: dict[tuple[str, str, str, str], set[str]] = {}
    for effect in summary(run).effects:
        method = dict(effect.setting.parameters).get("method", "")
        key = (method, effect.name, effect.before, effect.after)
        found.setdefault(key, set()).update(p.row.batch_size_requested for p in effect.pairs)
    return found


def test_each_precision_is_held_against_bf16_at_every_batch_size_that_both_have() -> None:
    sizes: dict[str, set[str]] = {}
    for row in summary("g2-precision").rows:
        if row.metrics.throughput is not None:
            sizes.setdefault(row.precision, set()).add(row.batch_size_requested)
    assert sizes.keys() == {"bf16", "fp16", "fp32", "fp8", "int8", "int4"}
    assert effects("g2-precision") == {
        ("", "precision", "bf16", precision): found & sizes["bf16"]
        for precision, found in sizes.items()
        if precision != "bf16"
    }


def test_techniques_are_held_against_lora_and_optimizers_against_full() -> None:
    assert effects("g4-finetune") == {
        ("lora", "logits", "all", "learned"): {"16"},
        ("lora", "padding", "dynamic", "packing"): {"16"},
        ("lora", "padding", "dynamic", "fixed"): {"16"},
        ("lora", "attention", "sdpa", "eager"): {"16"},
        ("lora", "gradient_checkpointing", "false", "true"): {"16"},
        ("lora", "torch_compile", "false", "true"): {"16"},  # with padding fixed
        ("lora", "packed_attention", "masked", "apart"): {"16"},  # with padding packing
        ("full", "optimizer", "adamw", "adamw-fused"): {"4"},
        ("full", "optimizer", "adamw", "adamw-8bit"): {"4"},
    }


def test_continuous_batching_is_held_against_static() -> None:
    found = [e for e in summary("g3-batching").effects if e.after == "continuous"]
    assert [(e.before, e.pairs[0].row.batch_size_requested) for e in found] == [
        ("static", "32"),
        ("static", "1"),
    ]


def test_every_pair_differs_in_one_choice() -> None:
    for run in {row.run for row in rows()}:
        for effect in summary(run).effects:
            for pair in effect.pairs:
                one = {**pair.row.parameters, "precision": pair.row.precision}
                other = {**pair.base.parameters, "precision": pair.base.precision}
                assert [n for n in one if one[n] != other[n]] == [effect.name]
                assert pair.row.batch_size_requested == pair.base.batch_size_requested
