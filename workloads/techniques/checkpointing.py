"""Gradient checkpointing."""

from __future__ import annotations

from typing import ClassVar

from workloads.base import Unsupported
from workloads.settings import setting
from workloads.techniques.base import Technique, Training


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


SPECS = (GradientCheckpointing,)
