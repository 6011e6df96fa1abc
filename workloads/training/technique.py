"""Interface of training techniques: each is one switch of fine-tuning, and an axis of a grid.

A technique is a pydantic model of its settings with hooks, called in the order of ``Technique`` if
it ``acts``. Hooks change the objects they are given: replace a function, extend a list, register
clean-up on ``ending``. Import torch only inside hooks: plans list all techniques without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from workloads.base import JobDescription, Refusal
from workloads.devices import CAPABILITIES, device_spec
from workloads.registry import Metric
from workloads.settings import Settings, Value
from workloads.training.parallel.layout import Layout, divides_weights, driven_by_deepspeed

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.stateful import Stateful

    from workloads.base import Phase
    from workloads.devices.base import Device
    from workloads.registry import TaskSpec
    from workloads.training.data import Learnable, SampleFormat
    from workloads.training.parallel.exchange import Exchange
    from workloads.training.parallel.pipeline import Pipeline


@dataclass(slots=True, kw_only=True)
class Loading:
    """Arguments for loading model and tokenizer."""

    device: Device
    model_arguments: dict[str, Any]  # of ``from_pretrained``
    tokenizer_arguments: dict[str, Any]  # of ``AutoTokenizer.from_pretrained``
    #: Model and tokenizer as loaded; raise if they are not as requested.
    checks: list[Callable[[Any, Any], object]] = field(default_factory=list)
    #: Model as loaded, tokenizer, task -> model to train.
    changes: list[Callable[[Any, Any, TaskSpec], Any]] = field(default_factory=list)
    source: Any = None  # ModelSource, once it is open
    fresh: bool = False  # draw weights instead of loading them
    details: dict[str, str] = field(default_factory=dict)  # for the row
    ending: ExitStack = field(default_factory=ExitStack)


@dataclass(slots=True, kw_only=True)
class Inputs:
    """The tensors of one micro-batch, each [rows, positions]."""

    input_ids: torch.Tensor
    labels: torch.Tensor  # -100 where nothing is learned; the task's loss says if it shifts them
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    decoder_input_ids: torch.Tensor | None = None  # of models with an encoder and a decoder
    #: A teacher's largest logits and their ids, [rows, positions, kept]; not passed to models.
    guide_values: torch.Tensor | None = None
    guide_ids: torch.Tensor | None = None

    def arguments(self) -> dict[str, torch.Tensor]:
        """Tensors that a model is called with, by name."""
        beside = ("labels", "guide_values", "guide_ids")
        return {name: tensor for name, tensor in self.tensors().items() if name not in beside}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that are set, by name."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """Apply a function to every tensor."""
        return Inputs(**{name: change(tensor) for name, tensor in self.tensors().items()})

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, positions, and the decoder's positions if it has inputs."""
        decoder = self.decoder_input_ids
        return (*self.input_ids.shape, *(() if decoder is None else decoder.shape[1:]))

    @property
    def positions(self) -> int:
        """Positions that a card works on, padding included."""
        return positions(self.shape)


