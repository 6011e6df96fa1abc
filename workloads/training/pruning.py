"""Pruning: weights of a model that become zero, and channels that go for good.

Three patterns. *Magnitude* zeroes the smallest weights of each layer, wherever they are. *2:4*
zeroes the two smallest of every four inputs, the pattern that sparse tensor cores read. *Channels*
removes whole channels between the matrices of a feed-forward part: rows of those that go in,
columns of the one that comes out; what is left is a smaller dense model. A layer's weights are
judged among themselves, so that a share means the same in all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration, Unsupported

if TYPE_CHECKING:
    import torch

#: Inputs that share a pattern of 2:4, and how many of them stay.
GROUP, KEPT = 4, 2

#: The matrices of a feed-forward part as architectures spell them: those in, the one out.
FEED_FORWARD = (
    (("gate_up_proj",), "down_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc1",), "fc2"),
)
#: What a configuration calls the channels in between.
_WIDTHS = ("intermediate_size", "d_ff", "ffn_hidden_size", "ffn_dim", "n_inner")
#: Kernels are fast on whole vectors: channels that stay are a multiple of so many.
VECTOR = 8


def layers(model: Any) -> dict[str, torch.nn.Linear]:
    """The linear layers that are pruned, by name: all but the output layer.

    Raises:
        BadConfiguration: the model has none.
    """
    import torch

    output = model.get_output_embeddings()
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not output
    }
    if not found:
        raise BadConfiguration(f"sparsity: {type(model).__name__} has no linear layers to prune")
    return found


def magnitude_mask(weight: torch.Tensor, share: float) -> torch.Tensor:
    """True where a weight stays: the smallest ``share`` of them goes, counted to the weight."""
    import torch

    order = weight.detach().abs().flatten().argsort(stable=True)
    mask = torch.ones_like(order, dtype=torch.bool)
    mask[order[: round(share * order.numel())]] = False
    return mask.view_as(weight)


def two_of_four_mask(weight: torch.Tensor) -> torch.Tensor:
    """True at the two largest weights of every four inputs."""
    import torch

    groups = weight.detach().abs().view(weight.shape[0], -1, GROUP)
    mask = torch.zeros_like(groups, dtype=torch.bool)
    mask.scatter_(2, groups.topk(KEPT, dim=2).indices, True)
    return mask.view_as(weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The matrices on both sides of a layer's inner channels."""

    name: str
    into: tuple[torch.nn.Linear, ...]  # their rows are channels, once or twice over (fused)
    out: torch.nn.Linear  # its columns are channels

    @property
    def channels(self) -> int:
        """Number of inner channels."""
        return self.out.in_features

    def rows(self, matrix: torch.nn.Linear, kept: torch.Tensor) -> torch.Tensor:
        """The rows of a matrix in which channels lie, each part of a fused one in turn."""
        import torch

        parts = matrix.out_features // self.channels
        return torch.cat([kept + part * self.channels for part in range(parts)])

    def largest(self, count: int) -> torch.Tensor:
        """The channels with the largest norm of all their weights, ascending."""
        scores = self.out.weight.detach().float().square().sum(0)
        for matrix in self.into:
            each = matrix.weight.detach().float().square().sum(1)
            scores = scores + each.view(-1, self.channels).sum(0)
        return scores.topk(count).indices.sort().values

    def masks(self, count: int) -> Iterator[tuple[torch.nn.Linear, torch.Tensor]]:
        """Each matrix with a mask that leaves the largest channels."""
        import torch

        kept = self.largest(count)
        for matrix in self.into:
            mask = torch.zeros_like(matrix.weight, dtype=torch.bool)
            mask[self.rows(matrix, kept)] = True
            yield matrix, mask
        mask = torch.zeros_like(self.out.weight, dtype=torch.bool)
        mask[:, kept] = True
        yield self.out, mask

    def shrink(self, count: int) -> None:
        """Remove all but the largest channels."""
        kept = self.largest(count)
        for matrix in self.into:
            rows = self.rows(matrix, kept)
            _replace(matrix, "weight", matrix.weight[rows])
            if matrix.bias is not None:
                _replace(matrix, "bias", matrix.bias[rows])
            matrix.out_features = len(rows)
        _replace(self.out, "weight", self.out.weight[:, kept])
        self.out.in_features = count


def _replace(layer: torch.nn.Linear, name: str, values: torch.Tensor) -> None:
    import torch

    learns = getattr(layer, name).requires_grad
    new = torch.nn.Parameter(values.detach().clone().contiguous(), requires_grad=learns)
    setattr(layer, name, new)


def feed_forwards(model: Any) -> list[FeedForward]:
    """The feed-forward parts of a model, whose channels can be removed.

    Raises:
        Unsupported: it has none that are known, or of unlike widths, which no configuration says.
    """
    found = []
    for name, module in model.named_modules():
        children = dict(module.named_children())
        for into, out in FEED_FORWARD:
            if out in children and all(each in children for each in into):
                matrices = tuple(children[each] for each in into)
                found.append(FeedForward(name=name, into=matrices, out=children[out]))
                break
    widths = {part.channels for part in found}
    if len(widths) != 1 or _width_name(model.config, min(widths)) is None:
        raise Unsupported(
            f"sparsity channels: {type(model).__name__} has "
            + (f"feed-forward parts of {len(widths)} widths" if widths else "no known feed-forward")
            + "; write sparsity: magnitude"
        )
    return found


def _width_name(config: Any, width: int) -> str | None:
    return next((name for name in _WIDTHS if getattr(config, name, None) == width), None)


def channels_left(channels: int, share: float) -> int:
    """The channels that stay of so many: a multiple of 8 where there were such; 0: none would."""
    left = channels * (1 - share)
    unit = VECTOR if channels % VECTOR == 0 else 1
    return round(left / unit) * unit


def remove_channels(model: Any, count: int) -> None:
    """Leave the ``count`` largest channels of each feed-forward part; the configuration says so."""
    parts = feed_forwards(model)
    name = _width_name(model.config, parts[0].channels)
    for part in parts:
        part.shrink(count)
    setattr(model.config, str(name), count)
