"""The seam of training techniques: each is one switch of fine-tuning, and an axis of a grid.

A technique is a pydantic model of its own parameters (names and descriptions go into grids and
their schema), with methods for the points at which it may act, in the order of ``Technique``. They
do nothing unless a technique overrides them, and are called only where it is set to do something
(``Technique.acts``). What they may change is what the objects that they are given hold: replace a
function, add to a list. What has to end with the job, however it ends (processes, files), is put on
their ``ending``. A module of a technique imports torch only inside those methods, so that a plan
knows all techniques without it.
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
    from workloads.training.parallel.deepspeed import Divided
    from workloads.training.parallel.exchange import Exchange
    from workloads.training.parallel.pipeline import Pipeline


@dataclass(slots=True, kw_only=True)
class Loading:
    """Arguments with which model and tokenizer will be loaded."""

    device: Device
    model_arguments: dict[str, Any]  # of ``from_pretrained``
    tokenizer_arguments: dict[str, Any]  # of ``AutoTokenizer.from_pretrained``
    #: Given model and tokenizer as loaded: whether they are what was asked for.
    checks: list[Callable[[Any, Any], None]] = field(default_factory=list)
    #: Given the model as loaded, its tokenizer and its task: the model that is trained.
    changes: list[Callable[[Any, Any, TaskSpec], Any]] = field(default_factory=list)
    method: str = ""  # of fine-tuning
    source: Any = None  # ModelSource, once it is open
    fresh: bool = False  # not to load weights, but to draw them
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
    #: A teacher's largest logits and their ids, [rows, positions, kept]; no model is given them.
    guide_values: torch.Tensor | None = None
    guide_ids: torch.Tensor | None = None

    def arguments(self) -> dict[str, torch.Tensor]:
        """Those that a model is called with, by name."""
        beside = ("labels", "guide_values", "guide_ids")
        return {name: tensor for name, tensor in self.tensors().items() if name not in beside}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that there are, by name."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """The same with every tensor put through a function."""
        return Inputs(**{name: change(tensor) for name, tensor in self.tensors().items()})

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, their positions, and those of the decoder's rows where there are such."""
        decoder = self.decoder_input_ids
        return (*self.input_ids.shape, *(() if decoder is None else decoder.shape[1:]))

    @property
    def positions(self) -> int:
        """Positions that a card works on, padding included."""
        return positions(self.shape)