def positions(shape: tuple[int, ...]) -> int:
    """Positions of a micro-batch of a shape: rows times the sum of lengths."""
    return shape[0] * sum(shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One card's work in one optimizer step."""

    micro_batches: tuple[Inputs, ...]
    items: int  # samples
    real_tokens: int  # without padding
    computed_tokens: int  # with it
    #: Divisor of the summed loss: learned tokens on all cards / cards, as gradients are averaged.
    loss_tokens: float

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        """Rows and positions of each micro-batch."""
        return tuple(inputs.shape for inputs in self.micro_batches)

    def pin_memory(self) -> StepBatch:
        """Copy to page-locked memory; torch's DataLoader calls it by this name."""
        pinned = (part.changed(lambda tensor: tensor.pin_memory()) for part in self.micro_batches)
        return replace(self, micro_batches=tuple(pinned))


@dataclass(slots=True, kw_only=True)
class DataPlan:
    """The way from samples to batches. Functions may be replaced."""

    device: Device
    task: TaskSpec  # of the model
    form: SampleFormat
    batch_size: int  # samples of one card in one optimizer step
    cards: int  # that share a batch
    #: Samples, samples per global batch -> positions of the samples of each global batch, in the
    #: order of steps (repeated if needed). Equal on all ranks.
    arrange: Callable[[Sequence[Learnable], int], list[list[int]]]
    collate: Callable[[Sequence[Learnable]], Inputs]  # micro-batch -> tensors on the host
    #: (Number of a step -> its batch on the host) -> batches in turn.
    feed: Callable[[Callable[[int], StepBatch]], Iterator[StepBatch]]
    move: Callable[[Inputs], Inputs]  # host -> card
    #: Samples of a global batch, number of the step -> samples for that step.
    draw: Callable[[Sequence[Learnable], int], Sequence[Learnable]] = lambda samples, step: samples
    first_step: int = 0  # of this attempt; above 0 if resumed from a checkpoint
    micro_batches: int = 1  # forward and backward passes per optimizer step
    counted: bool = True  # False if another rank counts the same samples
    details: dict[str, str] = field(default_factory=dict)  # for the row
    ending: ExitStack = field(default_factory=ExitStack)

    def pad_to_most(self) -> None:
        """Pad all samples to the most tokens of one, so that every batch has one shape."""
        collate, form = self.task.function("collate"), self.form
        self.collate = lambda samples: collate(samples, form, fixed=True)


#: A setting, or one value of it.
Key: TypeAlias = "str | tuple[str, Value]"
#: Micro-batch, logits, positions of the logits (None: all) -> summed loss.
Objective: TypeAlias = "Callable[[Inputs, torch.Tensor, torch.Tensor | None], torch.Tensor]"


@dataclass(slots=True, kw_only=True)
class Training:
    """One job's model in training. Functions may be replaced, lists added to."""

    device: Device
    task: TaskSpec
    cards: int
    method: str
    precision: str
    model: Any
    learning_rate: float
    #: Trainable parameters -> optimizer.
    make_optimizer: Callable[[Sequence[torch.nn.Parameter]], Any] = field(init=False)
    optimizer: Any = None  # from ``on_optimizer`` on
    #: Entered around every forward pass, in this order (autocast).
    around_forward: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    #: Entered around forward and backward of a micro-batch; True for the step's last, after which
    #: gangs exchange gradients.
    around_micro_batch: list[Callable[[bool], AbstractContextManager[Any]]] = field(
        default_factory=list
    )
    #: Entered around rehearsals, so that cards exchange no gradients in them.
    around_rehearsal: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    #: Labels [rows, positions] -> positions whose logits are needed; None: all.
    positions: Callable[[torch.Tensor], torch.Tensor | None] = lambda labels: None
    #: Logits, labels, positions of the logits (None: all) -> summed loss.
    loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = field(
        init=False
    )
    objective: Objective | None = None  # loss to learn from; None: the task's ``loss``
    #: Adds a micro-batch's gradients, given its loss.
    backward: Callable[[torch.Tensor], None] = lambda loss: loss.backward()
    #: Called once all unscaled gradients of a step are there, before ``update``.
    before_update: list[Callable[[], None]] = field(default_factory=list)
    update: Callable[[], None] = field(init=False)  # applies the gradients and clears them
    steps: int = 1  # optimizer steps of the job, warm-up included
    least_steps: int = 1  # fewest that an attempt takes itself: warm-up and timed ones
    max_gradient_norm: float | None = None  # to which gradients are clipped
    details: dict[str, str] = field(default_factory=dict)  # for the row
    layout: Layout = field(default_factory=lambda: Layout(rank=0, world_size=1))
    batch_size: int = 1  # samples of one card in one optimizer step
    micro_batches: int = 1
    #: Wrapper called instead of the model (DDP, DeepSpeed's engine); from ``on_cards`` on, with
    #: DeepSpeed from ``on_optimizer`` on.
    wrapper: Any = None
    pipeline: Pipeline | None = None  # runs a step's micro-batches; None: ``called``, one by one
    #: Entered by all ranks together to gather weights to save that cards hold in parts.
    gathered: Callable[[], AbstractContextManager[Any]] = nullcontext
    exchanges: list[Exchange] = field(default_factory=list)  # between cards
    compile_s: float = 0.0  # spent on compiling before the first step
    #: Mean loss of the current model per learned held-out token, by an objective or the task's
    #: loss; called by all ranks together. None: no examples are held out.
    held_out_loss: Callable[..., float] | None = None
    #: Metric -> its objective for ``held_out_loss`` after the last step.
    held_out_metrics: dict[str, Objective] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # for the row
    origin: dict[str, str] = field(default_factory=dict)  # stored with a saved model
    saved_files: dict[str, bytes] = field(default_factory=dict)  # beside a saved model's weights
    enter_phase: Callable[[Phase], None] = lambda phase: None
    ending: ExitStack = field(default_factory=ExitStack)  # closed after each pass over the job
    #: Reverts changes to the model's code; closed after the last step, before evaluation.
    undo: ExitStack = field(default_factory=ExitStack)
    job_ending: ExitStack = field(default_factory=ExitStack)  # closed after the job's last pass
    kept_as: str = ""  # name under which checkpoints outlive a failed attempt; "": they do not
    attempt: int = 1  # number of this try at the job
    gather: Callable[[Any], list[Any]] = lambda value: [value]  # all ranks' values, in rank order
    stateful: dict[str, Stateful] = field(default_factory=dict)  # state beyond weights, optimizer
    divided: Any = None  # DeepSpeed's engine, if it divides weights and optimizer among ranks
    begins_anew: str = ""  # reason why training does not go on from a checkpoint
    first_step: int = 0  # that this attempt takes
    #: Losses of each step's micro-batches on this rank, earlier attempts included; on the card
    #: until read.
    losses: list[Sequence[Any]] = field(default_factory=list)
    random_state: dict[str, Any] | None = None  # before this attempt's first step; None: seed's

    def __post_init__(self) -> None:
        self.loss = self.task.function("loss")
        self.update = self._update
        self.make_optimizer = self._adamw

    def _adamw(self, parameters: Sequence[torch.nn.Parameter]) -> Any:
        import torch

        return torch.optim.AdamW(parameters, lr=self.learning_rate)

    def _update(self) -> None:
        for act in self.before_update:
            act()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def called(self) -> Any:
        """The wrapper if there is one, else the model."""
        return self.model if self.wrapper is None else self.wrapper

    @property
    def base_model(self) -> Any:
        """The language model without adapter."""
        get = getattr(self.model, "get_base_model", None)
        return self.model if get is None else get()

    def logits(
        self, model: Any, inputs: Inputs, kept: torch.Tensor | None, **more: Any
    ) -> torch.Tensor:
        """Logits of a micro-batch by a model, at the positions ``kept`` (None: all)."""
        if kept is not None:
            more["logits_to_keep"] = kept
        with self.in_forward():
            return model(**inputs.arguments(), **self.task.forward, **more).logits  # type: ignore[no-any-return]

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Enter the contexts of a forward pass, such as autocast."""
        with ExitStack() as around:
            for enter in self.around_forward:
                around.enter_context(enter())
            yield

    def plain_loss(
        self, inputs: Inputs, logits: torch.Tensor, kept: torch.Tensor | None
    ) -> torch.Tensor:
        """Summed loss of the task, whatever the objective."""
        return self.loss(logits, inputs.labels, kept)

    def trainable(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer gets."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


class Technique(Settings):
    """Base of all techniques: does nothing, combines with everything."""

    name: ClassVar[str]  # of its file, or of its entry point
    title: ClassVar[str]  # for documentation and reports
    #: Hooks run in ascending order, after the last step in descending order; ours are 10 to 160.
    order: ClassVar[int] = 1000
    always: ClassVar[bool] = False  # acts whatever its settings are
    needs: ClassVar[tuple[str, ...]] = ()  # required functions of a task (``registry.TASKS``)
    metrics: ClassVar[tuple[Metric, ...]] = ()  # added to training rows (``Training.metrics``)
    #: Dependent settings: name -> the other setting and its required values (none: any set value).
    beside: ClassVar[Mapping[str, tuple[str, tuple[Value, ...]]]] = {}
    capabilities: ClassVar[Mapping[Key, str]] = {}  # required of devices (``devices.CAPABILITIES``)
    #: Conflicts: a setting or one value of it; another one, its values; the reason.
    excludes: ClassVar[Sequence[tuple[Key, str, tuple[Value, ...], str]]] = ()
    whole_weights: ClassVar[Sequence[Key]] = ()  # read whole weights: PyTorch's strategies only

    @property
    def acts(self) -> bool:
        """True if an independent setting is not its default; else no hook is called."""
        settings = type(self).model_fields
        alone = (name for name in settings if self.beside.get(name, ("",))[0] not in settings)
        return self.always or not all(map(self.is_default, alone))

    def declared_refusals(self, job: JobDescription) -> Iterator[Refusal]:
        """Objections from the class's declarations. Pure; no torch."""
        for name, (other, values) in self.beside.items():
            there = job.parameters.get(other)
            if self.is_default(name) or (there in values if values else there):
                continue
            wanted = " or ".join(f"{value}".lower() for value in values if value is not None)
            companion = f"{other}: {wanted}" if wanted else other
            yield Refusal(
                setting=name,
                reason=f"it means something only beside {companion}",
                hint=f"write {companion}, or leave {name} out",
            )
        for key, other, values, reason in self.excludes:
            if (name := self._set(key)) and job.parameters.get(other) in values:
                yield Refusal(setting=name, reason=reason, hint=f"leave {name} or {other} out")
        device = device_spec(job.device)
        for key, capability in self.capabilities.items():
            if (name := self._set(key)) and not device.can(capability):
                yield Refusal(
                    setting=name,
                    reason=f"it needs what {device.title} lacks: {CAPABILITIES[capability]}",
                    hint=f"leave {name} out",
                    unsupported=True,
                )
        driven, divided = driven_by_deepspeed(job), divides_weights(job.parameters, job.cards)
        for name in filter(None, map(self._set, self.whole_weights if driven or divided else ())):
            yield Refusal(
                setting=name,
                reason="it reads whole weights, of which each card has a part here"
                if divided
                else "DeepSpeed drives the model, and it was not tried with that",
                hint=f"write strategy: ddp, or leave {name} out",
                unsupported=True,
            )

    def _set(self, key: Key) -> str:
        """Name of the key's setting if it is set (to the key's value, if any), else ""."""
        name, value = key if isinstance(key, tuple) else (key, None)
        there = not self.is_default(name) and value in (None, getattr(self, name))
        return name if there else ""

    def is_default(self, name: str) -> bool:
        """Tell if a setting of this technique has its default."""
        return bool(getattr(self, name) == type(self).model_fields[name].default)

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        """Objections to this technique, as it is set, in this job. Pure; no torch."""
        return ()

    def notes(self, job: JobDescription) -> Iterable[str]:
        """Lines of the plan on this technique, as it is set, in this job. Pure; no torch."""
        return ()

    def before_load(self, loading: Loading) -> None:
        """Change what is loaded, or a setting of the process (undone after the job)."""

    def on_data(self, data: DataPlan) -> None:
        """Change how samples become batches."""

    def on_model(self, training: Training) -> None:
        """Change the model, or what is done around its passes."""

    def on_cards(self, training: Training) -> None:
        """Divide work or model among several cards. All ranks are here."""

    def on_optimizer(self, training: Training) -> None:
        """Change the optimizer, or how it is used."""

    def before_steps(
        self, training: Training, rehearse: Callable[[int], set[tuple[int, ...]]]
    ) -> None:
        """Act before the first step; ``rehearse`` runs a step without update, returns shapes."""

    def after_step(self, training: Training, step: int) -> None:
        """Act after each optimizer step (from 0, warm-up included)."""

    def after_steps(self, training: Training) -> None:
        """Act after the last step, before evaluation; called in descending order."""
