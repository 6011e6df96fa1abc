"""Pipelines without cards: what the plan refuses and notes, the idle share, the cut."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from finetuning_cases import asked, refuse, training_of
from hypothesis import given
from hypothesis import strategies as st

from workloads.base import Unsupported
from workloads.training.parallel.layout import idle_share
from workloads.training.techniques import technique_notes


def job(**changes: Any) -> dict[str, Any]:
    """Settings of a pipeline over all of four cards, in four micro-batches."""
    return {"cards": 4, "strategy": "pipeline", "gradient_accumulation": 4, **changes}


@pytest.mark.parametrize(
    ("changes", "setting", "words", "hint"),
    [
        (job(cards=1), "strategy", "has one card", "cards: 2"),
        (job(cards=8, batch_size=8, gradient_accumulation=8), "strategy", "4 layers", "1, 2, 4"),
        (job(pipeline_schedule="interleaved"), "strategy", "2 groups of layers each", "1, 2"),
        (job(pipeline_parallel=3), "pipeline_parallel", "pipeline 3 is 3 cards", "to be 4"),
        (job(data_parallel=3), "data_parallel", "data 3 × tensor 1", "to be 4"),
        (
            job(data_parallel=4, pipeline_parallel=2),
            "pipeline_parallel",
            "data 4 × tensor 1 × pipeline 2 is 8 cards, and the job has 4",
            "to be 4",
        ),
        ({"cards": 4, "data_parallel": 2}, "data_parallel", "is 2 cards", "data_parallel: 4"),
        (
            job(cards=16, tensor_parallel=4, gradient_accumulation=4),
            "tensor_parallel",
            "6 att",
            "2",
        ),
        (job(gradient_accumulation=2), "gradient_accumulation", "2 micro-batches", ": 16"),
        (
            job(pipeline_parallel=2, pipeline_schedule="interleaved", gradient_accumulation=1),
            "gradient_accumulation",
            "a multiple of the 2 stages",
            ": 8",
        ),
        (job(batch_size=6), "gradient_accumulation", "a batch of 6 cannot", "1, 2, 3, 6"),
        (job(padding="packing"), "padding", "of one shape", "fixed"),
        (job(pipeline_chunks=2), "pipeline_chunks", "1f1b has one group", "interleaved"),
        ({"cards": 2, "pipeline_parallel": 2}, "pipeline_parallel", "ddp cuts no", "pipeline"),
        (
            {"cards": 2, "strategy": "fsdp2", "pipeline_schedule": "interleaved"},
            "pipeline_schedule",
            "fsdp2 cuts no layers",
            "strategy: pipeline",
        ),
        (
            {"cards": 2, "strategy": "zero1", "tensor_parallel": 2},
            "tensor_parallel",
            "there is one",
            "below 2",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_what_would(
    changes: dict[str, Any], setting: str, words: str, hint: str
) -> None:
    """Cards, layers, heads, micro-batches: before anything starts."""
    found = [one for one in refuse(asked(**changes)) if not one.unsupported]
    assert len(found) == 1, found
    assert found[0].setting == setting and words in found[0].reason and hint in found[0].hint


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        (job(method="qlora"), "method"),
        (job(autocast="fp16", precision="fp32"), "autocast"),
        (job(logits="learned"), "logits"),
        (job(save_adapter="a"), "save_adapter"),
        (job(method="full", freeze_layers=1), "freeze_layers"),
        (job(method="full", save_model="a"), "save_model"),
        (job(method="full", sparsity="magnitude"), "sparsity"),
        (job(save_every=1), "save_every"),
        (job(profile=True), "profile"),
        ({"cards": 2, "strategy": "fsdp2", "profile": True}, "profile"),
        (job(torch_compile=True), "torch_compile"),
        (job(model="tiny-t5", dataset="cnn-dailymail-synthetic", method="full"), "strategy"),
        ({"cards": 2, "strategy": "fsdp2", "method": "qlora"}, "method"),
        ({"cards": 2, "strategy": "fsdp2", "save_every": 1}, "save_every"),
        ({"cards": 4, "strategy": "zero1", "tensor_parallel": 2, "save_every": 1}, "save_every"),
        ({"cards": 2, "strategy": "fsdp2", "optimizer": "adafactor"}, "optimizer"),
        ({"cards": 4, "strategy": "fsdp2", "tensor_parallel": 2}, "tensor_parallel"),
        ({"cards": 2, "strategy": "fsdp2", "logits": "chunked"}, "logits"),
    ],
)
def test_what_this_version_lacks_becomes_a_row(changes: dict[str, Any], setting: str) -> None:
    """It makes sense, so it is no mistake."""
    assert setting in {one.setting for one in refuse(asked(**changes)) if one.unsupported}


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
def test_one_strategy_takes_every_layout_of_a_grid(stages: int, tensor: int) -> None:
    """So that tensor_parallel and pipeline_parallel can be axes, and data takes what is left."""
    settings = job(
        cards=8, batch_size=8, gradient_accumulation=8, tensor_parallel=tensor, method="full"
    )
    wanted = asked(**settings, pipeline_parallel=stages)
    assert refuse(wanted) == ()
    assert len(technique_notes(wanted)) == (stages > 1)


def test_the_plan_notes_the_idle_share() -> None:
    """By the formula, with its numbers."""
    (plain,) = technique_notes(asked(**job()))
    assert "pipeline_parallel 4 with 4 micro-batches" in plain and "= 42.9%" in plain
    (looped,) = technique_notes(asked(**job(pipeline_parallel=2, pipeline_schedule="interleaved")))
    assert "(p-1)/(mv+p-1) = 11.1%" in looped


@given(st.integers(1, 8), st.integers(0, 24))
def test_the_idle_share_is_that_of_a_schedule_worked_off(stages: int, more: int) -> None:
    """1F1B with passes of equal length, a backward pass twice a forward pass: each waits for its
    neighbour's, and what is left of the cards' time is idle."""
    count = stages + more
    ended: dict[tuple[str, int, int], float] = {}
    orders = [_one_forward_one_backward(stage, stages, count) for stage in range(stages)]
    free = [0.0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, batch = order[0]
                wanted = {
                    "forward": ("forward", stage - 1, batch) if stage else None,
                    "backward": ("backward", stage + 1, batch)
                    if stage + 1 < stages
                    else ("forward", stage, batch),
                }[kind]
                if wanted is not None and wanted not in ended:
                    break
                began = max(free[stage], ended[wanted] if wanted else 0.0)
                free[stage] = ended[kind, stage, batch] = began + 1 + (kind == "backward")
                order.pop(0)
    idle = 1 - stages * count * 3 / (stages * max(free))
    assert idle == pytest.approx(idle_share(stages, count))


def _one_forward_one_backward(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    warm_up = min(count, stages - stage)
    order = [("forward", batch) for batch in range(warm_up)]
    for batch in range(count):
        order.append(("backward", batch))
        if warm_up + batch < count:
            order.append(("forward", warm_up + batch))
    return order


def test_a_model_whose_code_reads_more_than_its_layers_is_not_cut() -> None:
    """Granite scales what it embeds, and would scale it again in every stage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from workloads.training.parallel.pipeline import checked, stages_of

    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    models = {
        name: AutoModelForCausalLM.from_config(
            AutoConfig.for_model(name, **sizes, embedding_multiplier=2.0)
        )
        for name in ("llama", "granite")
    }
    for name in models:
        training = training_of(models[name])
        stages = stages_of(training, 2)
        if name == "granite":
            with pytest.raises(Unsupported, match="reads more than its layers"):
                checked(training, stages)
        else:
            hidden, logits = checked(training, stages)
            assert hidden.shape == (2, 6, 16) and logits.shape == (2, 6, 32)


