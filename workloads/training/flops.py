"""Floating-point operations of training, for the share of a card's peak that is used (MFU).

A linear layer of n weights takes 2n operations a token forward, 2n more for the gradient of its
inputs, and 2n for that of its weights if they learn. Layers below everything that learns need no
backward pass. Left out by convention: attention's own products, norms, activations, the embedding,
and what gradient checkpointing computes again.
"""

from __future__ import annotations

from typing import Any

from workloads.weights import logical_count


def train_flops_per_token(model: Any) -> float:
    """Operations of one training step for each token, from the layers of a model as it is."""
    import torch

    total = 0
    learning_below = False
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        learns = any(parameter.requires_grad for parameter in own)
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":
            weights = logical_count(module.weight)
            backward_through = learning_below or learns
            total += 2 * weights
            total += 2 * weights if backward_through else 0
            total += 2 * weights if module.weight.requires_grad else 0
        learning_below = learning_below or learns
    return float(total)
