"""Roles of ranks: the ranks of a gang as a table, data × pipeline × tensor. Pure, no torch.

Ranks that split matrices talk to each other in every layer, so they are neighbours; the stages of a
pipeline come next, copies of the model last. With eight ranks, ``tensor`` 2 and ``pipeline`` 2,
ranks 0 and 1 hold the first layers, ranks 2 and 3 the others, and ranks 4 to 7 are a second copy
that works on another part of the batch. Gradients are averaged between ranks 0 and 4, which hold
the same half of the same matrices, between 1 and 5, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Strategies that leave a card a part of each weight between its uses, by DeepSpeed or by torch.
_SHARDED = ("zero3", "fsdp2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One rank's place in its gang."""

    rank: int
    world_size: int
    tensor: int = 1  # ranks that split each matrix among them
    pipeline: int = 1  # stages of layers; divides ``world_size`` together with ``tensor``

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one copy of the model together, and share a part of the batch."""
        return self.tensor * self.pipeline

    @property
    def data_rank(self) -> int:
        """Index of the part of each batch that this rank works on."""
        return self.rank // self.model_parallel

    @property
    def data_size(self) -> int:
        """Into how many parts each batch is split."""
        return self.world_size // self.model_parallel

    @property
    def tensor_rank(self) -> int:
        """Index of the part of each matrix that this rank holds."""
        return self.rank % self.tensor

    @property
    def stage(self) -> int:
        """Index of this rank's stage of the pipeline."""
        return self.rank // self.tensor % self.pipeline

    @property
    def counts(self) -> bool:
        """True if this rank counts its samples: of those that share a batch, only the first."""
        return self.rank % self.model_parallel == 0

    def tensor_groups(self) -> list[list[int]]:
        """The ranks that split matrices among them."""
        return [
            list(range(first, first + self.tensor))
            for first in range(0, self.world_size, self.tensor)
        ]

    def pipeline_groups(self) -> list[list[int]]:
        """The ranks that hold the same part of the matrices of all layers together, by stage."""
        return [
            list(range(first + part, first + self.model_parallel, self.tensor))
            for first in range(0, self.world_size, self.model_parallel)
            for part in range(self.tensor)
        ]

    def data_groups(self) -> list[list[int]]:
        """The ranks that hold the same part of the model."""
        return [
            list(range(part, self.world_size, self.model_parallel))
            for part in range(self.model_parallel)
        ]


def tensor_size(parameters: Mapping[str, Any], cards: int) -> int:
    """Number of cards that split each matrix, by a job's parameters."""
    if parameters.get("strategy") == "tensor-parallel":
        return cards
    return int(parameters.get("tensor_parallel") or 1)


def pipeline_size(parameters: Mapping[str, Any], cards: int) -> int:
    """Number of stages that the layers are cut into: all cards that nothing else claims."""
    if parameters.get("strategy") != "pipeline":
        return 1
    others = tensor_size(parameters, cards) * int(parameters.get("data_parallel") or 1)
    return int(parameters.get("pipeline_parallel") or max(cards // others, 1))


def model_parallel_size(parameters: Mapping[str, Any], cards: int) -> int:
    """Number of cards that hold one copy of the model together."""
    return tensor_size(parameters, cards) * pipeline_size(parameters, cards)


def divides_weights(parameters: Mapping[str, Any], cards: int) -> bool:
    """Tell if a card holds a part of the weights only."""
    sharded = cards > 1 and parameters.get("strategy") in _SHARDED
    return sharded or model_parallel_size(parameters, cards) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Process groups of torch.distributed for this rank; None: all ranks, or nobody else."""

    tensor: Any
    pipeline: Any
    data: Any


def make_groups(layout: Layout) -> Groups:
    """Form the groups; all ranks must call this together."""
    import torch.distributed as dist

    def mine(groups: list[list[int]]) -> Any:
        if len(groups) == 1 or len(groups[0]) == 1:  # everybody, or nobody else
            return None
        made = [dist.new_group(ranks) for ranks in groups]  # every rank makes every group
        return next(g for g, ranks in zip(made, groups, strict=True) if layout.rank in ranks)

    return Groups(
        tensor=mine(layout.tensor_groups()),
        pipeline=mine(layout.pipeline_groups()),
        data=mine(layout.data_groups()),
    )
