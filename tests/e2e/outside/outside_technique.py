"""A technique: the gradient of every weight is one of three numbers."""

from typing import ClassVar

from workloads.settings import setting
from workloads.training.technique import Technique, Training


class SignOfGradients(Technique):
    """Return whether a step looks at the signs of gradients alone."""

    name: ClassVar[str] = "gradient-signs"
    title: ClassVar[str] = "signs of gradients"
    order: ClassVar[int] = 115  # what applies gradients is made, nothing is compiled yet

    gradient_signs: bool = setting(
        False, role="choice", description="Take the sign of each gradient for the gradient."
    )

    def on_optimizer(self, training: Training) -> None:
        if not self.gradient_signs:
            return
        update = training.update

        def signed() -> None:
            for parameter in training.trainable():
                parameter.grad.sign_()
            training.details["gradient_signs"] = "taken"
            update()

        training.update = signed
