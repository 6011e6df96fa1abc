"""Stages of a decoder: the model as it stands, cut between layers.

A stage is a shallow copy of the decoder with some of its layers: the first has the embeddings, the
last the norm and the output layer, and each computes its own mask and rotary tables. That a model's
code reads nothing else is tried out before anything is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from workloads.base import Unsupported
from workloads.techniques.base import Training


class Stage(nn.Module):
    """Some layers of a decoder; the first stage takes ids, the last one gives logits."""

    def __init__(self, body: nn.Module, training: Training, *, first: bool, last: bool) -> None:
        super().__init__()
        self.body = body
        self._takes = "input_ids" if first else "inputs_embeds"
        self._last = last
        self._arguments = training.task.forward
        self._around = training.in_forward

    def forward(self, given: torch.Tensor, **masks: torch.Tensor) -> torch.Tensor:
        """Hidden states, or logits."""
        with self._around():
            found = self.body(**{self._takes: given}, **masks, **self._arguments)
        result: torch.Tensor = found.logits if self._last else found.last_hidden_state
        return result


def stages_of(training: Training, count: int) -> list[Stage]:
    """The whole model as so many stages, which share its layers.

    Raises:
        Unsupported: it cannot be cut like this.
    """
    model = _innermost(training.model)
    inner = getattr(model, model.base_model_prefix, None)
    layers = getattr(inner, "layers", None)
    if not (isinstance(layers, nn.ModuleList) and hasattr(inner, "embed_tokens")):
        raise Unsupported(f"this version has no stages of a {type(model).__name__}")
    if len(layers) % count:
        raise Unsupported(f"{len(layers)} layers cannot be cut into {count} equal stages")
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        raise Unsupported("the output layer is the embedding, which would lie in two stages")
    share = len(layers) // count
    found = []
    for index in range(count):
        first, last = index == 0, index == count - 1
        body = _shallow(inner)
        body.layers = nn.ModuleList(layers[index * share : (index + 1) * share])
        if not first:
            body.embed_tokens = None
        if not last:
            body.norm = nn.Identity()
        else:
            whole = _shallow(model)
            setattr(whole, model.base_model_prefix, body)
            body = whole
        found.append(Stage(body, training, first=first, last=last))
    return found


def _innermost(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _shallow(module: Any) -> Any:
    """The same module, in which others can be put in the place of those it has."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


def emptied(model: Any) -> None:
    """Take the layers out of the model that was cut, so that what no stage has here is freed."""
    model = _innermost(model)
    for module in (getattr(model, model.base_model_prefix), model):
        module._modules.clear()


@torch.no_grad()
def checked(training: Training, stages: Sequence[Stage]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of a short text by the stages, one after another.

    Raises:
        Unsupported: the logits are not those of the whole model.
    """
    ids = torch.tensor(
        [[3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3]], device=training.device.torch_device
    )
    training.model.eval()  # dropout would make a difference of its own
    with training.in_forward():
        whole = _innermost(training.model)(input_ids=ids, **training.task.forward).logits
    passed: list[torch.Tensor] = [ids]
    for stage in stages:
        passed.append(stage.eval()(passed[-1]))
        stage.train()
    training.model.train()
    if not torch.equal(passed[-1], whole):
        raise Unsupported(
            f"the stages of a {type(_innermost(training.model)).__name__} do not compute what the "
            "model does: its code reads more than its layers"
        )
    return passed[1], passed[-1]
