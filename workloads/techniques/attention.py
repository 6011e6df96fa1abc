"""Attention implementation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from workloads.attention_packages import make_ready, refusals
from workloads.base import JobDescription, Refusal
from workloads.settings import setting
from workloads.techniques.base import Loading, Technique, Training


class Attention(Technique):
    """Attention implementation: the code that computes softmax(QKᵀ)V, and how much it writes out.

    *Eager* attention writes the whole score matrix, positions × positions for every head, which
    grows with the square of the length. *sdpa*, PyTorch's scaled_dot_product_attention, picks a
    kernel that works in tiles and keeps none of it. *flash_attention_2* (package flash-attn) and
    *xformers* bring such kernels of their own, for NVIDIA cards. All of them compute the same.
    """

    name: ClassVar[str] = "attention"
    title: ClassVar[str] = "attention implementation"
    order: ClassVar[int] = 90

    attention: Literal["sdpa", "eager", "flash_attention_2", "xformers"] = setting(
        "sdpa",
        role="choice",
        loads=True,
        always_in_id=True,
        description="Attention implementation: sdpa is PyTorch's scaled_dot_product_attention, "
        "eager plain matrix products, flash_attention_2 and xformers the kernels of those packages "
        "(CUDA only).",
    )

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        yield from refusals(asked)
        half = asked.precision != "fp32" or asked.parameters.get("autocast", "none") != "none"
        if self.attention == "flash_attention_2" and not half:
            yield Refusal(
                setting="attention",
                reason="flash_attention_2 computes in fp16 and bf16 only, and this job in fp32",
                hint="write precision: bf16, or autocast: bf16",
            )

    def before_load(self, loading: Loading) -> None:
        make_ready(self.attention)
        loading.model_arguments["attn_implementation"] = self.attention
        loading.checks.append(self._check)

    def _check(self, model: Any, tokenizer: Any) -> None:
        from workloads.models.loading import check_attention

        check_attention(model, self.attention)

    def on_model(self, training: Training) -> None:
        training.details["attention"] = self.attention


SPECS = (Attention,)
