"""Gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from workloads.base import JobDescription, Refusal
from workloads.settings import setting
from workloads.techniques.base import DataPlan, Technique


class GradientAccumulation(Technique):
    """Gradient accumulation: a batch that does not fit, in several passes.

    The batch of an optimizer step is cut into micro-batches whose gradients are added up. Memory
    for activations falls with their number, and short samples are padded less, since they meet
    fewer long ones. The loss is divided by the tokens of the whole batch, so nothing else changes.
    """

    name: ClassVar[str] = "accumulation"
    title: ClassVar[str] = "gradient accumulation"
    order: ClassVar[int] = 40

    gradient_accumulation: int = setting(
        1,
        role="choice",
        always_in_id=True,
        ge=1,
        description="Into how many micro-batches the batch of an optimizer step is cut. batch_size "
        "stays the samples per card and optimizer step, so this changes memory, not the training.",
    )

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        parts = self.gradient_accumulation
        if parts == 1:
            return
        if not isinstance(asked.batch_size, int):
            yield Refusal(
                setting="gradient_accumulation",
                reason=f"batch_size {asked.batch_size} looks for what fits in one pass",
                hint="write the batch size as a number, or gradient_accumulation: 1",
            )
        elif asked.batch_size % parts:
            divisors = [n for n in range(1, asked.batch_size + 1) if asked.batch_size % n == 0]
            yield Refusal(
                setting="gradient_accumulation",
                reason=f"a batch of {asked.batch_size} cannot be cut into {parts} equal parts",
                hint=f"it can be cut into {', '.join(map(str, divisors[:20]))}",
            )

    def on_data(self, data: DataPlan) -> None:
        data.micro_batches = self.gradient_accumulation


SPECS = (GradientAccumulation,)
