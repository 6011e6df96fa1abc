"""One optimizer step: batch in, loss out, each part timed.

The loss is the mean over all learned tokens of the step, on all cards and in all micro-batches, so
micro-batches, padding and the number of cards do not change what is learned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from workloads.bench.measure import Observation
from workloads.models.precision import logical_count
from workloads.training.data import Learnable, SampleFormat, in_order, shared_out
from workloads.training.parallel.layout import Layout
from workloads.training.technique import DataPlan, Inputs, Objective, StepBatch, Technique, Training

if TYPE_CHECKING:
    import torch

    from workloads.devices.base import Device
    from workloads.registry import TaskSpec


def plan_data(
    device: Device, form: SampleFormat, batch_size: int, layout: Layout, task: TaskSpec
) -> DataPlan:
    """Plan batches without techniques: in order, collated by the task."""
    collate = task.function("collate")
    draw = task.function("draw") if "draw" in task.functions else None
    data = DataPlan(
        device=device,
        task=task,
        form=form,
        batch_size=batch_size,
        cards=layout.data_size,
        counted=layout.counts,
        arrange=task.function("arrange") if "arrange" in task.functions else in_order,
        collate=lambda samples: collate(samples, form),
        draw=lambda samples, step: samples if draw is None else draw(samples, form, step),
        feed=lambda make: map(make, itertools.count(data.first_step)),
        move=lambda inputs: inputs.changed(lambda tensor: tensor.to(device.torch_device)),
    )
    return data


def batch_maker(
    data: DataPlan, samples: Sequence[Learnable], rank: int
) -> Callable[[int], StepBatch]:
    """Number of the step -> batch on the host; sample i goes to data rank i mod cards."""
    batches = data.arrange(samples, data.batch_size * data.cards)

    def make(step: int) -> StepBatch:
        everywhere = data.draw([samples[index] for index in batches[step % len(batches)]], step)
        parts = shared_out(everywhere, rank, data.cards, data.micro_batches)
        micro_batches = tuple(map(data.collate, parts))
        return StepBatch(
            micro_batches=micro_batches,
            items=sum(map(len, parts)),
            real_tokens=sum(sample.tokens for part in parts for sample in part),
            computed_tokens=sum(inputs.positions for inputs in micro_batches),
            # At least 1, so that the loss is 0, not 0 / 0, without learned tokens.
            loss_tokens=max(sum(s.learned_tokens for s in everywhere), 1) / data.cards,
        )

    return make


#: Timed parts of a step.
_PARTS = ("data_s", "forward_s", "backward_s", "optimizer_s")
_Stamps: TypeAlias = "dict[str, list[tuple[Any, Any]]]"


class Steps:
    """Runs optimizer steps for ``measure``."""

    def __init__(
        self, training: Training, techniques: Sequence[Technique], data: DataPlan, feed: Any
    ) -> None:
        self._training = training
        self._techniques = techniques
        self._data = data
        self._feed: Iterator[StepBatch] = feed
        self._step = training.first_step
        self._stamps: _Stamps = {}

    def run_batch(self, repeat: int, batch: int) -> Callable[[], Observation]:
        """Run one optimizer step; the returned function reads loss and times off the card."""
        training, device = self._training, self._training.device
        stamps = self._stamps = {part: [] for part in _PARTS}
        for exchange in training.exchanges:
            exchange.begin_step()
        with self._timed("data_s"):
            step = next(self._feed)
        losses = self._passes(step)
        with self._timed("optimizer_s"):
            training.update()
        training.losses.append(losses)
        for technique in self._techniques:
            technique.after_step(training, self._step)
        device.mark_step()
        self._step += 1

        def observe() -> Observation:
            training.losses[-1] = read = (sum(float(loss) for loss in losses),)
            seconds: dict[str, Any] = {
                part: device.seconds_in(pairs) for part, pairs in stamps.items()
            }
            return Observation(
                items=step.items if self._data.counted else 0,
                input_tokens=step.real_tokens if self._data.counted else 0,
                computed_tokens=step.computed_tokens,
                loss=read[0],
                communication_s=_sum([one.waited_s() for one in training.exchanges]),
                **seconds,
            )

        return observe

    def untimed(self, step: StepBatch) -> None:
        """Run an optimizer step without calling ``after_step`` of techniques."""
        self._stamps = {}
        self._passes(step)
        self._training.update()

    def rehearse(self, step: StepBatch) -> set[tuple[int, ...]]:
        """Run forward and backward without lasting effect; return the input shapes."""
        training = self._training
        self._stamps = {}
        self._passes(step, rehearsal=True)
        training.optimizer.zero_grad(set_to_none=True)
        training.device.synchronize()
        return {*step.shape}

    def _passes(self, step: StepBatch, rehearsal: bool = False) -> list[torch.Tensor]:
        """Run all micro-batches forward and backward; return their losses, or one for all."""
        training = self._training
        if training.pipeline is not None:
            with self._timed("data_s"):
                moved = self._moved(step)
            scale = 0.0 if rehearsal else 1 / step.loss_tokens
            return [training.pipeline.learn(moved, scale, self._stamps)]
        losses = []
        for number, host in enumerate(step.micro_batches):
            last = number == len(step.micro_batches) - 1
            with self._timed("data_s"):
                inputs = self._data.move(host)
            with contextlib.ExitStack() as around:
                if rehearsal:
                    for enter in training.around_rehearsal:
                        around.enter_context(enter())
                else:
                    for begin in training.around_micro_batch:
                        around.enter_context(begin(last))
                with self._timed("forward_s"):
                    loss = self.loss(inputs) / step.loss_tokens
                with self._timed("backward_s"):
                    # Zero in a rehearsal, so that accumulated gradients do not change.
                    training.backward(loss * 0 if rehearsal else loss)
            losses.append(loss.detach())
            training.device.mark_step()
        return losses

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = self._training.device.stamp()
        yield
        self._stamps.setdefault(part, []).append((began, self._training.device.stamp()))

    def _moved(self, step: StepBatch) -> list[Inputs]:
        return [self._data.move(host) for host in step.micro_batches]

    def loss(self, inputs: Inputs, objective: Objective | None = None) -> torch.Tensor:
        """Summed loss of a micro-batch on the card, by default of training's objective."""
        training = self._training
        kept = training.positions(inputs.labels)
        logits = training.logits(training.called, inputs, kept)
        chosen = objective or training.objective or training.plain_loss
        return chosen(inputs, logits, kept)

    def evaluate(self, step: StepBatch, objective: Objective | None = None) -> float:
        """Loss of the current model on a batch, without learning."""
        import torch

        pipeline = self._training.pipeline
        if pipeline is not None:
            return float(pipeline.evaluate(self._moved(step))) / step.loss_tokens
        with torch.no_grad():
            total = sum(float(self.loss(part, objective)) for part in self._moved(step))
        return total / step.loss_tokens

    def held_out_loss(
        self, samples: Sequence[Learnable], objective: Objective | None = None
    ) -> float:
        """Mean loss per learned token of held-out samples, without dropout; all ranks together.

        It is the task's loss unless an objective is given. Batches have training's size, the last
        one filled from the first samples.
        """
        training, data = self._training, self._data
        plan = dataclasses.replace(data, arrange=in_order)
        make = batch_maker(plan, samples, training.layout.data_rank)
        summed = tokens = 0.0
        compiled = training.model._compiled_call_impl
        training.model.eval()
        training.model._compiled_call_impl = None  # evaluation needs no compiled graphs
        try:
            for number in range(-(-len(samples) // (data.batch_size * data.cards))):
                step = make(number)
                mean = self.evaluate(step, objective or training.plain_loss)
                summed += mean * step.loss_tokens
                tokens += step.loss_tokens
        finally:
            training.model._compiled_call_impl = compiled
            training.model.train()
        means = training.gather(summed / tokens)
        return math.fsum(means) / len(means)


def _sum(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return sum(known) if known and len(known) == len(times) else None


def flops_per_token(task: TaskSpec, model: Any, samples: Sequence[Learnable]) -> float:
    """Floating-point operations of a training step per token of these samples, for MFU.

    A linear layer of n weights takes 2n operations forward, 2n for its inputs' gradient if it or a
    layer below learns, and 2n for its weights' if they learn, times the task's ``layer_share``.
    Left out by convention: attention's own products, norms, activations, the embedding, and
    recomputation by gradient checkpointing.
    """
    import torch

    by_layer = "layer_share" in task.functions
    share = task.function("layer_share")(samples) if by_layer else lambda name: 1.0
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
