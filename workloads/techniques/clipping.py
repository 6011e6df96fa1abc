"""Gradient clipping: no step goes further than the usual ones.

Now and then a batch has gradients far beyond those of others, and one step in their direction
undoes many. Clipping scales all gradients down together where the root of the sum of their squares
is above a limit. transformers' Trainer does so at 1 unless told; here nothing is clipped unless a
job says so, but for what a vendor prescribes for DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from workloads.parallel.layout import model_parallel_size
from workloads.refusal import Asked, Refusal
from workloads.settings import setting
from workloads.techniques.base import Technique, Training


class GradientClipping(Technique):
    """Limit of the norm of all gradients together."""

    name: ClassVar[str] = "clipping"
    title: ClassVar[str] = "gradient clipping"
    order: ClassVar[int] = 112

    max_gradient_norm: float | None = setting(
        None,
        role="work",
        gt=0,
        description="Scale gradients down where their norm, of all weights together, is above "
        "this. Left out: nothing is clipped, but for what a vendor prescribes for DeepSpeed.",
    )

    def refusals(self, asked: Asked) -> Iterable[Refusal]:
        divided = model_parallel_size(asked.parameters, asked.cards) > 1
        if self.max_gradient_norm is not None and divided:
            yield Refusal(
                setting="max_gradient_norm",
                reason="this version has no norm of gradients over parts of a model",
                hint="write strategy: ddp, or leave it out",
                unsupported=True,
            )

    def on_model(self, training: Training) -> None:
        norm = training.max_gradient_norm = self.max_gradient_norm
        if norm is None:
            return
        import torch

        def clip() -> None:
            torch.nn.utils.clip_grad_norm_(training.trainable(), norm)

        training.before_update.append(clip)  # DeepSpeed clips by itself
        training.details["max_gradient_norm"] = f"{norm:g}"


SPEC = GradientClipping
