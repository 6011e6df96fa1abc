"""Gradient clipping."""

from __future__ import annotations

from typing import ClassVar

from workloads.settings import setting
from workloads.techniques.base import Technique, Training


class GradientClipping(Technique):
    """Gradient clipping: no step goes further than the usual ones.

    Now and then a batch has gradients far beyond those of others, and one step in their direction
    undoes many. Clipping scales all gradients down together where the root of the sum of their
    squares is above a limit. transformers' Trainer does so at 1 unless told, and Habana's examples
    of DeepSpeed do; here nothing is clipped unless a job says so, whatever the strategy.
    """

    name: ClassVar[str] = "clipping"
    title: ClassVar[str] = "gradient clipping"
    order: ClassVar[int] = 112

    max_gradient_norm: float | None = setting(
        None,
        role="work",
        gt=0,
        description="Scale gradients down where their norm, of all weights together, is above "
        "this. Left out: nothing is clipped.",
    )

    def on_model(self, training: Training) -> None:
        norm = training.max_gradient_norm = self.max_gradient_norm
        if norm is None:
            return
        import torch

        learning: list[torch.nn.Parameter] = []

        def clip() -> None:
            if not learning:  # what the cards have left of the model
                learning.extend(training.trainable())
            if training.layout.model_parallel > 1:
                from workloads.parallel import norm as split

                split.clip(training.model, learning, norm, training.pipeline)
            else:
                torch.nn.utils.clip_grad_norm_(learning, norm)

        training.before_update.append(clip)  # DeepSpeed clips by itself
        training.details["max_gradient_norm"] = f"{norm:g}"


SPECS = (GradientClipping,)
