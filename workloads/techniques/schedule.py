"""Learning-rate schedule."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from workloads.settings import setting
from workloads.techniques.base import Technique, Training


class Schedule(Technique):
    """Learning-rate schedule: large steps first, small ones at the end.

    With *linear* the rate falls from step to step on a straight line that would reach 0 after the
    last one, which is what transformers' Trainer does unless told. A measured job has few steps of
    a long training: ``schedule_steps`` says how long the whole would be, so that its rates are
    those of the beginning.
    """

    name: ClassVar[str] = "schedule"
    title: ClassVar[str] = "learning-rate schedule"
    beside: ClassVar[Any] = {"schedule_steps": ("learning_rate_schedule", ("linear",))}
    order: ClassVar[int] = 135  # sets the rate of the optimizer that the strategy has made

    learning_rate_schedule: Literal["constant", "linear"] = setting(
        "constant",
        role="work",
        description="constant keeps learning_rate; linear lets it fall on a straight line to 0 "
        "after the last step.",
    )
    schedule_steps: int | None = setting(
        None,
        role="work",
        ge=1,
        description="For linear: after how many steps the rate is 0. Left out: after those of the "
        "job, warm-up included.",
    )

    def rate(self, step: int, first: float, steps: int) -> float:
        """The learning rate of a step (from 0), of the first step's and the number of all."""
        if self.learning_rate_schedule == "constant":
            return first
        return first * max(1 - step / (self.schedule_steps or steps), 0.0)

    def on_model(self, training: Training) -> None:
        if self.learning_rate_schedule != "constant":
            steps = self.schedule_steps or training.steps
            training.details["learning_rate_schedule"] = f"linear to 0 after {steps} steps"

    def after_step(self, training: Training, step: int) -> None:
        if self.learning_rate_schedule == "constant":
            return
        rate = self.rate(step + 1, training.learning_rate, training.steps)
        for group in training.optimizer.param_groups:
            group["lr"] = rate


SPECS = (Schedule,)
