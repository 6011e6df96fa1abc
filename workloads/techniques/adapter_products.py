"""Products of adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from workloads.base import JobDescription, Refusal
from workloads.parallel.strategy_rules import whole_weights_refusals
from workloads.settings import setting
from workloads.techniques.base import Technique, Training


class AdapterProducts(Technique):
    """Products of adapters: each layer's by itself, or those of one input together.

    Query, key and value read the same input, and each has an adapter of two thin matrices. Layer by
    layer that is six thin products, three scalings and three sums beside the three frozen products;
    a thin product costs more to start than to compute. *together* makes of them one frozen product
    and two thin ones, with gradients for the adapters alone. The sums are taken in another order,
    else nothing changes.
    """

    name: ClassVar[str] = "adapter-products"
    title: ClassVar[str] = "adapter products"
    order: ClassVar[int] = 106  # of the layers as sparsity has left them
    needs: ClassVar[tuple[str, ...]] = ("pack",)
    beside: ClassVar[Any] = {"adapter_products": ("method", ("lora",))}

    adapter_products: Literal["each", "together"] = setting(
        "each",
        role="choice",
        description="For method lora: each layer computes its adapter by itself, or layers that "
        "read the same input (query, key and value) compute theirs together: one frozen product "
        "and two thin ones for all of them.",
    )

    _undo: list[Callable[[], None]] = PrivateAttr(default_factory=list)

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        if self.adapter_products == "each":
            return ()
        return whole_weights_refusals(asked, "adapter_products", value=self.adapter_products)

    def on_model(self, training: Training) -> None:
        if self.adapter_products == "each":
            return
        import torch

        from workloads.training.shared_inputs import put_together

        def look() -> Any:
            ids = torch.tensor([[3, 4, 5, 6]], device=training.device.torch_device)
            pairs = training.model.config.is_encoder_decoder
            decoder = {"decoder_input_ids": ids} if pairs else {}
            return training.model(input_ids=ids, use_cache=False, **decoder)

        groups, undo = put_together(training.model, look)
        self._undo.append(undo)
        training.details["adapter_products"] = f"together, {groups} inputs"

    def after_steps(self, training: Training) -> None:
        for undo in self._undo:
            undo()


SPECS = (AdapterProducts,)