def positions(shape: tuple[int, ...]) -> int:
    """Positions of a micro-batch of a shape: rows by the lengths of their parts."""
    return shape[0] * sum(shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One card's work in one optimizer step."""

    micro_batches: tuple[Inputs, ...]
    items: int  # samples
    real_tokens: int  # without padding
    computed_tokens: int  # with it
    #: By this the summed loss is divided: the tokens to be learned on all cards, over the number
    #: of cards, since gradients of cards are averaged.
    loss_tokens: float

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        """Rows and positions of each micro-batch."""
        return tuple(inputs.shape for inputs in self.micro_batches)

    def pin_memory(self) -> StepBatch:
        """The same in page-locked memory, from which a card copies without the host's help; the
        name by which torch's DataLoader asks for it."""
        pinned = (part.changed(lambda tensor: tensor.pin_memory()) for part in self.micro_batches)
        return replace(self, micro_batches=tuple(pinned))


@dataclass(slots=True, kw_only=True)
class DataPlan:
    """The way from samples to batches. Functions may be replaced."""

    device: Device
    task: TaskSpec  # of the model: what its samples are like
    form: SampleFormat
    batch_size: int  # samples of one card in one optimizer step
    cards: int  # that share a batch
    #: Samples and samples per global batch -> positions of the samples of each global batch, in
    #: the order of steps; gone through again when there are more steps. The same on all ranks.
    arrange: Callable[[Sequence[Learnable], int], list[list[int]]]
    #: Samples of a micro-batch -> tensors on the host.
    collate: Callable[[Sequence[Learnable]], Inputs]
    #: Number of the step -> its batch on the host. Replaced by what reads ahead.
    feed: Callable[[Callable[[int], StepBatch]], Iterator[StepBatch]]
    #: A micro-batch on the host -> the same on the card.
    move: Callable[[Inputs], Inputs]
    #: Samples of a global batch and the number of the step -> the same as that step meets them.
    draw: Callable[[Sequence[Learnable], int], Sequence[Learnable]] = lambda samples, step: samples
    first_step: int = 0  # that this attempt takes; later ones where it goes on from a checkpoint
    micro_batches: int = 1  # forward and backward passes per optimizer step
    counted: bool = True  # False where another rank counts the same samples
    details: dict[str, str] = field(default_factory=dict)  # for the row
    ending: ExitStack = field(default_factory=ExitStack)


#: A setting, or one value of it.
Key: TypeAlias = "str | tuple[str, Value]"
#: A micro-batch, its logits and the positions that they are of (None: all) -> summed loss.
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
    make_optimizer: Callable[[Sequence[torch.nn.Parameter]], Any]
    optimizer: Any = None  # from ``on_optimizer`` on
    #: Entered around every forward pass, in this order (autocast).
    around_forward: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    #: Entered around forward and backward of a micro-batch; told whether it is the step's last
    #: (gangs exchange gradients only then).
    around_micro_batch: list[Callable[[bool], AbstractContextManager[Any]]] = field(
        default_factory=list
    )
    #: Entered around a pass of which nothing shall remain: cards exchange no gradients in it.
    around_rehearsal: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    #: Labels [rows, positions] -> the positions whose logits are needed; None: of all.
    positions: Callable[[torch.Tensor], torch.Tensor | None] = lambda labels: None
    #: Logits, labels and the positions that the logits are of (None: all) -> summed loss.
    loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    #: A micro-batch, its logits and their positions -> summed loss that is learned from; None: the
    #: task's, ``loss``.
    objective: Objective | None = None
    #: The loss of a micro-batch -> its gradients, added to those there are.
    backward: Callable[[torch.Tensor], None]
    #: Called when all gradients of a step are there, as they are (without a scale), before
    #: ``update`` applies them.
    before_update: list[Callable[[], None]] = field(default_factory=list)
    #: Applies the gradients and clears them.
    update: Callable[[], None]
    steps: int = 1  # optimizer steps of the job, warm-up included
    #: Of these, the fewest that an attempt has to take itself: its own warm-up and what is timed.
    least_steps: int = 1
    max_gradient_norm: float | None = None  # to which gradients are clipped
    details: dict[str, str] = field(default_factory=dict)  # for the row
    layout: Layout = field(default_factory=lambda: Layout(rank=0, world_size=1))
    batch_size: int = 1  # samples of one card in one optimizer step
    micro_batches: int = 1
    #: What several cards put around the model (DDP, DeepSpeed's engine) and is called instead of
    #: it; from ``on_cards`` on, with DeepSpeed from ``on_optimizer`` on.
    wrapper: Any = None
    #: Runs the micro-batches of a step together; None: one after another, by ``called``.
    pipeline: Pipeline | None = None
    #: Entered by all ranks together to see what is trained whole, where cards have parts of it.
    gathered: Callable[[], AbstractContextManager[Any]] = nullcontext
    #: The ways in which the cards exchange what they computed.
    exchanges: list[Exchange] = field(default_factory=list)
    compile_s: float = 0.0  # spent on compiling before the first step
    #: Mean loss of the learned tokens of held-out examples, as the model is now, by an objective or
    #: (without one) the task's loss; called by all ranks together. None where none are held out.
    held_out_loss: Callable[..., float] | None = None
    #: Name of a metric -> the objective by which the held-out examples are read for it, as for
    #: ``held_out_loss``: after the last step, of the model as it then is.
    held_out_metrics: dict[str, Objective] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # for the row
    origin: dict[str, str] = field(default_factory=dict)  # kept with a model that is saved
    enter_phase: Callable[[Phase], None] = lambda phase: None
    ending: ExitStack = field(default_factory=ExitStack)
    #: Closed after the last step, before the trained model is looked at: what was put into the
    #: model's code for the steps alone.
    undo: ExitStack = field(default_factory=ExitStack)
    #: Closed when the job is over, which may take a second pass over it; ``ending`` after each.
    job_ending: ExitStack = field(default_factory=ExitStack)
    #: Under this name checkpoints outlive an attempt that fails; "": they end with it.
    kept_as: str = ""
    attempt: int = 1  # number of this try at the job
    #: Every rank's value, in rank order, on every rank.
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    #: By name, what remembers something between steps beside weights and optimizer.
    stateful: dict[str, Stateful] = field(default_factory=dict)
    #: Set where weights and optimizer are not this rank's alone to save.
    divided: Divided | None = None
    begins_anew: str = ""  # reason why training does not go on from a checkpoint
    first_step: int = 0  # that this attempt takes
    #: This rank's loss of each step so far, those of earlier attempts included; each is the losses
    #: of its micro-batches, which are on the card until somebody reads them.
    losses: list[Sequence[Any]] = field(default_factory=list)
    #: Random state of before the first step that this attempt takes; None: the seed's.
    random_state: dict[str, Any] | None = None

    @property
    def called(self) -> Any:
        """Callable that a batch is given to."""
        return self.model if self.wrapper is None else self.wrapper

    @property
    def base_model(self) -> Any:
        """The language model, below an adapter where there is one."""
        get = getattr(self.model, "get_base_model", None)
        return self.model if get is None else get()

    def logits(
        self, model: Any, inputs: Inputs, kept: torch.Tensor | None, **more: Any
    ) -> torch.Tensor:
        """Logits of a micro-batch by a model, at the positions that are needed (None: at all)."""
        if kept is not None:
            more["logits_to_keep"] = kept
        with self.in_forward():
            return model(**inputs.arguments(), **self.task.forward, **more).logits  # type: ignore[no-any-return]

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Be where a forward pass is, autocast for instance."""
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
    """Base of all: does nothing, goes together with everything."""

    name: ClassVar[str]  # of its file, or of its entry point
    #: What people call it, for documentation and reports.
    title: ClassVar[str]
    #: Among all techniques, which act at each point in ascending order, and after the last step in
    #: descending order; ours are 10 to 160.
    order: ClassVar[int] = 1000
    #: True where it has something to do whatever its settings say.
    always: ClassVar[bool] = False
    #: Functions of a task (``registry.TASKS``) without which it has nothing to act on.
    needs: ClassVar[tuple[str, ...]] = ()
    #: Figures that it adds to rows of workloads that train (``Training.metrics``).
    metrics: ClassVar[tuple[Metric, ...]] = ()
    #: Settings that mean something only beside another one: name -> the other, and those of its
    #: values (none: any that is set).
    beside: ClassVar[Mapping[str, tuple[str, tuple[Value, ...]]]] = {}
    #: The capability (``devices.CAPABILITIES``) that a device needs for a setting, or for one value
    #: of it.
    capabilities: ClassVar[Mapping[Key, str]] = {}
    #: What does not go together: a setting, or one value of it; another one, its values; why.
    excludes: ClassVar[Sequence[tuple[Key, str, tuple[Value, ...], str]]] = ()
    #: Settings, or one value of them, that read whole weights, and were tried with PyTorch's own
    #: strategies only.
    whole_weights: ClassVar[Sequence[Key]] = ()

    @property
    def acts(self) -> bool:
        """True if it has something to do: a setting that means something alone is not its
        default. Nothing else of a technique is called where it is not."""
        settings = type(self).model_fields
        alone = (name for name in settings if self.beside.get(name, ("",))[0] not in settings)
        return self.always or not all(map(self.is_default, alone))

    def declared_refusals(self, job: JobDescription) -> Iterator[Refusal]:
        """Objections by what is declared above. Pure; no torch."""
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
        """Name of a setting that is set, to one value where the key has one; "": it is not."""
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
        """Do something before the first step. ``rehearse`` runs the batch of a step forward and
        backward, forgets its gradients, and tells the shapes that its inputs came in."""

    def after_step(self, training: Training, step: int) -> None:
        """Do something after each optimizer step (from 0, warm-up included)."""

    def after_steps(self, training: Training) -> None:
        """Do something after the last step, before the trained model is looked at. Techniques of
        higher order have acted; those of lower order have not yet changed the model."""