def _cut(training: Any) -> None:
    from workloads.training.parallel.pipeline import cut

    cut(training, None, schedule="1f1b", chunks=1, length=8)  # type: ignore[arg-type]


def _shard(training: Any) -> None:
    from workloads.training.parallel.fully_sharded import shard

    shard(training)


def _older_step(self: Any, *args: Any, target: Any = None, losses: Any = None) -> None:
    """A schedule's step as releases have it that always return outputs."""


@pytest.mark.parametrize(
    ("divide", "missing", "words"),
    [
        (
            _cut,
            "torch.distributed.pipelining.schedules._PipelineSchedule.eval",
            "Schedule1F1B.eval",
        ),
        (
            _cut,
            "torch.distributed.pipelining.schedules.PipelineScheduleSingle.step",
            "Schedule1F1B.step(return_outputs)",
        ),
        (_shard, "torch.distributed.fsdp.fully_shard", "fsdp.fully_shard"),
        (
            _shard,
            "torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather",
            "_fsdp_collectives.DefaultAllGather",
        ),
        (
            _shard,
            "torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter",
            "FSDPModule.set_custom_reduce_scatter",
        ),
    ],
)
def test_an_older_torch_is_refused_by_what_it_lacks(
    divide: Any, missing: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is divided, with the release that has it."""
    if missing.endswith(".step"):
        monkeypatch.setattr(missing, _older_step)
    else:
        monkeypatch.delattr(missing)
    training = training_of(torch.nn.Linear(2, 2))
    with pytest.raises(Unsupported, match=rf"has no .*{re.escape(words)}.*, which torch 2\.13 has"):
        divide(training)
