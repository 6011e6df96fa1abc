"""Pruning, per layer, so that a share means the same in all layers.

*Magnitude* zeroes the smallest weights of each layer. *2:4* zeroes the two smallest of every four
inputs, as sparse tensor cores need. *Channels* removes inner channels of feed-forward parts, rows
of the matrices in and columns of the one out, which leaves a smaller dense model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from workloads.base import BadConfiguration, JobDescription, Refusal, Unsupported
from workloads.models.precision import hidden_layers
from workloads.models.rules import linear_shapes, undivided_layer
from workloads.registry import Metric
from workloads.settings import work
from workloads.training.technique import Technique, Training

if TYPE_CHECKING:
    import torch

    from workloads.compression.sharing import SharedLayers

#: Inputs of a 2:4 group, and those that stay.
GROUP, KEPT = 4, 2

#: Matrices of feed-forward parts by architectures' names: those in, the one out.
FEED_FORWARD = (
    (("gate_up_proj",), "down_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc1",), "fc2"),
)
#: Names of the inner channels in configurations.
_WIDTHS = ("intermediate_size", "d_ff", "ffn_hidden_size", "ffn_dim", "n_inner")
#: Divisor of remaining channels, for kernels that work on whole vectors.
VECTOR = 8


def prunable_layers(model: Any, *kinds: type[torch.nn.Module]) -> dict[str, Any]:
    """The layers that are pruned or coded, by name: all linear ones, or those of other ``kinds``,
    but the output layer."""
    layers = hidden_layers(model, *kinds)
    if not layers:
        what = "dictionary_atoms" if kinds else "sparsity"
        raise BadConfiguration(f"{what}: {type(model).__name__} has no layers for it")
    return layers


def magnitude_mask(weight: torch.Tensor, share: float) -> torch.Tensor:
    """True where a weight stays; exactly the smallest ``share`` goes."""
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

    into: tuple[torch.nn.Linear, ...]  # their rows are channels, once or twice over (fused)
    out: torch.nn.Linear  # its columns are channels

    @property
    def channels(self) -> int:
        """Number of inner channels."""
        return self.out.in_features

    def kept(self, count: int) -> list[tuple[torch.nn.Linear, torch.Tensor, int]]:
        """Each matrix with its rows (0) or columns (1) of the channels with the largest norm of all
        their weights, ascending, and their dimension."""
        import torch

        scores = self.out.weight.detach().float().square().sum(0)
        for matrix in self.into:
            norms = matrix.weight.detach().float().square().sum(1)
            scores = scores + norms.view(-1, self.channels).sum(0)
        largest = scores.topk(count).indices.sort().values
        kept = [(self.out, largest, 1)]
        for matrix in self.into:
            starts = range(0, matrix.out_features, self.channels)  # of the parts of a fused one
            kept.append((matrix, torch.cat([largest + start for start in starts]), 0))
        return kept

    def masks(self, count: int) -> Iterator[tuple[torch.nn.Linear, torch.Tensor]]:
        """Each matrix with a mask that leaves the largest channels."""
        import torch

        for matrix, places, dimension in self.kept(count):
            mask = torch.zeros_like(matrix.weight, dtype=torch.bool)
            yield matrix, mask.index_fill_(dimension, places, True)

    def shrink(self, count: int) -> None:
        """Remove all but the largest channels."""
        for matrix, places, dimension in self.kept(count):
            _replace(matrix, "weight", matrix.weight.index_select(dimension, places))
            if matrix is self.out:
                matrix.in_features = count
                continue
            matrix.out_features = len(places)
            if matrix.bias is not None:
                _replace(matrix, "bias", matrix.bias[places])


def _replace(layer: torch.nn.Linear, name: str, values: torch.Tensor) -> None:
    import torch

    learns = getattr(layer, name).requires_grad
    new = torch.nn.Parameter(values.detach().clone().contiguous(), requires_grad=learns)
    setattr(layer, name, new)


def feed_forwards(model: Any) -> list[FeedForward]:
    """Feed-forward parts of a model; Unsupported if none are known or widths differ."""
    parts = []
    for module in model.modules():
        children = dict(module.named_children())
        for into, out in FEED_FORWARD:
            if {*into, out} <= children.keys():
                matrices = tuple(children[name] for name in into)
                parts.append(FeedForward(into=matrices, out=children[out]))
                break
    widths = {part.channels for part in parts}
    if len(widths) != 1 or _width_name(model.config, min(widths)) is None:
        raise Unsupported(
            f"sparsity channels: {type(model).__name__} has "
            + (f"feed-forward parts of {len(widths)} widths" if widths else "no known feed-forward")
            + "; write sparsity: magnitude"
        )
    return parts


def _width_name(config: Any, width: int) -> str | None:
    return next((name for name in _WIDTHS if getattr(config, name, None) == width), None)


def channels_left(channels: int, share: float) -> int:
    """Remaining channels, a multiple of 8 if they were before; 0 if none remain."""
    left = channels * (1 - share)
    unit = VECTOR if channels % VECTOR == 0 else 1
    return round(left / unit) * unit


def remove_channels(model: Any, count: int) -> None:
    """Keep the ``count`` largest channels of each feed-forward part; update the configuration."""
    parts = feed_forwards(model)
    name = _width_name(model.config, parts[0].channels)
    for part in parts:
        part.shrink(count)
    setattr(model.config, str(name), count)


#: Default share; the only one of 2:4.
USUAL_SHARE = 0.5
#: Part of the steps after which the gradual schedule is complete.
_FULL_AFTER = 0.75


class Sparsity(Technique):
    """Sparsity: weights that are zero, channels that are gone, values or kernels that are shared.

    Pruned before the first step, a model learns to do without; with the schedule *gradual* the
    share grows from step to step, fast at first (cubic), and is whole after three quarters of the
    steps. *magnitude* zeroes the smallest weights of each layer, *2:4* two of every four inputs.
    Masks are kept through every update, in gradients and the optimizer's averages too. Training
    computes with the zeros as with any number, so neither is faster here. *channels* removes
    channels of the feed-forward parts: a smaller dense model, faster everywhere. After the last
    step ``cluster_bits`` gathers each layer's weights into few values and writes their Huffman
    code: prune, share, code, as in Deep Compression. ``dictionary_atoms`` makes each piece of a
    matrix, and each kernel of a convolution, a sum of a few atoms of a dictionary that all layers
    share. ``save_model`` keeps what comes out, and beside it the coded file, of the size that the
    row has.
    """

    name: ClassVar[str] = "sparsity"
    title: ClassVar[str] = "sparsity and weight sharing"
    order: ClassVar[int] = 105  # after autocast, since losses are measured; before clipping
    whole_weights: ClassVar[Any] = ("sparsity", "cluster_bits", "dictionary_atoms")
    # Adapters lie over a frozen base, and QAT rounds weights in a way of its own.
    beside: ClassVar[Any] = {
        **dict.fromkeys(whole_weights, ("method", (None, "full", "distill"))),
        "sparsity_share": ("sparsity", ("magnitude", "2:4", "channels")),
        "sparsity_schedule": ("sparsity", ("magnitude", "2:4", "channels")),
        "cluster_steps": ("cluster_bits", tuple(range(1, 9))),
        "dictionary_terms": ("dictionary_atoms", ()),
        "dictionary_length": ("dictionary_atoms", ()),
    }
    excludes: ClassVar[Any] = tuple(
        ("dictionary_atoms", name, values, reason)
        for name, values, reason in (
            ("cluster_bits", tuple(range(1, 9)), "weights have one code"),
            ("sparsity", ("magnitude", "2:4"), "sums of atoms are not zero where weights are"),
        )
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="zero_share",
            title="zeros",
            description="Share of zeros in the pruned layers as they are, counted.",
        ),
        Metric(
            name="layer_bytes_before",
            title="layers before",
            unit="bytes",
            description="Bytes of the linear layers before anything was pruned.",
        ),
        Metric(
            name="layer_bytes_after",
            title="layers after",
            unit="bytes",
            description="Bytes of the linear layers as files can have them: dense, of fewer "
            "channels, in the layout of 2:4, or coded.",
            better="lower",
        ),
        Metric(
            name="dense_loss",
            title="held-out loss when dense",
            description="Held-out loss before anything is pruned or learned.",
        ),
        Metric(
            name="pruned_loss",
            title="held-out loss when pruned",
            description="Held-out loss after pruning at once, before anything is learned.",
            better="lower",
        ),
        Metric(
            name="unshared_loss",
            title="held-out loss before sharing",
            description="Held-out loss after the last step, before weights share values or atoms.",
            better="lower",
        ),
        Metric(
            name="dictionary_error",
            title="error of the dictionary",
            description="Norm of the change of all coded weights over the norm of the weights.",
            better="lower",
        ),
        Metric(
            name="entropy_bits",
            title="entropy",
            unit="bits/weight",
            description="Entropy of the shared values' numbers: no code of single ones is shorter.",
        ),
        Metric(
            name="coded_bits",
            title="Huffman code",
            unit="bits/weight",
            description="Bits a weight of the Huffman code, which was written and read back.",
            better="lower",
        ),
    )

    sparsity: Literal["none", "magnitude", "2:4", "channels"] = work(
        "none",
        description="Weights that become zero (method full): magnitude zeroes the smallest of each "
        "layer, 2:4 two of every four inputs; channels removes channels of the feed-forward parts.",
    )
    sparsity_share: float | None = work(
        None,
        gt=0,
        lt=1,
        description="Share that is pruned, of weights (magnitude) or of channels. Left out: 0.5.",
    )
    sparsity_schedule: Literal["once", "gradual"] = work(
        "once",
        description="once prunes before the first step; gradual more with every step, until three "
        "quarters of them are done.",
    )
    cluster_bits: int | None = work(
        None,
        ge=1,
        le=8,
        description="After the last step each layer's weights that are not zero share 2 to the "
        "power of so many values (k-means); the row has the size of their Huffman code.",
    )

    cluster_steps: int | None = work(
        None,
        ge=1,
        description="Share values so many steps before the last one, and train the shared values "
        "in these steps, each by the sum of its weights' gradients. Left out: none.",
    )

    dictionary_atoms: int | None = work(
        None,
        ge=2,
        le=4096,
        description="After the last step the weights of linear and convolution layers become sums "
        "of atoms of a dictionary of so many, learned from them; the row has the size of their "
        "code and the error.",
    )
    dictionary_terms: int = work(
        2, ge=1, le=16, description="Atoms that each vector of weights is a sum of."
    )
    dictionary_length: int = work(
        16,
        ge=2,
        le=256,
        description="Weights of a vector of a linear layer; a convolution's are its kernels.",
    )

    _pruned: Pruned  # once there is a model
    _shared: SharedLayers | None = None  # once values are shared

    @property
    def share(self) -> float:
        """Final pruned share."""
        return USUAL_SHARE if self.sparsity_share is None else self.sparsity_share

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        if self.cluster_steps is not None:
            yield from self._trained_again(job, self.cluster_steps)
        if self.dictionary_atoms is not None:
            yield from self._by_dictionary(job, self.dictionary_atoms)
        if self.sparsity == "2:4":
            yield from self._two_of_four(job)
        elif self.sparsity != "none":
            yield from self._emptied(job)

    def _trained_again(self, job: JobDescription, shared_steps: int) -> Iterator[Refusal]:
        steps = int(job.parameters.get("steps") or 0)
        if shared_steps >= steps > 0:
            yield Refusal(
                setting="cluster_steps",
                reason=f"the job has {steps} steps, and weights are shared after one of them",
                hint=f"write less than {steps}",
            )
        if self.sparsity == "channels" and self.sparsity_schedule == "gradual":
            yield Refusal(
                setting="cluster_steps",
                reason="gradual channels are removed after the last step, and shared after that",
                hint="write sparsity_schedule: once",
            )
        if self.sparsity_schedule == "gradual" and shared_steps * 4 > steps > 0:
            yield Refusal(
                setting="cluster_steps",
                reason="the share of zeros grows through three quarters of the steps",
                hint=f"write {max(steps // 4, 1)} at most",
            )

    def _by_dictionary(self, job: JobDescription, atoms: int) -> Iterator[Refusal]:
        if self.dictionary_terms > min(atoms, self.dictionary_length):
            yield Refusal(
                setting="dictionary_terms",
                reason=f"{self.dictionary_terms} of {atoms} atoms of {self.dictionary_length} "
                "weights",
                hint="write as many as there are atoms and weights of a vector, at most",
            )
        yield from _undivided(job, "dictionary_length", self.dictionary_length, "write a divisor")

    def _two_of_four(self, job: JobDescription) -> Iterator[Refusal]:
        if self.sparsity_share not in (None, USUAL_SHARE):
            yield Refusal(
                setting="sparsity_share",
                reason="2:4 zeroes one half",
                hint="leave it out, or write sparsity: magnitude",
            )
        if self.sparsity_schedule != "once":
            yield Refusal(
                setting="sparsity_schedule",
                reason="2:4 is two of every four from the first step on",
                hint="write sparsity_schedule: once, or sparsity: magnitude",
            )
        yield from _undivided(job, "sparsity", GROUP, "write sparsity: magnitude")

    def _emptied(self, job: JobDescription) -> Iterator[Refusal]:
        outs = {out for _, out in FEED_FORWARD}
        for name, (outputs, inputs) in (linear_shapes(job.model) or {}).items():
            if self.sparsity == "magnitude":
                count, what = outputs * inputs, "weights"
                left = count - round(self.share * count)
            elif name.rsplit(".", 1)[-1] in outs:
                count, what = inputs, "channels"
                left = channels_left(count, self.share)
            else:
                continue
            if left < 1:
                yield Refusal(
                    setting="sparsity_share",
                    reason=f"a share of {self.share:g} leaves none of the {count:,} {what} of "
                    f"{name}",
                    hint="write a smaller share",
                )
                return

    def on_model(self, training: Training) -> None:
        layers = self._layers(training.model)
        pruned = self._pruned = Pruned(layers=layers)
        if self.sparsity_schedule == "gradual":
            training.stateful["masks"] = pruned
        if self.cluster_steps:
            # Checkpoints hold no shared values: one of before these steps alone is gone on from.
            training.least_steps = max(training.least_steps, self.cluster_steps + 1)
        before = sum(layer.weight.nbytes for layer in layers.values())
        training.metrics["layer_bytes_before"] = float(before)
        _note_loss(training, "dense_loss")
        if self.sparsity == "none":
            return
        if self.sparsity_schedule == "once":
            self._prune(training, self.share)
            _note_loss(training, "pruned_loss")
        training.before_update.append(pruned.mask_gradients)

    def after_step(self, training: Training, step: int) -> None:
        if self.sparsity_schedule == "gradual":
            # By Zhu and Gupta's cubic schedule.
            done = min((step + 1) / max(1, round(training.steps * _FULL_AFTER)), 1.0)
            share = self.share * (1 - (1 - done) ** 3)
            if share > self._pruned.share:
                self._prune(training, share)
        self._pruned.mask_weights()
        remaining = training.steps - 1 - step
        if self._shared is not None:
            self._shared.tie()
        elif self.cluster_steps == remaining and self.cluster_bits:
            shared = self._begin_sharing(training, self.cluster_bits)
            training.before_update.insert(0, shared.sum_gradients)  # before clipping

    def after_steps(self, training: Training) -> None:
        if self.sparsity == "channels" and self._pruned.masks:
            training.wrapper = None  # holds the matrices of before
            self._pruned.masks.clear()
            remove_channels(training.model, self._channels(training.model, self.share))
        layers = self._layers(training.model)
        total = sum(layer.weight.numel() for layer in layers.values())
        after = sum(layer.weight.nbytes for layer in layers.values())
        if self.sparsity == "2:4":
            # Half of the values, and two bits for the place of each.
            after = after // 2 + total // 8
        if self.cluster_bits is not None:
            from workloads.compression.sharing import CODED_FILE

            shared = self._shared or self._begin_sharing(training, self.cluster_bits)
            data, figures = shared.coded()
            training.metrics |= figures
            training.saved_files[CODED_FILE] = data
            after = len(data)
        if self.dictionary_atoms is not None:
            from workloads.compression import dictionary

            _note_loss(training, "unshared_loss")
            sizes = self.dictionary_atoms, self.dictionary_terms, self.dictionary_length
            data = dictionary.code(layers, *sizes)
            training.metrics["dictionary_error"] = dictionary.replace_weights(layers, data)
            training.saved_files[dictionary.DICTIONARY_FILE] = data
            after = len(data)
        training.metrics["layer_bytes_after"] = float(after)
        zeros = sum(int((layer.weight == 0).sum()) for layer in layers.values())
        training.metrics["zero_share"] = zeros / total
        text = self._summary(zeros / total, len(layers))
        training.details["sparsity"] = training.origin["sparsity"] = text

    def _prune(self, training: Training, share: float) -> None:
        pruned = self._pruned
        pruned.share = share
        if self.sparsity == "channels" and self.sparsity_schedule == "once":
            remove_channels(training.model, self._channels(training.model, share))
            return
        if self.sparsity == "channels":
            for part in feed_forwards(training.model):
                count = channels_left(part.channels, share)
                pruned.masks |= {layer.weight: mask for layer, mask in part.masks(count)}
        else:
            for name, layer in prunable_layers(training.model).items():
                if self.sparsity == "2:4" and layer.in_features % GROUP:
                    raise Unsupported(
                        f"sparsity 2:4: the {layer.in_features} inputs of {name} are no multiple "
                        f"of {GROUP}"
                    )
                mask = (
                    two_of_four_mask(layer.weight)
                    if self.sparsity == "2:4"
                    else magnitude_mask(layer.weight, share)
                )
                if not bool(mask.any()):
                    raise BadConfiguration(f"sparsity_share {share:g} empties {name}")
                pruned.masks[layer.weight] = mask
        pruned.mask_weights()
        if training.optimizer is not None:
            pruned.mask_averages(training.optimizer)

    def _channels(self, model: Any, share: float) -> int:
        channels = feed_forwards(model)[0].channels
        count = channels_left(channels, share)
        if count < 1:
            raise BadConfiguration(f"sparsity_share {self.share:g} leaves none of {channels}")
        return count

    def _begin_sharing(self, training: Training, bits: int) -> SharedLayers:
        from workloads.compression.sharing import SharedLayers

        _note_loss(training, "unshared_loss")
        self._shared = SharedLayers(prunable_layers(training.model), bits)
        self._shared.average_states(training.optimizer)
        return self._shared

    def _layers(self, model: Any) -> Mapping[str, Any]:
        from torch.nn import Conv1d, Conv2d, Linear

        kinds = () if self.dictionary_atoms is None else (Linear, Conv1d, Conv2d)
        return prunable_layers(model, *kinds)

    def _summary(self, zeros: float, layers: int) -> str:
        if self.sparsity == "channels":
            text = f"channels: {self.share:.0%} asked for, a smaller dense model"
        elif self.sparsity == "none":
            text = "none"
        else:
            text = (
                f"{self.sparsity}: {zeros:.2%} zeros in {layers} layers, sparse in value, dense "
                "arithmetic"
            )
        if self.dictionary_atoms:
            text += f"; sums of {self.dictionary_terms} of {self.dictionary_atoms} atoms"
        return text + (f"; values of {self.cluster_bits} bits" if self.cluster_bits else "")


def _undivided(job: JobDescription, setting: str, size: int, hint: str) -> Iterator[Refusal]:
    """Name the first linear layer whose inputs cannot be cut into vectors of a size."""
    if undivided := undivided_layer(job.model, size):
        name, inputs = undivided
        reason = f"the {inputs} inputs of {name} are no multiple of {size}"
        yield Refusal(setting=setting, reason=reason, hint=hint)


@dataclass(slots=True, kw_only=True)
class Pruned:
    """Masks of a model in training."""

    layers: Mapping[str, Any] = field(default_factory=dict)
    share: float = 0.0
    masks: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        masks = {name: self.masks.get(layer.weight) for name, layer in self.layers.items()}
        return {"share": self.share, "masks": masks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.share = state["share"]
        for name, mask in state["masks"].items():
            if mask is not None:
                weight = self.layers[name].weight
                self.masks[weight] = mask.to(weight.device)

    def mask_gradients(self) -> None:
        for parameter, mask in self.masks.items():
            if parameter.grad is not None:
                parameter.grad.mul_(mask)

    def mask_weights(self) -> None:
        for parameter, mask in self.masks.items():
            parameter.data.mul_(mask)

    def mask_averages(self, optimizer: Any) -> None:
        """Mask the optimizer's averages that have the weights' shape."""
        import torch

        for parameter, mask in self.masks.items():
            for value in getattr(optimizer, "state", {}).get(parameter, {}).values():
                plain = type(value) is torch.Tensor and value.shape == parameter.shape
                if plain and value.is_floating_point():
                    value.mul_(mask)


def _note_loss(training: Training, name: str) -> None:
    if training.held_out_loss is not None:
        training.metrics[name] = training.held_out_loss()


SPECS = (Sparsity,)
