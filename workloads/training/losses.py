"""Losses of tasks: from logits and labels to a sum over the labelled positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.training.samples import NOT_LEARNED

if TYPE_CHECKING:
    import torch


def aligned_next_tokens(
    logits: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [positions, vocabulary], or whatever else a position has, and the label of each."""
    of_next, next_labels = logits[:, :-1], labels[:, 1:]
    if kept is not None:
        of_next, next_labels = logits, next_labels[:, kept]
    return of_next.flatten(0, 1), next_labels.flatten()


def aligned_targets(
    logits: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``aligned_next_tokens`` where nothing is shifted."""
    return logits.flatten(0, 1), labels.flatten()


def next_token_loss(
    logits: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Cross entropy of each next token, summed over the labelled ones, in float32.

    Args:
        logits: [rows, positions, vocabulary].
        labels: [rows, positions], not shifted.
        kept: the positions that the logits are of; None: all of them.
    """
    import torch

    of_next, next_labels = aligned_next_tokens(logits, labels, kept)
    return torch.nn.functional.cross_entropy(
        of_next.float(),
        next_labels,
        ignore_index=NOT_LEARNED,
        reduction="sum",
    )


def target_loss(
    logits: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Cross entropy of each labelled position, summed, in float32: nothing is shifted here, since a
    decoder was given its target one place later, and a masked word is predicted where it stands.

    Args:
        logits: [rows, positions, vocabulary].
        labels: [rows, positions].
        kept: not used; the logits are of all positions.
    """
    import torch

    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=NOT_LEARNED,
        reduction="sum",
    )


def next_token_positions(labels: torch.Tensor) -> torch.Tensor:
    """The positions whose logits some row's loss needs, ascending.

    Args:
        labels: [rows, positions], not shifted; -100 where nothing is learned.
    """
    return (labels[:, 1:] != NOT_LEARNED).any(0).nonzero().flatten()
