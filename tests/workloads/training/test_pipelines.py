"""Pipelines without cards: what the plan refuses and notes, the idle share, the cut."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from finetuning_cases import asked, refuse, small_model, training_of

from workloads.base import Unsupported
from workloads.training.parallel.pipeline import checked, cut, stages_of
from workloads.training.parallel.sharding import shard
from workloads.training.techniques import technique_notes


def job(**changes: Any) -> dict[str, Any]:
    return {"cards": 4, "strategy": "pipeline", "gradient_accumulation": 4, **changes}


def test_the_plan_takes_every_layout_of_a_grid_and_notes_the_idle_share() -> None:
    settings = job(cards=8, batch_size=8, gradient_accumulation=8, method="full")
    for stages, tensor in product((1, 2, 4), (1, 2)):
        wanted = asked(**settings, tensor_parallel=tensor, pipeline_parallel=stages)
        assert refuse(wanted) == ()
        assert len(technique_notes(wanted)) == (stages > 1)
    (plain,) = technique_notes(asked(**job()))
    assert "pipeline_parallel 4 with 4 micro-batches" in plain and "= 42.9%" in plain
    (looped,) = technique_notes(asked(**job(pipeline_parallel=2, pipeline_schedule="interleaved")))
    assert "(p-1)/(mv+p-1) = 11.1%" in looped


def test_a_model_whose_code_reads_more_than_its_layers_is_not_cut() -> None:
    """Granite scales what it embeds, and would scale it again in every stage."""
    for name in ("llama", "granite"):
        model = small_model(name, tie_word_embeddings=False, embedding_multiplier=2.0)
        training = training_of(model)
        stages = stages_of(training, 2)
        if name == "granite":
            with pytest.raises(Unsupported, match="reads more than its layers"):
                checked(training, stages)
        else:
            hidden, logits = checked(training, stages)
            assert hidden.shape == (2, 6, 32) and logits.shape == (2, 6, 96)


def _older_step(self: Any, *args: Any, target: Any = None, losses: Any = None) -> None:
    """A schedule's step as releases have it that always return outputs."""


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("pipelining.schedules._PipelineSchedule.eval", "Schedule1F1B.eval"),
        ("pipelining.schedules.PipelineScheduleSingle.step", "Schedule1F1B.step(return_outputs)"),
        ("fsdp.fully_shard", "fsdp.fully_shard"),
        ("fsdp.FSDPModule.set_custom_reduce_scatter", "FSDPModule.set_custom_reduce_scatter"),
    ],
)
def test_an_older_torch_is_refused_by_what_it_lacks(missing, words, monkeypatch) -> None:
    if missing.endswith(".step"):
        monkeypatch.setattr(f"torch.distributed.{missing}", _older_step)
    else:
        monkeypatch.delattr(f"torch.distributed.{missing}")
    training = training_of(torch.nn.Linear(2, 2))
    with pytest.raises(Unsupported, match=rf"has no .*{re.escape(words)}.*, which torch 2\.13 has"):
        if missing.startswith("fsdp"):
            shard(training)
        else:
            cut(training, None, schedule="1f1b", chunks=1, length=8)
