"""Padding: how samples of unlike length share a rectangle of tensors.

Rows of one tensor have one length, so shorter samples are filled up, and the card works on the
filling as on anything else. With advertisements of mixed length less than half of the positions
are real. To waste fewer: pad only to the longest sample of the micro-batch (dynamic), let samples
of like length meet (uniform-length), or write several samples into one row (packing), where each
starts again at position 0 and attends to nothing but itself. A fixed length wastes most, and is
what graph compilers like, since every step has the same shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from workloads.refusal import Asked, Refusal
from workloads.techniques.base import DataPlan, Technique, Training
from workloads.training import rows
from workloads.training.samples import TrainingSample


class Padding(Technique):
    """How samples become rows."""

    title: ClassVar[str] = "padding"

    padding: Literal["dynamic", "fixed", "uniform-length", "packing"] = Field(
        default="dynamic",
        description="dynamic pads to the longest sample of the micro-batch, fixed to max_length; "
        "uniform-length sorts samples within windows so that like lengths meet; packing writes "
        "several samples into one row of at most max_length, separated by position_ids.",
    )
    length_window: int = Field(
        default=50,
        ge=2,
        description="For uniform-length: sort within windows of so many batches.",
    )

    def refusals(self, asked: Asked) -> Iterable[Refusal]:
        usual = type(self).model_fields["length_window"].default
        if self.length_window != usual and self.padding != "uniform-length":
            yield Refusal(
                setting="length_window",
                reason=f"padding {self.padding} does not sort samples",
                hint="write padding: uniform-length, or leave length_window out",
            )

    def on_data(self, data: DataPlan) -> None:
        pad, longest = data.pad_token_id, data.max_length
        if self.padding == "fixed":
            data.collate = lambda samples: rows.padded(samples, pad, to_length=longest)
        elif self.padding == "packing":
            data.collate = lambda samples: rows.packed(samples, pad, longest)
        elif self.padding == "uniform-length":
            data.arrange = self._by_length

    def _by_length(self, samples: Sequence[TrainingSample], batch: int) -> list[list[int]]:
        return rows.uniform_length(samples, batch, self.length_window)

    def on_model(self, training: Training) -> None:
        if self.padding == "packing":
            rows.check_packing(training.model, training.device)
