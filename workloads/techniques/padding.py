"""Padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from workloads.base import JobDescription, Refusal
from workloads.settings import setting
from workloads.techniques.base import DataPlan, Technique, Training
from workloads.techniques.compilation import compiles_whole
from workloads.training import rows
from workloads.training.samples import Learnable


class Padding(Technique):
    """Padding: samples of unlike length share a rectangle of tensors.

    Rows of one tensor have one length, so shorter samples are filled up, and the card works on the
    filling as on anything else. With advertisements of mixed length less than half of the positions
    are real. To waste fewer: pad only to the longest sample of the micro-batch (dynamic), let
    samples of like length meet (uniform-length), or write several samples into one row (packing),
    where each starts again at position 0 and attends to nothing but itself. A fixed length wastes
    most, and is what graph compilers like, since every step has the same shape.
    """

    name: ClassVar[str] = "padding"
    title: ClassVar[str] = "padding"
    order: ClassVar[int] = 20
    needs: ClassVar[tuple[str, ...]] = ("pack",)
    beside: ClassVar[Any] = {
        "length_window": ("padding", ("uniform-length",)),
        "packed_attention": ("padding", ("packing",)),
        "packed_length": ("packed_attention", ("apart",)),
    }
    capabilities: ClassVar[Any] = {"packed_attention": "dynamic_shapes"}

    padding: Literal["dynamic", "fixed", "uniform-length", "packing"] = setting(
        "dynamic",
        role="choice",
        always_in_id=True,
        description="dynamic pads to the longest sample of the micro-batch, fixed to max_length; "
        "uniform-length sorts samples within windows so that like lengths meet; packing writes "
        "several samples into one row of at most max_length, separated by position_ids.",
    )
    length_window: int = setting(
        50,
        role="choice",
        always_in_id=True,
        ge=2,
        description="For uniform-length: sort within windows of so many batches.",
    )

    packed_attention: Literal["masked", "apart"] = setting(
        "masked",
        role="choice",
        always_in_id=True,
        description="For packing: masked computes attention over whole rows under a mask, apart "
        "over each packed sample by itself (varlen attention on CUDA cards, else one call a "
        "sample); these then lie in one row, however long, so that nothing is padded.",
    )

    packed_length: Literal["exact", "longest"] = setting(
        "exact",
        role="choice",
        description="For packed_attention apart: each step's row has the length of its samples, or "
        "is filled up to that of the longest step, so that all have one shape and torch_compile "
        "compiles the whole model once.",
    )

    _attention: list[Any] = PrivateAttr(default_factory=list)  # SampleAttention, once it is used

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        if self.packed_attention != "apart":
            return
        if asked.parameters.get("attention", "sdpa") != "sdpa":
            yield Refusal(
                setting="packed_attention",
                reason="apart is PyTorch's own attention; the job asks for another one",
                hint="leave attention out, or write packed_attention: masked",
            )
        if compiles_whole(asked.parameters) and not one_shape(asked.parameters):
            yield Refusal(
                setting="packed_attention",
                reason="with torch_compile every new length of a row would be compiled",
                hint="write packed_length: longest, compile_scope: layers, or packed_attention: "
                "masked",
            )

    def on_data(self, data: DataPlan) -> None:
        if self.padding == "fixed":
            collate = data.task.function("collate")
            data.collate = lambda samples: collate(samples, data.form, fixed=True)
        elif self.padding == "packing":
            pack = data.task.function("pack")
            one_row = self.packed_attention == "apart"
            data.collate = lambda samples: pack(samples, data.form, one_row=one_row)
            if self.packed_length == "longest":
                self._one_shape(data)
        elif self.padding == "uniform-length":
            data.arrange = self._by_length

    def _by_length(self, samples: Sequence[Learnable], batch: int) -> list[list[int]]:
        return rows.uniform_length(samples, batch, self.length_window)

    def _one_shape(self, data: DataPlan) -> None:
        """Fill each step's row up to the longest, which is known when samples become batches."""
        arrange, collate, lengths = data.arrange, data.collate, [0]

        def arranged(samples: Sequence[Learnable], batch: int) -> list[list[int]]:
            batches = arrange(samples, batch)
            lengths[0] = rows.longest_row(samples, batches, data.cards, data.micro_batches)
            data.details["packed_length"] = str(lengths[0])
            return batches

        data.arrange = arranged
        data.collate = lambda samples: rows.filled_up(
            collate(samples), lengths[0], data.form.pad_token_id
        )

    def on_model(self, training: Training) -> None:
        if self.packed_attention == "apart":
            from workloads.training import sample_attention

            self._attention.append(sample_attention.register())
            training.model.config._attn_implementation = sample_attention.NAME
        if self.padding == "packing":
            training.task.function("check_packing")(training.model, training.device)

    def after_steps(self, training: Training) -> None:
        for attention in self._attention:
            training.details["packed_attention"] = attention.method


def one_shape(parameters: Mapping[str, Any]) -> bool:
    """Tell if all steps of a job with these parameters have inputs of one shape."""
    return parameters.get("padding") == "fixed" or parameters.get("packed_length") == "longest"


SPECS = (Padding,)
