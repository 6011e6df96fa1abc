"""Refusals of the plan for jobs on several cards, the layout of ranks, and DeepSpeed's
configuration: all pure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from finetuning_cases import asked, refuse
from hypothesis import given
from hypothesis import strategies as st

from workloads.base import JobDescription, Unsupported
from workloads.training.parallel.deepspeed import announce, deepspeed_config
from workloads.training.parallel.layout import Layout, generation_refusals


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        ({"cards": 1, "strategy": "ddp"}, "strategy", "has one card"),
        ({"cards": 1, "offload_optimizer": True}, "offload_optimizer", "has one card"),
        ({"cards": 1, "tensor_parallel": 2}, "tensor_parallel", "has one card"),
        ({"cards": 4, "strategy": "tensor-parallel"}, "strategy", "6 attention heads cannot"),
        ({"cards": 4, "tensor_parallel": 3}, "tensor_parallel", "4 cards cannot be divided"),
        (
            {"cards": 4, "strategy": "tensor-parallel", "tensor_parallel": 2},
            "tensor_parallel",
            "over all 4 cards",
        ),
        ({"cards": 2, "offload_optimizer": True}, "offload_optimizer", "ddp keeps everything"),
        (
            {"cards": 2, "strategy": "zero2", "offload_parameters": True},
            "offload_parameters",
            "zero2 keeps everything",
        ),
        (
            {"cards": 2, "batch_size": 3, "gradient_accumulation": 2},
            "gradient_accumulation",
            "a batch of 3",
        ),
    ],
)
def test_what_contradicts_itself_is_a_mistake_in_the_grid(
    changes: dict[str, Any], setting: str, words: str
) -> None:
    """Refused before anything starts, with what would be right."""
    (refusal,) = refuse(asked(**changes))
    assert refusal.setting == setting and words in refusal.reason and refusal.hint
    assert not refusal.unsupported


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"strategy": "tensor-parallel", "method": "dora"}, "method"),
        ({"strategy": "tensor-parallel", "save_adapter": "a"}, "save_adapter"),
        ({"strategy": "zero3", "method": "qlora"}, "method"),
        ({"strategy": "zero3", "method": "qat"}, "method"),
        ({"strategy": "zero1", "autocast": "bf16"}, "autocast"),
        ({"strategy": "zero1", "optimizer": "adafactor"}, "optimizer"),
        ({"strategy": "zero2", "tensor_parallel": 2}, "tensor_parallel"),
    ],
)
def test_what_this_version_lacks_becomes_a_row(changes: dict[str, Any], setting: str) -> None:
    """It makes sense, so it is no mistake."""
    (refusal,) = refuse(asked(cards=2, **changes))
    assert refusal.setting == setting and refusal.unsupported


@pytest.mark.parametrize("cards", [1, 2, 4, 8])
def test_without_a_strategy_any_number_of_cards_will_do(cards: int) -> None:
    """So that `cards: [1, 2, 4, 8]` can be an axis."""
    assert refuse(asked(cards=cards)) == ()


@pytest.mark.parametrize(
    ("cards", "tensor", "words"),
    [(1, 2, "has one card"), (4, 4, "6 attention heads"), (4, 3, "cannot be divided")],
)
def test_text_generation_is_refused_in_the_same_words(cards: int, tensor: int, words: str) -> None:
    """The same rules for the same splitting."""
    job = JobDescription(
        model="tiny-chatglm3",
        dataset="english-prompts",
        precision="bf16",
        device="hpu",
        batch_size=1,
        cards=cards,
        parameters={"tensor_parallel": tensor},
        engine="transformers",
    )
    (refusal,) = generation_refusals(job)
    assert words in refusal.reason and refusal.hint


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_groups_are_a_table_of_all_ranks(data: int, pipeline: int, tensor: int) -> None:
    """Every rank is in one group of each kind, at its own place, and one rank of those that share a
    part of the batch counts."""
    size = data * pipeline * tensor
    layouts = [
        Layout(rank=rank, world_size=size, tensor=tensor, pipeline=pipeline) for rank in range(size)
    ]
    first = layouts[0]
    for groups in (first.tensor_groups(), first.pipeline_groups(), first.data_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(size))
    for layout in layouts:
        (tensors,) = (group for group in first.tensor_groups() if layout.rank in group)
        (stages,) = (group for group in first.pipeline_groups() if layout.rank in group)
        (copies,) = (group for group in first.data_groups() if layout.rank in group)
        assert tensors[layout.tensor_rank] == layout.rank and len(tensors) == tensor
        assert stages[layout.stage] == layout.rank and len(stages) == pipeline
        assert copies[layout.data_rank] == layout.rank and len(copies) == data
    assert sum(layout.counts for layout in layouts) == first.data_size == data


def config(**changes: Any) -> dict[str, Any]:
    """A generated configuration."""
    settings: dict[str, Any] = {
        "stage": 2,
        "device": "cuda",
        "precision": "bf16",
        "batch_size": 8,
        "micro_batches": 2,
        "data_size": 4,
        "trained": 1_000_000,
        "learning_rate": 1e-4,
    }
    return deepspeed_config(**settings | changes)


@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_bucket_is_larger_than_what_learns(device: str, stage: int) -> None:
    """DeepSpeed allocates its buckets whole: of 500 million numbers, unless told. Stages 1 and 2
    gather what was updated in buckets, too; stage 3 gathers layer by layer."""
    names = ["reduce_bucket_size", "allgather_bucket_size"][: (0, 2, 2, 1)[stage]]
    for trained, most in ((1_000, 1_000), (10**10, 500_000_000)):
        zero = config(device=device, stage=stage, trained=trained)["zero_optimization"]
        buckets = {name: value for name, value in zero.items() if name.endswith("bucket_size")}
        assert buckets == dict.fromkeys(names, most)


@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_batch_sizes_fit_together(device: str, stage: int) -> None:
    """DeepSpeed refuses a configuration in which they do not."""
    made = config(device=device, stage=stage)
    assert made["train_batch_size"] == 32 == 4 * 4 * 2
    assert made["train_micro_batch_size_per_gpu"] == 4
    assert made["gradient_accumulation_steps"] == 2
    assert made["zero_optimization"]["stage"] == stage
    assert json.loads(json.dumps(made)) == made


def test_gaudi_has_rules_of_its_own() -> None:
    """As HabanaAI's fork of DeepSpeed wants them."""
    two, three = config(device="hpu", stage=2), config(device="hpu", stage=3)
    for made in (two, three):
        assert made["bf16"] == {"enabled": True} and made["gradient_clipping"] == 0.0
        assert made["zero_optimization"]["contiguous_gradients"] is False
        assert made["zero_optimization"]["overlap_comm"] is False
    assert two["zero_optimization"]["reduce_scatter"] is False
    assert three["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_exchanged_beside_the_backward_pass_from_stage_two_on(stage: int) -> None:
    """Where the device can: on a CPU and on Gaudi they are exchanged after it."""
    overlapped = {
        device: config(device=device, stage=stage)["zero_optimization"]["overlap_comm"]
        for device in ("cpu", "cuda", "hpu")
    }
    assert overlapped == {"cpu": False, "cuda": stage > 1, "hpu": False}


def test_nothing_has_to_be_compiled() -> None:
    """torch's optimizer everywhere, also where its state is offloaded."""
    made = config(offload_optimizer=True, offload_parameters=True, stage=3)
    assert made["optimizer"]["params"]["torch_adam"] is True
    assert made["zero_force_ds_cpu_optimizer"] is False
    assert made["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "offload_param" not in config()["zero_optimization"]


def test_without_deepspeed_the_row_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'nightgrid\[deepspeed\]'"):
        announce("cpu")
