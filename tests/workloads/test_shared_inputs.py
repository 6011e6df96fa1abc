"""Adapters of layers that read the same input: together they are what peft computes one by one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear

from workloads.base import Unsupported
from workloads.training.adapter_products import Together, put_together

WIDTH = 6


class Layers(torch.nn.Module):
    """Two layers that read one input, and one that reads what they give; in place: as OLMo clips
    its queries."""

    def __init__(
        self, sizes: tuple[int, int], biased: tuple[bool, bool], in_place: bool = False
    ) -> None:
        super().__init__()
        self.in_place = in_place
        self.left = torch.nn.Linear(WIDTH, sizes[0], bias=biased[0])
        self.right = torch.nn.Linear(WIDTH, sizes[1], bias=biased[1])
        self.top = torch.nn.Linear(sum(sizes), 3)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        left, right = self.left(states), self.right(states)
        both = torch.cat([left.mul_(0.5) if self.in_place else left, right], -1)
        return self.top(both)


def adapted(layers: Layers, rank: int, **more: Any) -> Any:
    """The layers with adapters that change what comes out."""
    targets = ["left", "right", "top"]
    model = get_peft_model(layers, LoraConfig(r=rank, target_modules=targets, **more))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    return model


def passed(model: Any, states: torch.Tensor) -> list[torch.Tensor]:
    """Outputs, and the gradients of the inputs and of all that learns."""
    states = states.clone().requires_grad_()
    found = model(states)
    inputs = [states, *(p for p in model.parameters() if p.requires_grad)]
    return [found, *torch.autograd.grad(found.float().pow(2).sum(), inputs)]


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    biased=st.tuples(st.booleans(), st.booleans()),
    rank=st.integers(1, 4),
    half=st.booleans(),
    in_place=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_together_they_are_what_each_is(
    sizes: tuple[int, int],
    biased: tuple[bool, bool],
    rank: int,
    half: bool,
    in_place: bool,
    seed: int,
) -> None:
    """Outputs and gradients, whatever the sizes, biases and formats, of a model that changes them
    in place, too; afterwards the model is as it was."""
    torch.manual_seed(seed)
    kind = torch.bfloat16 if half else torch.float32
    model = adapted(Layers(sizes, biased, in_place).to(kind), rank)
    states = torch.randn(2, 5, WIDTH, dtype=kind)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = passed(model, states)
    groups, undo = put_together(model, lambda: model(states))
    assert groups == 2 and sum(type(each) is Together for each in model.modules()) == 3
    near = {"rtol": 0.1, "atol": 0.3} if half else {"rtol": 1e-4, "atol": 1e-3}
    for _ in range(2):
        for one, other in zip(passed(model, states), expected, strict=True):
            scale = max(float(other.detach().abs().max()), 1.0)
            torch.testing.assert_close(one / scale, other / scale, **near)
    undo()
    assert sum(type(each) is Linear for each in model.modules()) == 3
    assert all(p.equal(frozen[n]) for n, p in model.named_parameters())
    assert all(one.equal(other) for one, other in zip(passed(model, states), expected, strict=True))


def test_frozen_weights_are_held_once() -> None:
    """Those of a group lie in one tensor, of which each layer's is a part."""
    model = adapted(Layers((4, 2), (True, False)), 2)
    put_together(model, lambda: model(torch.randn(1, WIDTH)))
    left, right = (getattr(model.base_model.model, n).base_layer.weight for n in ("left", "right"))
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    assert left.shape == (4, WIDTH) and right.shape == (2, WIDTH)


def test_frozen_weights_are_held_once_afterwards() -> None:
    """A group's tensor goes, though the function that undoes it stays."""
    model = adapted(Layers((4, 2), (True, False)), 2)
    _, undo = put_together(model, lambda: model(torch.randn(1, WIDTH)))
    layers = [each for each in model.modules() if isinstance(each, Together)]
    whole = [weakref.ref(layer.group.weight) for layer in layers]
    undo()
    assert all(weight() is None for weight in whole)
    weights = [layer.base_layer.weight for layer in layers]
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)
    undo()  # nothing is left that it could change


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}])
def test_what_adds_more_than_two_products_is_refused(more: dict[str, Any]) -> None:
    """Rather than computed as if it did not."""
    model = adapted(Layers((4, 2), (True, True)), 2, **more)
    with pytest.raises(Unsupported, match="no layer has a plain LoRA"):
        put_together(model, lambda: model(torch.randn(1, WIDTH)))
