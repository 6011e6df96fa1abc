"""Refusals of the plan for jobs on several cards, the layout of ranks, and DeepSpeed's
configuration: all pure."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workloads.base import JobDescription, Unsupported
from workloads.devices import device_for
from workloads.training.parallel.deepspeed import announce, deepspeed_config, use_its_algorithms
from workloads.training.parallel.layout import Layout, generation_refusals


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
    for groups in (first.groups("tensor"), first.groups("pipeline"), first.groups("data")):
        assert sorted(rank for group in groups for rank in group) == list(range(size))
    for layout in layouts:
        (tensors,) = (group for group in first.groups("tensor") if layout.rank in group)
        (stages,) = (group for group in first.groups("pipeline") if layout.rank in group)
        (copies,) = (group for group in first.groups("data") if layout.rank in group)
        assert tensors[layout.tensor_rank] == layout.rank and len(tensors) == tensor
        assert stages[layout.stage] == layout.rank and len(stages) == pipeline
        assert copies[layout.data_rank] == layout.rank and len(copies) == data
    assert sum(layout.counts for layout in layouts) == first.data_size == data


def config(
    stage: int = 2, device: str = "cuda", trained: int = 1_000_000, **more: Any
) -> dict[str, Any]:
    """A configuration that is generated for four cards."""
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
    """torch's optimizer everywhere, also where its state is offloaded; gradients are clipped where
    the job has a limit."""
    assert config(max_gradient_norm=0.5)["gradient_clipping"] == 0.5
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


def test_every_job_with_deepspeed_has_its_choice_of_algorithms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Gaudi DeepSpeed wants the deterministic ones, and says so once in a process: the second
    job has them as the first."""
    spoken: list[bool] = []

    def get_accelerator() -> None:
        if not spoken:
            spoken.append(True)
            torch.use_deterministic_algorithms(True)

    library: Any = ModuleType("deepspeed")
    library.accelerator = SimpleNamespace(get_accelerator=get_accelerator)
    monkeypatch.setitem(sys.modules, "deepspeed", library)
    monkeypatch.setattr("workloads.training.parallel.deepspeed.chosen_algorithms", [])
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for _ in range(2):
            torch.use_deterministic_algorithms(False)  # as a worker does after each job
            assert use_its_algorithms() and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)
