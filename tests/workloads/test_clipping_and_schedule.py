"""Gradient clipping and the learning-rate schedule: what transformers' Trainer does by default."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from finetuning_cases import asked, refuse
from hypothesis import given
from hypothesis import strategies as st

from workloads.devices import device_for
from workloads.registry import TASKS
from workloads.training.parallel.deepspeed import deepspeed_config
from workloads.training.technique import Training
from workloads.training.techniques.optimization import GradientClipping, Schedule
from workloads.training.techniques.precision import Autocast


def training(weights: torch.nn.Module, rate: float = 1.0) -> Training:
    """A training by plain gradient descent, in which a step is the gradient."""

    def update() -> None:
        for act in made.before_update:
            act()
        made.optimizer.step()

    made = Training(
        device=device_for("cpu"),
        task=TASKS["causal-lm"],
        cards=1,
        method="full",
        precision="fp32",
        model=weights,
        learning_rate=rate,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        loss=lambda logits, labels, kept: logits,
        backward=lambda loss: loss.backward(),
        update=update,
        steps=10,
    )
    return made


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=6),
    st.floats(0.125, 10, width=32),
    st.booleans(),
)
def test_gradients_together_are_no_longer_than_the_limit(
    slopes: list[float], limit: float, scaled: bool
) -> None:
    """Their direction stays, and shorter ones stay as they are; so with loss scaling, where the
    scaler hands gradients over only once they are what they are."""
    net = torch.nn.Linear(len(slopes), 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    one = training(net)
    GradientClipping(max_gradient_norm=limit).on_model(one)
    one.optimizer = one.make_optimizer(one.trainable())
    if scaled:
        Autocast(autocast="fp16").on_optimizer(one)
    one.backward((net.weight * torch.tensor([slopes])).sum())
    one.update()
    wanted = torch.tensor([slopes])
    wanted = wanted * min(1.0, limit / max(float(wanted.norm()), 1e-12))
    assert torch.allclose(-net.weight.detach(), wanted, rtol=1e-3, atol=1e-5)


@given(st.integers(1, 50), st.integers(1, 60), st.floats(1e-6, 1.0))
def test_the_linear_schedule_is_the_trainers(steps: int, whole: int, rate: float) -> None:
    """The rate of every step is that of transformers' scheduler over as many steps."""
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, whole)
    ours: Any = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{"lr": rate}]), learning_rate=rate, steps=whole
    )
    technique = Schedule(learning_rate_schedule="linear")
    for step in range(steps):
        assert ours.optimizer.param_groups[0]["lr"] == pytest.approx(scheduler.get_last_lr()[0])
        technique.after_step(ours, step)
        optimizer.step()
        scheduler.step()


def test_the_rates_of_a_long_training_are_those_of_its_beginning() -> None:
    """With schedule_steps a job of ten steps is the first ten of a hundred."""
    technique = Schedule(learning_rate_schedule="linear", schedule_steps=100)
    assert technique.rate(10, 1.0, 10) == pytest.approx(0.9)
    assert Schedule(learning_rate_schedule="linear").rate(10, 1.0, 10) == 0.0


def test_what_has_no_object_is_refused() -> None:
    """An end of a constant rate; clipping goes with every strategy."""
    (refusal,) = refuse(asked(schedule_steps=5))
    assert refusal.setting == "schedule_steps" and "linear" in refusal.reason
    for strategy in ("ddp", "zero1", "tensor-parallel"):
        assert not refuse(asked(max_gradient_norm=1.0, cards=2, strategy=strategy, method="full"))


def test_deepspeed_clips_by_itself() -> None:
    """The job's limit is in its configuration, and without one it clips as little as others."""
    base: dict[str, Any] = {"stage": 1, "precision": "bf16", "batch_size": 2, "micro_batches": 1}
    base |= {"data_size": 2, "trained": 10, "learning_rate": 1e-3}
    for device, limit, clipped in (
        ("cpu", 0.5, 0.5),
        ("cpu", None, 0.0),
        ("hpu", None, 0.0),
        ("hpu", 0.5, 0.5),
    ):
        config = deepspeed_config(device=device, max_gradient_norm=limit, **base)
        assert config["gradient_clipping"] == clipped
