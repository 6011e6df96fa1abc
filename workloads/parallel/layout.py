"""Roles of ranks: the ranks of a gang as a table of data-parallel rows. Pure, no torch.

Ranks that split matrices talk to each other in every layer, so they are neighbours: with four ranks
and ``tensor`` 2, ranks 0 and 1 share one part of the batch, ranks 2 and 3 the other. Gradients are
averaged between ranks 0 and 2, which hold the same half of each matrix, and between 1 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One rank's place in its gang."""

    rank: int
    world_size: int
    tensor: int = 1  # ranks that split each matrix among them; divides ``world_size``

    @property
    def data_rank(self) -> int:
        """Index of the part of each batch that this rank works on."""
        return self.rank // self.tensor

    @property
    def data_size(self) -> int:
        """Into how many parts each batch is split."""
        return self.world_size // self.tensor

    @property
    def tensor_rank(self) -> int:
        """Index of the part of each matrix that this rank holds."""
        return self.rank % self.tensor

    @property
    def counts(self) -> bool:
        """True if this rank counts its samples: of those that share a batch, only the first."""
        return self.tensor_rank == 0

    def tensor_groups(self) -> list[list[int]]:
        """The ranks that split matrices among them."""
        return [
            list(range(first, first + self.tensor))
            for first in range(0, self.world_size, self.tensor)
        ]

    def data_groups(self) -> list[list[int]]:
        """The ranks that hold the same part of each matrix."""
        return [list(range(part, self.world_size, self.tensor)) for part in range(self.tensor)]


def tensor_size(parameters: Mapping[str, Any], cards: int) -> int:
    """Number of cards that split each matrix, by a job's parameters."""
    if parameters.get("strategy") == "tensor-parallel":
        return cards
    return int(parameters.get("tensor_parallel") or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Process groups of torch.distributed for this rank; None: all ranks, or nobody else."""

    tensor: Any
    data: Any


def make_groups(layout: Layout) -> Groups:
    """Form the groups; all ranks must call this together."""
    import torch.distributed as dist

    def mine(groups: list[list[int]]) -> Any:
        if len(groups) == 1 or len(groups[0]) == 1:  # everybody, or nobody else
            return None
        made = [dist.new_group(ranks) for ranks in groups]  # every rank makes every group
        return next(g for g, ranks in zip(made, groups, strict=True) if layout.rank in ranks)

    return Groups(tensor=mine(layout.tensor_groups()), data=mine(layout.data_groups()))
