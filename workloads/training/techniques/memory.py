"""Techniques that save memory: gradient checkpointing, freezing, and release between steps."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from pydantic import PrivateAttr

from workloads.base import BadConfiguration, Unsupported
from workloads.settings import setting
from workloads.training.methods import WHOLE_METHODS
from workloads.training.technique import Technique, Training


class GradientCheckpointing(Technique):
    """Gradient checkpointing: memory for time.

    The backward pass needs what every layer computed on the way forward. With checkpointing only
    the inputs of layers are kept, and each layer runs forward once more when its turn comes: about
    a third more arithmetic, and memory for activations that hardly grows with depth. Gradients are
    the same.
    """

    name: ClassVar[str] = "checkpointing"
    title: ClassVar[str] = "gradient checkpointing"
    order: ClassVar[int] = 60

    gradient_checkpointing: bool = setting(
        False,
        role="choice",
        always_in_id=True,
        description="Keep only the inputs of layers on the way forward, and compute the rest "
        "again on the way back: less memory, about a third more arithmetic.",
    )

    def on_model(self, training: Training) -> None:
        if not self.gradient_checkpointing:
            return
        model = training.model
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise Unsupported(f"{type(model).__name__} has no gradient checkpointing")
        # The other kind (reentrant) drops the gradients of adapters below a frozen embedding.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


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


class MemoryRelease(Technique):
    """Releasing memory between steps: order for time.

    Allocators keep what a step has freed, for the next one. Where steps differ in length, blocks of
    one step do not fit the next, and the kept memory grows until a card is full of holes. Giving it
    all back after a step costs the time of asking for it again; where memory is tight that can be
    the difference between running and not.
    """

    name: ClassVar[str] = "memory-release"
    title: ClassVar[str] = "memory release between steps"
    order: ClassVar[int] = 160

    release_memory_every: int = setting(
        0,
        role="choice",
        always_in_id=True,
        ge=0,
        description="Give memory that is not in use back to the device (on CPUs to the system) "
        "after every so many optimizer steps, within their time; 0: never.",
    )

    _seconds: list[float] = PrivateAttr(default_factory=list)

    def after_step(self, training: Training, step: int) -> None:
        if not self.release_memory_every or (step + 1) % self.release_memory_every:
            return
        began = time.perf_counter()
        training.device.release_memory()
        self._seconds.append(time.perf_counter() - began)

    def after_steps(self, training: Training) -> None:
        if self.release_memory_every:
            training.details["memory_releases"] = str(len(self._seconds))
            training.details["memory_release_s"] = f"{sum(self._seconds):.6g}"


SPECS = (GradientCheckpointing, Freezing, MemoryRelease)
