"""The layout of ranks, pipelines without cards, and DeepSpeed's configuration: all pure."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from finetuning_cases import asked, refuse, small_model, training_of
from hypothesis import given
from hypothesis import strategies as st

from workloads.base import Unsupported
from workloads.devices import device_for
from workloads.training.parallel.layout import Layout, generation_refusals
from workloads.training.parallel.pipeline import checked, cut, stages_of
from workloads.training.parallel.sharding import (
    announce_deepspeed,
    deepspeed_config,
    shard,
    use_its_algorithms,
)
from workloads.training.techniques import technique_notes


def test_text_generation_is_refused_in_the_same_words() -> None:
    (refusal,) = generation_refusals(replace(asked(cards=4), parameters={"tensor_parallel": 4}))
    assert "6 attention heads" in refusal.reason and refusal.hint


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_groups_are_a_table_of_all_ranks(data: int, pipeline: int, tensor: int) -> None:
    size = data * pipeline * tensor
    first = Layout(rank=0, world_size=size, tensor=tensor, pipeline=pipeline)
    layouts = [replace(first, rank=rank) for rank in range(size)]
    for kind, place, count in (
        ("tensor", "tensor_rank", tensor),
        ("pipeline", "stage", pipeline),
        ("data", "data_rank", data),
    ):
        groups = first.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(size))
        for layout in layouts:
            (own,) = (group for group in groups if layout.rank in group)
            assert own == layout.group(kind) and len(own) == count
            assert own[getattr(layout, place)] == layout.rank
    assert sum(layout.counts for layout in layouts) == first.data_size == data


def config(stage: int = 2, device: str = "cuda", trained: int = 1000, **more: Any) -> Any:
    training: Any = SimpleNamespace(
        device=device_for(device),
        precision="bf16",
        batch_size=8,
        micro_batches=2,
        layout=Layout(rank=0, world_size=4),
        trainable=lambda: [SimpleNamespace(numel=lambda: trained)],
        learning_rate=1e-4,
        max_gradient_norm=more.pop("max_gradient_norm", None),
    )
    return deepspeed_config(training, stage, **more)


@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_batches_fit_together_and_no_bucket_is_larger_than_what_learns(device, stage) -> None:
    """DeepSpeed allocates its buckets whole: of 500 million numbers by default. Stages 1 and 2
    gather what was updated in buckets, too; stage 3 gathers layer by layer."""
    names = ["reduce_bucket_size", "allgather_bucket_size"][: (0, 2, 2, 1)[stage]]
    for trained, most in ((1_000, 1_000), (10**10, 500_000_000)):
        made = config(device=device, stage=stage, trained=trained)
        zero = made["zero_optimization"]
        buckets = {name: value for name, value in zero.items() if name.endswith("bucket_size")}
        assert buckets == dict.fromkeys(names, most)
        # Exchanged beside the backward pass where the device can.
        assert zero["stage"] == stage and zero["overlap_comm"] == (device == "cuda" and stage > 1)
        # DeepSpeed refuses sizes that do not fit together.
        assert made["train_batch_size"] == 32 == 4 * 4 * 2
        assert made["train_micro_batch_size_per_gpu"] == 4
        assert made["gradient_accumulation_steps"] == 2
        assert json.loads(json.dumps(made)) == made


def test_gaudi_has_rules_of_its_own() -> None:
    """As HabanaAI's fork of DeepSpeed wants them."""
    two, three = config(device="hpu", stage=2), config(device="hpu", stage=3)
    for made in (two, three):
        assert made["bf16"] == {"enabled": True} and made["gradient_clipping"] == 0.0
        assert made["zero_optimization"]["contiguous_gradients"] is False
    assert two["zero_optimization"]["reduce_scatter"] is False
    assert three["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


def test_nothing_has_to_be_compiled() -> None:
    assert config(max_gradient_norm=0.5)["gradient_clipping"] == 0.5
    made = config(offload_optimizer=True, offload_parameters=True, stage=3)
    assert made["optimizer"]["params"]["torch_adam"] is True
    assert made["zero_force_ds_cpu_optimizer"] is False
    assert made["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "offload_param" not in config()["zero_optimization"]


def test_without_deepspeed_the_row_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="pip install deepspeed"):
        announce_deepspeed("cpu")


def test_every_job_with_deepspeed_has_its_choice_of_algorithms(monkeypatch) -> None:
    """DeepSpeed makes it once in a process; workers restore torch's after each job."""
    spoken: list[bool] = []

    def get_accelerator() -> None:
        if not spoken:
            spoken.append(True)
            torch.use_deterministic_algorithms(True)

    library: Any = ModuleType("deepspeed")
    library.accelerator = SimpleNamespace(get_accelerator=get_accelerator)
    monkeypatch.setitem(sys.modules, "deepspeed", library)
    monkeypatch.setattr("workloads.training.parallel.sharding.chosen_algorithms", [])
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for _ in range(2):
            torch.use_deterministic_algorithms(False)  # as a worker does after each job
            assert use_its_algorithms() and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


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


def test_stages_take_the_masks_of_their_own_layers() -> None:
    """Every second layer of gpt-oss sees a window, and three of six layers are a stage."""
    model = small_model("gpt_oss", num_hidden_layers=6, sliding_window=8, tie_word_embeddings=False)
    training = training_of(model)
    hidden, _ = checked(training, stages := stages_of(training, 2))
    assert hidden.shape == (2, 9, 32)
    ids = passed = torch.arange(20).unsqueeze(0)
    model.eval()
    for stage in stages:
        passed = stage.eval()(passed)
    assert torch.equal(passed, model(input_ids=ids, use_cache=False).logits)


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
