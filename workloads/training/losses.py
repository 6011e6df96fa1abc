"""Losses of tasks: sums over the labelled positions.

Logits are the largest tensor of a step, and the loss makes several of that size. ``ChunkedLoss``
takes the states below the last layer and turns logits chunk by chunk into loss and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear, log_softmax

from workloads.base import DIVERGED, NOTHING_LEARNED, Sample, Unsupported
from workloads.training.data import NOT_LEARNED

#: Training whose loss on the first batch grew by this factor, and by a nat, has diverged.
DIVERGED_FROM = 2.0


def loss_details(before: float, after: float, steps: Sequence[Sample]) -> dict[str, str]:
    """Return what is wrong with training, by its losses: ``loss_flag``, and a detail that keeps the
    row out of rankings where it diverged or no token had a label.

    ``before`` and ``after`` are the losses on the first batch, in nats.
    """
    if all(step.loss == 0 for step in steps) and before == 0:  # a sum over no labels
        flag = "the loss is 0 in every step: no token has a label"
        return {"loss_flag": flag, NOTHING_LEARNED: flag}
    strange = [one.repeat for one in steps if one.loss is None or not math.isfinite(one.loss)]
    if strange:
        where = f"first at step {strange[0]}" if strange[0] else "before anything was learned"
        flag = f"the loss is no number in {len(strange)} of {len(steps)} steps, {where}"
        return {"loss_flag": flag, DIVERGED: flag}
    if after < before:
        return {}
    flag = f"the loss on the first batch did not fall: {before:.6g} before, {after:.6g} after"
    far = not after <= max(DIVERGED_FROM * before, before + 1)
    return {"loss_flag": flag, **({DIVERGED: flag} if far else {})}


def aligned_next_tokens(
    logits: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flatten to logits [positions, vocabulary] and the label of each position."""
    of_next, next_labels = logits[:, :-1], labels[:, 1:]
    if kept is not None:
        of_next, next_labels = logits, next_labels[:, kept]
    return of_next.flatten(0, 1), next_labels.flatten()


def aligned_targets(
    logits: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``aligned_next_tokens``, for labels that are not shifted."""
    return logits.flatten(0, 1), labels.flatten()


def next_token_loss(
    logits: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Summed cross entropy of next tokens, in float32.

    Logits are [rows, positions (all, or those ``kept``), vocabulary], labels [rows, positions].
    """
    return _summed(*aligned_next_tokens(logits, labels, kept))


def target_loss(
    logits: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """As ``next_token_loss`` without shift, for decoder targets and masked tokens."""
    return _summed(*aligned_targets(logits, labels))


def _summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.float(), labels, ignore_index=NOT_LEARNED, reduction="sum")


def next_token_positions(labels: torch.Tensor) -> torch.Tensor:
    """Ascending positions whose logits any row's loss needs, by labels [rows, positions]."""
    return (labels[:, 1:] != NOT_LEARNED).any(0).nonzero().flatten()


#: Positions of a chunk; products of this size are as fast per row as larger ones.
CHUNK = 128


class _ChunkedSum(torch.autograd.Function):
    """Summed cross entropy of states [positions, width] under a last layer."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        wanted = ctx.needs_input_grad[:3]
        inputs = (states, weight, bias)
        # In float32, since small gradients would underflow before the loss scale is applied.
        gradients = [
            torch.zeros_like(one, dtype=torch.float32) if one is not None and needed else None
            for one, needed in zip(inputs, wanted, strict=True)
        ]
        of_states, of_weight, of_bias = gradients
        summed = torch.zeros((), dtype=torch.float32, device=states.device)
        for start in range(0, len(states), CHUNK):
            chunk = slice(start, start + CHUNK)
            logits = linear(states[chunk], weight, bias).float()
            target = targets[chunk, None]
            logarithms = log_softmax(logits, 1)
            summed -= logarithms.gather(1, target).sum()
            if not any(wanted):
                continue
            probabilities = logarithms.exp_()
            minus_one = probabilities.new_full(target.shape, -1.0)
            difference = probabilities.scatter_add_(1, target, minus_one).to(weight.dtype)
            if of_states is not None:
                of_states[chunk] = difference @ weight
            if of_weight is not None:
                of_weight += difference.T @ states[chunk]
            if of_bias is not None:
                of_bias += difference.sum(0)
        ctx.dtypes = [None if one is None else one.dtype for one in inputs]
        ctx.gradients = gradients
        return summed

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [
            None if one is None else (one * outer[0]).to(dtype)
            for one, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, None)


def summed(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Summed cross entropy of states [positions, width] for targets [positions]."""
    return _ChunkedSum.apply(states, weight, bias, targets)  # type: ignore[no-any-return]


def without_last_layer(model: Any, device: str) -> ChunkedLoss:
    """Bypass a model's last layer and return the loss on its inputs.

    Unsupported if it is not a plain product, or its logits are changed afterwards.
    """
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or type(head.weight) is not torch.nn.Parameter:
        kind = type(head).__name__
        raise Unsupported(f"logits chunked: the last layer is no plain product, but a {kind}")
    ids = torch.tensor([[3, 4, 5, 6]], device=device)
    was_training = model.training
    model.eval()  # dropout would make a difference of its own
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        head.forward = torch.nn.Identity().forward  # type: ignore[method-assign]
        states = model(input_ids=ids, use_cache=False).logits
    model.train(was_training)
    if not torch.equal(linear(states, head.weight, head.bias), logits):
        del head.forward
        raise Unsupported(
            f"logits chunked: {type(model).__name__} changes the logits that its last layer "
            "gives; write logits: learned"
        )
    return ChunkedLoss(head)


class ChunkedLoss:
    """The loss of states that a last layer would make logits of."""

    def __init__(self, head: torch.nn.Linear) -> None:
        self._head = head
        #: As ``summed``; a kernel may take its place.
        self.cross_entropy: Callable[..., torch.Tensor] = summed

    def __call__(
        self, states: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``next_token_loss``, of states [rows, positions, width] at all positions."""
        targets = labels[:, 1:]
        learned = targets != NOT_LEARNED
        return self.cross_entropy(
            states[:, :-1][learned], self._head.weight, self._head.bias, targets[learned]
        )
