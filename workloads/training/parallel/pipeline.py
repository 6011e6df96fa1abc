"""Pipeline parallelism by PyTorch's schedules (``torch.distributed.pipelining``).

In 1F1B a full stage alternates forward and backward passes; interleaved, each card has several
groups of layers and the pipeline fills faster. Gradients of model copies are averaged after it
drains. A stage is a shallow copy of the decoder with some layers (the first with embeddings, the
last with norm and output layer) that computes its own mask and rotary tables; ``checked`` verifies
that this gives the model's logits.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from workloads.base import Unsupported
from workloads.devices.base import Device
from workloads.training.parallel.exchange import Exchange, require
from workloads.training.parallel.layout import Groups
from workloads.training.technique import Inputs, Training


class Stage(nn.Module):
    """Some layers of a decoder; the first stage takes ids, the last one gives logits."""

    def __init__(self, body: nn.Module, training: Training, *, first: bool, last: bool) -> None:
        super().__init__()
        self.body = body
        self._takes = "input_ids" if first else "inputs_embeds"
        self._last = last
        self._arguments = training.task.forward
        self._around = training.in_forward

    def forward(self, given: torch.Tensor, **masks: torch.Tensor) -> torch.Tensor:
        """Hidden states, or logits."""
        with self._around():
            output = self.body(**{self._takes: given}, **masks, **self._arguments)
        result: torch.Tensor = output.logits if self._last else output.last_hidden_state
        return result


def stages_of(training: Training, count: int) -> list[Stage]:
    """Split the model into so many stages, which share its layers."""
    model = training.base_model
    inner: Any = getattr(model, model.base_model_prefix, None)
    layers = getattr(inner, "layers", None)
    if not (isinstance(layers, nn.ModuleList) and hasattr(inner, "embed_tokens")):
        raise Unsupported(f"this version has no stages of a {type(model).__name__}")
    if len(layers) % count:
        raise Unsupported(f"{len(layers)} layers cannot be cut into {count} equal stages")
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        raise Unsupported("the output layer is the embedding, which would lie in two stages")
    share = len(layers) // count
    kinds = getattr(inner.config, "layer_types", None)  # of attention, by which masks are made
    stages = []
    for index in range(count):
        first, last = index == 0, index == count - 1
        body = _shallow(inner)
        mine = slice(index * share, (index + 1) * share)
        body.layers = nn.ModuleList(layers[mine])
        if kinds:
            body.config = copy.copy(inner.config)
            body.config.layer_types = kinds[mine]
        if not first:
            body.embed_tokens = None
        if not last:
            body.norm = nn.Identity()
        else:
            whole = _shallow(model)
            setattr(whole, model.base_model_prefix, body)
            body = whole
        stages.append(Stage(body, training, first=first, last=last))
    return stages


def _shallow(module: Any) -> Any:
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


#: Longest sliding window (gpt-oss's) that the check of stages looks beyond.
_WINDOW = 128


@torch.no_grad()
def checked(training: Training, stages: Sequence[Stage]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of a sample by all stages; Unsupported unless the model's."""
    window = getattr(training.base_model.config, "sliding_window", None) or 0
    length = max(6, window + 1) if window <= _WINDOW else 6
    ids = 3 + torch.arange(length, device=training.device.torch_device) % 6
    ids = torch.stack([ids, ids.flip(0)])
    training.model.eval()  # dropout would make a difference of its own
    with training.in_forward():
        whole = training.base_model(input_ids=ids, **training.task.forward).logits
    passed: list[torch.Tensor] = [ids]
    for stage in stages:
        passed.append(stage.eval()(passed[-1]))
        stage.train()
    training.model.train()
    if not torch.equal(passed[-1], whole):
        raise Unsupported(
            f"the stages of a {type(training.base_model).__name__} do not compute what the "
            "model does: its code reads more than its layers"
        )
    return passed[1], passed[-1]


#: Most bytes of gradients that are averaged at once.
_BUCKET_BYTES = 25 * 1024 * 1024
_NEEDED = tuple(
    f"torch.distributed.pipelining:{schedule}.{part}"
    for schedule in ("Schedule1F1B", "ScheduleInterleaved1F1B")
    for part in ("eval", "step(return_outputs)")
)


def cut(training: Training, groups: Groups, *, schedule: str, chunks: int, length: int) -> None:
    """Keep this card's ``chunks`` stages, for ``length`` positions; Unsupported if impossible."""
    require("pipeline", *_NEEDED)
    layout = training.layout
    stages = stages_of(training, layout.pipeline * chunks)
    hidden, logits = checked(training, stages)
    mine = range(layout.stage, len(stages), layout.pipeline)
    clock = _Clock(training.device)
    rows = training.batch_size // training.micro_batches

    def example(of: torch.Tensor) -> torch.Tensor:
        """Meta tensor of a stage's input or output."""
        sizes = (rows, length, *of.shape[2:])
        learned = of.is_floating_point()
        return torch.empty(sizes, dtype=of.dtype, device="meta", requires_grad=learned)

    ids = torch.empty(1, 1, dtype=torch.long)
    made = [
        _TimedStage(
            stages[index],
            index,
            len(stages),
            torch.device(training.device.torch_device),
            input_args=example(hidden if index else ids),
            output_args=example(logits if index == len(stages) - 1 else hidden),
            group=groups.pipeline,
        )
        for index in mine
    ]
    for stage in made:
        stage.clock = clock
    training.pipeline = Pipeline(training, groups, made, clock, schedule)
    training.exchanges.append(clock)
    whole = training.base_model
    for module in (getattr(whole, whole.base_model_prefix), whole):
        module._modules.clear()  # what no stage has here is freed
    training.model = nn.ModuleList(stages[index] for index in mine).train()


