"""Freezing."""

from __future__ import annotations

from typing import Any, ClassVar

from workloads.base import BadConfiguration
from workloads.finetuning_method import WHOLE_METHODS
from workloads.settings import setting
from workloads.techniques.base import Technique, Training


class Freezing(Technique):
    """Freezing: train only the upper part of a model.

    Lower layers and embeddings change least in fine-tuning. Frozen, they need no gradients and no
    optimizer state, and the backward pass stops above them, which saves their share of its
    arithmetic. Adapters leave the whole model frozen anyway, so this belongs to methods that train
    all of it.
    """

    name: ClassVar[str] = "freezing"
    title: ClassVar[str] = "freezing"
    order: ClassVar[int] = 50
    beside: ClassVar[Any] = dict.fromkeys(
        ("freeze_embeddings", "freeze_layers"), ("method", (None, *WHOLE_METHODS))
    )

    freeze_embeddings: bool = setting(
        False,
        role="work",
        always_in_id=True,
        description="Leave the embeddings as they are (methods full and qat).",
    )
    freeze_layers: int = setting(
        0,
        role="work",
        always_in_id=True,
        ge=0,
        description="Leave the first so many layers as they are (methods full and qat); of the "
        "encoder, where the model has one.",
    )

    def on_model(self, training: Training) -> None:
        import torch

        if self.freeze_embeddings:
            for module in training.model.modules():
                if isinstance(module, torch.nn.Embedding):
                    module.requires_grad_(False)
        if self.freeze_layers:
            layers = _layers(training.model)
            if self.freeze_layers >= len(layers):
                raise BadConfiguration(
                    f"freeze_layers is {self.freeze_layers}; the model has {len(layers)} layers, "
                    "and one at least has to learn"
                )
            for layer in layers[: self.freeze_layers]:
                layer.requires_grad_(False)


def _layers(model: Any) -> list[Any]:
    """The model's layers in order, the encoder's if it has one: the longest list of modules."""
    import torch

    below = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model
    lists: list[Any] = [m for m in below.modules() if isinstance(m, torch.nn.ModuleList)]
    if not lists:
        raise BadConfiguration(f"{type(model).__name__} has no list of layers to freeze")
    layers: list[Any] = list(sorted(lists, key=lambda modules: len(list(modules)))[-1])
    return layers


SPECS = (Freezing,)
