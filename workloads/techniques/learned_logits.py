"""Logits of learned positions."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from workloads.base import JobDescription, Refusal, Unsupported
from workloads.parallel.strategy_rules import whole_weights_refusals
from workloads.settings import setting
from workloads.techniques.base import Technique, Training
from workloads.techniques.compilation import compiles_whole
from workloads.techniques.padding import one_shape


class LearnedLogits(Technique):
    """Logits of learned positions: the last layer computes only what the loss looks at.

    The last layer of a language model is one product with the whole vocabulary, for every position,
    and the loss makes several passes over what comes out. Yet a prompt's tokens are not learned,
    and padding is not. With *learned* only the positions go through the last layer at which some
    sample of the micro-batch has something to learn; the loss is the same sum. With *chunked* those
    of a hundred positions at a time, whose part of the loss and of the gradients is computed before
    the next.
    """

    name: ClassVar[str] = "learned-logits"
    title: ClassVar[str] = "logits of learned positions"
    order: ClassVar[int] = 100
    needs: ClassVar[tuple[str, ...]] = ("positions",)
    capabilities: ClassVar[Any] = {"logits": "dynamic_shapes"}

    logits: Literal["all", "learned", "chunked"] = setting(
        "all",
        role="choice",
        always_in_id=True,
        description="Positions that go through the model's last layer: all, or those at which a "
        "sample of the micro-batch has something to learn. Shapes then change from step to step. "
        "chunked: each learned position alone, some at a time together with their loss.",
    )

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        if self.logits == "all":
            return
        of_all = self.logits == "chunked" and one_shape(asked.parameters)
        if compiles_whole(asked.parameters) and not of_all:
            yield Refusal(
                setting="logits",
                reason="with torch_compile every new number of positions would be compiled",
                hint="write logits: all, or compile_scope: layers",
            )
        if self.logits == "chunked":
            yield from self._chunked_refusals(asked)

    def _chunked_refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        if asked.parameters.get("autocast", "none") != "none":
            yield Refusal(
                setting="logits",
                reason="chunked computes the last layer in the precision of its weights, outside "
                "of autocast",
                hint="write logits: learned, or autocast: none",
            )
        if str(asked.parameters.get("method", "")).startswith("qat"):
            yield Refusal(
                setting="logits",
                reason="chunked leaves the last layer out of the model, which QAT converts whole",
                hint="write logits: learned",
            )
        yield from whole_weights_refusals(
            asked, "logits", value=self.logits, instead="logits: learned"
        )

    def on_model(self, training: Training) -> None:
        if self.logits == "all":
            return
        inner = _innermost(training.model)
        if self.logits == "chunked":
            from workloads.training.chunked_loss import without_last_layer

            training.loss = without_last_layer(inner, training.device.torch_device)
            return
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


SPECS = (LearnedLogits,)
