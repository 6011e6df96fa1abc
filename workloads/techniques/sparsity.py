"""Sparsity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PrivateAttr

from workloads.base import BadConfiguration, JobDescription, Refusal, Unsupported
from workloads.finetuning_method import ADAPTER_METHODS, method_name
from workloads.models.targets import linear_shapes
from workloads.parallel.layout import divides_weights
from workloads.registry import Metric
from workloads.settings import setting
from workloads.techniques.base import Technique, Training
from workloads.training import pruning

if TYPE_CHECKING:
    import torch

#: The share that is pruned where none is said; 2:4 has no other.
USUAL_SHARE = 0.5
#: Part of the steps after which the gradual schedule has pruned all it will.
_FULL_AFTER = 0.75


def share_at(step: int, steps: int, final: float) -> float:
    """Share that is pruned after a step (from 0) of so many: cubic, as Zhu and Gupta's."""
    whole = max(1, round(steps * _FULL_AFTER))
    done = min((step + 1) / whole, 1.0)
    return final * (1 - (1 - done) ** 3)


class Sparsity(Technique):
    """Sparsity: weights that are zero, channels that are gone, values that are shared.

    Pruned before the first step, a model learns to do without; with the schedule *gradual* the
    share grows from step to step, fast at first (cubic), and is whole after three quarters of the
    steps. *magnitude* zeroes the smallest weights of each layer, *2:4* two of every four inputs.
    Masks are kept through every update, in gradients and the optimizer's averages too. Training
    computes with the zeros as with any number, so neither is faster here. *channels* removes
    channels of the feed-forward parts: a smaller dense model, faster everywhere. After the last
    step ``cluster_bits`` gathers each layer's weights into few values and measures their Huffman
    code: prune, share, code, as in Deep Compression. ``save_model`` keeps what comes out.
    """

    name: ClassVar[str] = "sparsity"
    title: ClassVar[str] = "sparsity and weight sharing"
    order: ClassVar[int] = 105  # after autocast, since losses are measured; before clipping
    beside: ClassVar[Any] = dict.fromkeys(
        ("sparsity_share", "sparsity_schedule"), ("sparsity", ("magnitude", "2:4", "channels"))
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
            description="Held-out loss after the last step, before weights share values.",
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

    sparsity: Literal["none", "magnitude", "2:4", "channels"] = setting(
        "none",
        role="work",
        description="Weights that become zero (method full): magnitude zeroes the smallest of each "
        "layer, 2:4 two of every four inputs; channels removes channels of the feed-forward parts.",
    )
    sparsity_share: float | None = setting(
        None,
        role="work",
        gt=0,
        lt=1,
        description="Share that is pruned, of weights (magnitude) or of channels. Left out: 0.5.",
    )
    sparsity_schedule: Literal["once", "gradual"] = setting(
        "once",
        role="work",
        description="once prunes before the first step; gradual more with every step, until three "
        "quarters of them are done.",
    )
    cluster_bits: int | None = setting(
        None,
        role="work",
        ge=1,
        le=8,
        description="After the last step each layer's weights that are not zero share 2 to the "
        "power of so many values (k-means); the row has the size of their Huffman code.",
    )

    _state: list[Pruned] = PrivateAttr(default_factory=list)

    @property
    def share(self) -> float:
        """The share that is pruned in the end."""
        return USUAL_SHARE if self.sparsity_share is None else self.sparsity_share

    # ------------------------------------------------------------ in the plan

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        if self.sparsity == "none" and self.cluster_bits is None:
            return
        blamed = "sparsity" if self.sparsity != "none" else "cluster_bits"
        method = method_name(asked.parameters)
        if method in ADAPTER_METHODS or method == "qat":
            why = (
                "trains an adapter over a base that is frozen"
                if method in ADAPTER_METHODS
                else "rounds weights in a way of its own"
            )
            yield Refusal(
                setting=blamed, reason=f"method {method} {why}", hint="write method: full"
            )
        if divides_weights(asked.parameters, asked.cards):
            yield Refusal(
                setting=blamed,
                reason="each card holds a part of every matrix, and this version judges weights "
                "and channels of whole ones",
                hint="write strategy: ddp",
                unsupported=True,
            )
        if self.sparsity == "2:4":
            yield from self._two_of_four(asked)
        elif self.sparsity != "none":
            yield from self._emptied(asked)

    def _two_of_four(self, asked: JobDescription) -> Iterator[Refusal]:
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
        for name, (_, inputs) in (linear_shapes(asked.model) or {}).items():
            if inputs % pruning.GROUP:
                yield Refusal(
                    setting="sparsity",
                    reason=f"the {inputs} inputs of {name} are no multiple of {pruning.GROUP}",
                    hint="write sparsity: magnitude",
                )
                return

    def _emptied(self, asked: JobDescription) -> Iterator[Refusal]:
        """A share that leaves nothing of a layer."""
        outs = {out for _, out in pruning.FEED_FORWARD}
        for name, (outputs, inputs) in (linear_shapes(asked.model) or {}).items():
            if self.sparsity == "magnitude":
                count, what = outputs * inputs, "weights"
                left = count - round(self.share * count)
            elif name.rsplit(".", 1)[-1] in outs:
                count, what = inputs, "channels"
                left = pruning.channels_left(count, self.share)
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

    # ------------------------------------------------------------ in training

    @property
    def in_training(self) -> list[Pruned]:
        """The masks of the model that this job trains, once it has one."""
        return self._state

    def on_model(self, training: Training) -> None:
        if self.sparsity == "none" and self.cluster_bits is None:
            return
        layers = pruning.layers(training.model)
        state = Pruned(bytes_before=_bytes(layers.values()), layers=layers)
        self._state.append(state)
        if self.sparsity_schedule == "gradual":
            training.stateful["masks"] = state
        training.metrics["layer_bytes_before"] = float(state.bytes_before)
        _note_loss(training, "dense_loss")
        if self.sparsity == "none":
            return
        if self.sparsity_schedule == "once":
            self._prune(training, state, self.share)
            _note_loss(training, "pruned_loss")
        training.before_update.append(state.mask_gradients)

    def after_step(self, training: Training, step: int) -> None:
        for state in self._state:
            if self.sparsity_schedule == "gradual":
                share = share_at(step, training.steps, self.share)
                if share > state.share:
                    self._prune(training, state, share)
            state.mask_weights()

    def after_steps(self, training: Training) -> None:
        for state in self._state:
            if self.sparsity == "channels" and state.masks:
                training.wrapper = None  # holds the matrices of before
                state.masks.clear()
                pruning.remove_channels(training.model, self._channels(training.model))
            layers = pruning.layers(training.model)
            after = _bytes(layers.values())
            if self.sparsity == "2:4":
                after = sum(_two_of_four_bytes(layer.weight) for layer in layers.values())
            if self.cluster_bits is not None:
                after = self._share(training, layers, self.cluster_bits)
            training.metrics["layer_bytes_after"] = float(after)
            zeros = sum(int((layer.weight == 0).sum()) for layer in layers.values())
            total = sum(layer.weight.numel() for layer in layers.values())
            training.metrics["zero_share"] = zeros / total
            told = self._told(zeros / total, len(layers))
            training.details["sparsity"] = training.origin["sparsity"] = told

    def _prune(self, training: Training, state: Pruned, share: float) -> None:
        """Set the masks for a share, or remove channels where that is done at once."""
        import torch

        state.share = share
        if self.sparsity == "channels" and self.sparsity_schedule == "once":
            pruning.remove_channels(training.model, self._channels(training.model, share))
            return
        if self.sparsity == "channels":
            for part in pruning.feed_forwards(training.model):
                count = pruning.channels_left(part.channels, share)
                state.masks |= {layer.weight: mask for layer, mask in part.masks(count)}
        else:
            for name, layer in pruning.layers(training.model).items():
                if self.sparsity == "2:4" and layer.in_features % pruning.GROUP:
                    raise Unsupported(
                        f"sparsity 2:4: the {layer.in_features} inputs of {name} are no multiple "
                        f"of {pruning.GROUP}"
                    )
                state.masks[layer.weight] = (
                    pruning.two_of_four_mask(layer.weight)
                    if self.sparsity == "2:4"
                    else pruning.magnitude_mask(layer.weight, share)
                )
                if not bool(torch.any(state.masks[layer.weight])):
                    raise BadConfiguration(f"sparsity_share {share:g} empties {name}")
        state.mask_weights()
        if training.optimizer is not None:
            state.mask_averages(training.optimizer)

    def _channels(self, model: Any, share: float | None = None) -> int:
        channels = pruning.feed_forwards(model)[0].channels
        count = pruning.channels_left(channels, self.share if share is None else share)
        if count < 1:
            raise BadConfiguration(f"sparsity_share {self.share:g} leaves none of {channels}")
        return count

    def _share(self, training: Training, layers: dict[str, Any], bits: int) -> int:
        from workloads.training.weight_sharing import share_layers

        _note_loss(training, "unshared_loss")
        sizes = share_layers(layers, bits)
        training.metrics["entropy_bits"] = sizes.entropy_bits
        training.metrics["coded_bits"] = sizes.coded_bits
        return sizes.coded_bytes

    def _told(self, zeros: float, layers: int) -> str:
        if self.sparsity == "channels":
            told = f"channels: {self.share:.0%} asked for, a smaller dense model"
        elif self.sparsity == "none":
            told = "none"
        else:
            told = (
                f"{self.sparsity}: {zeros:.2%} zeros in {layers} layers, sparse in value, dense "
                "arithmetic"
            )
        return told + (f"; values of {self.cluster_bits} bits" if self.cluster_bits else "")


@dataclass(slots=True, kw_only=True)
class Pruned:
    """Masks of a model in training."""

    bytes_before: int
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
        """The optimizer's averages, where they are plain numbers of a weight each."""
        import torch

        for parameter, mask in self.masks.items():
            for value in getattr(optimizer, "state", {}).get(parameter, {}).values():
                plain = type(value) is torch.Tensor and value.shape == parameter.shape
                if plain and value.is_floating_point():
                    value.mul_(mask)


def _note_loss(training: Training, name: str) -> None:
    measure: Callable[[], float] | None = training.held_out_loss
    if measure is not None:
        training.metrics[name] = measure()


def _bytes(layers: Iterable[Any]) -> int:
    return sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)


def _two_of_four_bytes(weight: torch.Tensor) -> int:
    """Half of the values, and two bits for the place of each."""
    kept = weight.numel() // 2
    return kept * weight.element_size() + kept // 4


SPECS = (Sparsity,)
