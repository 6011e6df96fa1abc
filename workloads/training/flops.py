"""Floating-point operations of training, for the share of a card's peak that is used (MFU).

A linear layer of n weights takes 2n operations a token forward, 2n more for the gradient of its
inputs, and 2n for that of its weights if they learn. Layers below everything that learns need no
backward pass. Left out by convention: attention's own products, norms, activations, the embedding,
and what gradient checkpointing computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from workloads.weights import logical_count

if TYPE_CHECKING:
    from workloads.registry import TaskSpec
    from workloads.training.samples import Learnable


def flops_per_token(task: TaskSpec, model: Any, samples: Sequence[Learnable]) -> float:
    """Operations of one training step for each token of these samples."""
    if "flops" in task.functions:
        return float(task.function("flops")(model, samples))
    return train_flops_per_token(model)


def train_flops_per_token(model: Any, share: Callable[[str], float] = lambda name: 1.0) -> float:
    """Operations of one training step for each token, from the layers of a model as it is.

    ``share`` is that of the tokens which pass a layer, by the layer's name.
    """
    import torch

    total = 0.0
    learning_below = False
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        learns = any(parameter.requires_grad for parameter in own)
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":
            weights = logical_count(module.weight)
            backward_through = learning_below or learns
            passes = 1 + backward_through + module.weight.requires_grad
            total += 2 * weights * passes * share(name)
        learning_below = learning_below or learns
    return total