class _Clock(Exchange):
    """Times a step's parts and the waiting, which counts to the pass that is awaited."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._busy: list[tuple[Any, Any]] = []
        self._whole: list[tuple[Any, Any]] = []
        self._parts: dict[str, list[tuple[Any, Any]]] = {}
        self._last: Any = None  # end of the last pass

    def begin_step(self) -> None:
        self._busy.clear()
        self._whole.clear()

    def waited_s(self) -> float | None:
        whole, busy = (self._device.seconds_in(pairs) for pairs in (self._whole, self._busy))
        return None if whole is None or busy is None else max(0.0, whole - busy)

    @contextlib.contextmanager
    def schedule(self, parts: dict[str, list[tuple[Any, Any]]]) -> Iterator[None]:
        """Time all passes of a step; ``parts`` gets the stamps of each kind."""
        self._parts, self._last = parts, self._device.stamp()
        began = self._last
        try:
            yield
        finally:
            ended = self._device.stamp()
            parts.setdefault("backward_s", []).append((self._last, ended))
            self._whole.append((began, ended))

    @contextlib.contextmanager
    def computing(self, part: str) -> Iterator[None]:
        began = self._device.stamp()
        yield
        ended = self._device.stamp()
        self._busy.append((began, ended))
        self._parts.setdefault(part, []).append((self._last, ended))
        self._last = ended


class _TimedStage(PipelineStage):
    clock: _Clock

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.computing("forward_s"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.computing("backward_s"):
            return super().backward_one_chunk(*args, **kwargs)


class Pipeline:
    """Runs all micro-batches of a step by a pipeline schedule."""

    def __init__(
        self,
        training: Training,
        groups: Groups,
        stages: Sequence[_TimedStage],
        clock: _Clock,
        schedule: str,
    ) -> None:
        self._training = training
        layout = self._layout = training.layout
        self._groups = groups
        self._clock = clock
        self._scale = 1.0
        options: dict[str, Any] = {
            "n_microbatches": training.micro_batches,
            "loss_fn": self._loss,
            "scale_grads": False,  # losses are divided by the tokens of the whole step
        }
        self._schedule: Any = (
            ScheduleInterleaved1F1B(list(stages), **options)
            if schedule == "interleaved"
            else Schedule1F1B(stages[0], **options)
        )
        self._first = layout.stage == 0
        self._last = layout.stage == layout.pipeline - 1
        self._last_rank = layout.group("pipeline")[-1]

    def learn(
        self, inputs: Sequence[Inputs], scale: float, parts: dict[str, list[tuple[Any, Any]]]
    ) -> torch.Tensor:
        """Add the gradients of the summed loss times ``scale``; return that loss.

        ``parts`` gets the stamps of ``forward_s`` and ``backward_s``.
        """
        self._scale = scale
        with self._clock.schedule(parts):
            loss = self._run(self._schedule.step, inputs)
            if self._layout.data_size > 1:
                _average(self._training.trainable(), self._groups.data, self._layout.data_size)
        return loss

    def evaluate(self, inputs: Sequence[Inputs]) -> torch.Tensor:
        """Summed loss of these micro-batches, without gradients."""
        self._scale = 1.0
        with torch.no_grad(), self._clock.schedule({}):
            return self._run(self._schedule.eval, inputs)

    def over_stages(self, of_stage: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the stages, on all of them."""
        summed = of_stage.clone()
        dist.all_reduce(summed, group=self._groups.pipeline)
        return summed

    def _run(self, run: Any, inputs: Sequence[Inputs]) -> torch.Tensor:
        device = self._training.device.torch_device
        parts = [one.tensors() for one in inputs]
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        labels, ids = whole.pop("labels"), whole.pop("input_ids")
        losses: list[torch.Tensor] = []
        run(
            *((ids,) if self._first else ()),
            target=labels if self._last else None,
            losses=losses,
            return_outputs=False,
            **whole,
        )
        summed = torch.zeros((), device=device)
        for loss in losses:  # at the last stage
            summed += loss.detach().float()
        dist.broadcast(summed, src=self._last_rank, group=self._groups.pipeline)
        return summed

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with self._clock.computing("forward_s"):
            return self._training.loss(logits, labels, None) * self._scale


def _average(parameters: Sequence[nn.Parameter], group: Any, size: int) -> None:
    """Average gradients over the copies of the model, in a few large exchanges."""
    buckets: list[list[torch.Tensor]] = []
    nbytes = 0
    for gradient in (parameter.grad for parameter in parameters):
        if gradient is None:
            continue
        if not buckets or nbytes >= _BUCKET_BYTES or gradient.dtype != buckets[-1][0].dtype:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(gradient)
        nbytes += gradient.nbytes
    for bucket in buckets:
        flat = torch.cat([one.flatten() for one in bucket])
        dist.all_reduce(flat, group=group)
        pieces = (flat / size).split([one.numel() for one in bucket])
        for one, piece in zip(bucket, pieces, strict=True):
            one.copy_(piece.view_as(one))
