"""Automatic mixed precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from workloads.base import JobDescription, Refusal
from workloads.settings import setting
from workloads.techniques.base import Technique, Training


class Autocast(Technique):
    """Automatic mixed precision: weights in one format, products in a shorter one.

    Under autocast, matrix products run in bf16 or fp16 while weights, sums and the optimizer keep
    the job's precision. fp16 has so few exponents that small gradients vanish: the loss is scaled
    up before the backward pass, gradients are scaled down before the update, and a step whose
    gradients overflowed is left out. bf16 has the exponents of fp32 and needs none of that.
    """

    name: ClassVar[str] = "autocast"
    title: ClassVar[str] = "mixed precision"
    order: ClassVar[int] = 70
    capabilities: ClassVar[Any] = {("autocast", "fp16"): "loss_scaling"}

    autocast: Literal["none", "bf16", "fp16"] = setting(
        "none",
        role="choice",
        always_in_id=True,
        description="Format of matrix products under automatic mixed precision, with weights in "
        "the job's precision: bf16, or fp16 with loss scaling; none computes in the precision.",
    )

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        if asked.precision == "fp16" and self.autocast != "fp16":
            yield Refusal(
                setting="precision",
                reason="training in plain fp16 ends in NaN, since small gradients become 0",
                hint="write autocast: fp16 (loss scaling), or precision: bf16",
            )
        if asked.precision == "bf16" and self.autocast == "fp16":
            yield Refusal(
                setting="autocast",
                reason="fp16 products of bf16 weights lose range and precision at once",
                hint="write autocast: bf16, or precision: fp32",
            )

    def on_model(self, training: Training) -> None:
        if self.autocast == "none":
            return
        import torch

        kind = training.device.spec.torch_type
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.autocast]
        training.around_forward.append(lambda: torch.autocast(kind, dtype=dtype))

    def on_optimizer(self, training: Training) -> None:
        if self.autocast != "fp16":
            return
        import torch

        scaler = torch.amp.GradScaler(training.device.spec.torch_type)
        training.stateful["loss scale"] = scaler

        def backward(loss: torch.Tensor) -> None:
            scaler.scale(loss).backward()

        def update() -> None:
            if training.before_update:  # they see gradients as they are
                scaler.unscale_(training.optimizer)
            for act in training.before_update:
                act()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad(set_to_none=True)

        training.backward, training.update = backward, update


SPECS = (Autocast,)
