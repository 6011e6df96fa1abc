"""Logits of learned positions: the last layer computes only what the loss looks at.

The last layer of a language model is one product with the whole vocabulary, for every position,
and the loss makes several passes over what comes out. Yet a prompt's tokens are not learned, and
padding is not. With *learned* only the positions go through the last layer at which some sample of
the micro-batch has something to learn; the loss is the same sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from workloads.errors import Unsupported
from workloads.refusal import Asked, Refusal
from workloads.settings import setting
from workloads.techniques.base import Technique, Training


class LearnedLogits(Technique):
    """Choice of the positions that go through the last layer."""

    name: ClassVar[str] = "learned-logits"
    title: ClassVar[str] = "logits of learned positions"
    order: ClassVar[int] = 100
    needs: ClassVar[tuple[str, ...]] = ("positions",)

    logits: Literal["all", "learned"] = setting(
        "all",
        role="choice",
        always_in_id=True,
        description="Positions that go through the model's last layer: all, or those at which a "
        "sample of the micro-batch has something to learn. Shapes then change from step to step.",
    )

    def refusals(self, asked: Asked) -> Iterable[Refusal]:
        if self.logits == "all":
            return
        if not asked.on.can("dynamic_shapes"):
            yield Refusal(
                setting="logits",
                reason=f"shapes that change with every step are compiled anew on {asked.on.title}",
                unsupported=True,
            )
        if asked.parameters.get("torch_compile"):
            yield Refusal(
                setting="logits",
                reason="with torch_compile every new number of positions would be compiled",
                hint="write logits: all, or torch_compile: false",
            )

    def on_model(self, training: Training) -> None:
        if self.logits == "all":
            return
        inner = _innermost(training.model)
        if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
            raise Unsupported(
                f"logits learned: {type(inner).__name__} always computes the logits of all "
                "positions; write logits: all"
            )
        training.positions = training.task.function("positions")


def _innermost(model: Any) -> Any:
    """The language model below an adapter."""
    get = getattr(model, "get_base_model", None)
    return get() if get is not None else model


SPEC = LearnedLogits
