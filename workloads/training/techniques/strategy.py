"""Strategies of several cards, and how their gradients travel."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

from workloads.base import BadConfiguration, JobDescription, Metric, Refusal
from workloads.settings import choice, choice_in_id
from workloads.training.parallel.layout import (
    CHUNKS,
    ZERO,
    Groups,
    chunks_of,
    combination_refusals,
    idle_share,
    layout_refusals,
    make_groups,
    pipeline_refusals,
    pipeline_size,
    tensor_refusals,
    tensor_size,
)
from workloads.training.technique import DataPlan, Loading, Technique, Training

_IDLE = Metric(
    name="pipeline_idle_share",
    title="idle share",
    description="Share of a pipeline's time in which it fills and drains, (p-1)/(m+p-1), by count.",
    beside_speed=True,
)


class Strategy(Technique):
    """Strategies: several cards train one model together.

    DDP keeps the whole model on each card and averages gradients while they are computed. ZeRO
    splits what would be the same on all cards: the optimizer's state (1), gradients too (2),
    weights too (3), for less memory and more exchange; ZeRO 0 is DDP by DeepSpeed, to compare with.
    What is split can also lie in the host's memory (offload). FSDP2 (PyTorch's ``fully_shard``)
    splits all of it, as ZeRO 3 does. Tensor parallelism splits every matrix and is bound by the
    links between cards. A pipeline cuts the layers into stages that hand micro-batches on; while it
    fills and drains, (p-1)/(m+p-1) of the cards' time is idle with p stages and m micro-batches.
    ``data_parallel`` × ``tensor_parallel`` × ``pipeline_parallel`` is the number of cards; copies
    of the model average their gradients.

    Whatever the strategy, the same samples are learned from in the same order, and at an equal
    global batch the losses are those of one card.
    """

    name: ClassVar[str] = "strategy"
    title: ClassVar[str] = "strategy on several cards"
    metrics: ClassVar[tuple[Metric, ...]] = (_IDLE,)
    order: ClassVar[int] = 130  # cards share what the others have made
    beside: ClassVar[Any] = {
        "pipeline_schedule": ("strategy", ("pipeline",)),
        "pipeline_chunks": ("pipeline_schedule", ("interleaved",)),
        "offload_optimizer": ("strategy", ZERO[1:]),
        "offload_parameters": ("strategy", ZERO[3:]),
    }
    always: ClassVar[bool] = True

    strategy: (
        Literal["ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "tensor-parallel", "pipeline"]
        | None
    ) = choice_in_id(
        None,
        loads=True,
        also_called={
            "deepspeed": "zero2",
            "fsdp": "fsdp2",
            "dp": "ddp",
            "data-parallel": "ddp",
            "tp": "tensor-parallel",
            "pp": "pipeline",
        },
        description="How several cards train together: ddp (PyTorch's data-parallel), zero0 to "
        "zero3 (DeepSpeed), fsdp2 (PyTorch's fully_shard), tensor-parallel (every matrix split "
        "over all cards), pipeline (the layers in stages). Left out: ddp. batch_size is per "
        "data-parallel card.",
    )
    data_parallel: int | None = choice(
        None,
        loads=True,
        ge=1,
        description="Copies of the model, each of which works on a part of the batch. Left out: "
        "cards / (tensor_parallel × pipeline_parallel).",
    )
    tensor_parallel: int | None = choice_in_id(
        None,
        loads=True,
        ge=1,
        description="Cards that split each matrix; the strategy connects the groups (data × "
        "tensor). Such a group works on batch_size samples together.",
    )
    pipeline_parallel: int | None = choice(
        None,
        loads=True,
        ge=1,
        description="Stages that the layers are cut into (strategy pipeline), which work on "
        "batch_size samples together, in gradient_accumulation micro-batches, each padded to "
        "max_length. Left out: all cards that data and tensor leave.",
    )
    pipeline_schedule: Literal["1f1b", "interleaved"] = choice(
        "1f1b",
        description="Order of the passes in a pipeline: 1f1b alternates one forward and one "
        "backward pass; interleaved gives each card several groups of layers, so that the pipeline "
        "fills in smaller steps.",
    )
    pipeline_chunks: int | None = choice(
        None,
        ge=2,
        description="Groups of layers on each card under the interleaved schedule. Left out: "
        f"{CHUNKS}.",
    )
    offload_optimizer: bool = choice_in_id(
        False,
        description="Keep the optimizer's state in host memory and update there (zero1 to zero3).",
    )
    offload_parameters: bool = choice_in_id(
        False, description="Keep weights in host memory between uses (zero3)."
    )

    _groups: Groups  # once they are formed
    _length: int  # of every sample in a pipeline

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        if job.cards == 1:
            for name in type(self).model_fields:
                given = not self.is_default(name) and name not in self.beside
                if given and getattr(self, name) != 1:  # one card is one copy, in one part
                    yield Refusal(
                        setting=name,
                        reason="the job has one card, and a strategy takes several",
                        hint=f"write cards: 2 or more, or leave {name} out",
                    )
            return
        tensor = tensor_size(job.parameters, job.cards)
        if self.strategy == "tensor-parallel" and self.tensor_parallel not in (None, tensor):
            yield Refusal(
                setting="tensor_parallel",
                reason=f"strategy tensor-parallel splits matrices over all {job.cards} cards",
                hint="leave it out, or write strategy: ddp for data × tensor",
            )
            return
        whole = self.strategy == "tensor-parallel"
        yield from tensor_refusals(job, tensor, "strategy" if whole else "tensor_parallel")
        if self.strategy != "pipeline" and self.pipeline_parallel not in (None, 1):
            yield Refusal(
                setting="pipeline_parallel",
                reason=f"strategy {self.strategy or 'ddp'} cuts no layers into stages",
                hint="write strategy: pipeline, or leave pipeline_parallel out",
            )
        if job.cards % tensor == 0:
            yield from [*layout_refusals(job)] or pipeline_refusals(job)
        yield from combination_refusals(job)

    def notes(self, job: JobDescription) -> Iterable[str]:
        stages = pipeline_size(job.parameters, job.cards)
        if stages < 2:
            return
        micro_batches, chunks = job.parameters["gradient_accumulation"], chunks_of(job.parameters)
        share = idle_share(stages, micro_batches, chunks)
        by_chunks = f" of {chunks} groups of layers each" if chunks > 1 else ""
        yield (
            f"pipeline_parallel {stages} with {micro_batches} micro-batches"
            f" (gradient_accumulation){by_chunks}: idle share (p-1)/(m"
            f"{'v' if chunks > 1 else ''}+p-1) = {share:.1%}"
        )

    def before_load(self, loading: Loading) -> None:
        if self.strategy in ZERO:
            from workloads.training.parallel import sharding

            sharding.announce_deepspeed(loading.device.spec.torch_type)

    def on_data(self, data: DataPlan) -> None:
        if self.strategy == "pipeline":
            data.pad_to_most()
            self._length = length = data.form.max_length
            data.details["padded_to"] = f"{length} tokens: stages hand on tensors of one shape"

    def on_cards(self, training: Training) -> None:
        if training.cards == 1:
            return
        layout = training.layout
        groups = self._groups = make_groups(layout)
        training.details |= {
            "strategy": self.strategy or "ddp",
            "data_parallel": str(layout.data_size),
            "tensor_parallel": str(layout.tensor),
        }
        if layout.tensor > 1:
            from workloads.training.parallel.exchange import Stamped
            from workloads.training.parallel.tensor import split

            exchange = Stamped(training.device)
            training.exchanges.append(exchange)
            plan = split(training.model, layout, groups, exchange)
            training.details["tensor_parallel_plan"] = plan
        if (stages := layout.pipeline) > 1:
            from workloads.training.parallel.pipeline import cut

            schedule, chunks = self.pipeline_schedule, chunks_of(self.model_dump())
            cut(training, groups, schedule=schedule, chunks=chunks, length=self._length)
            micro_batches = training.micro_batches
            training.metrics[_IDLE.name] = idle_share(stages, micro_batches, chunks)
            training.details["pipeline_parallel"] = str(stages)
            training.details["pipeline"] = (
                f"{schedule}, {micro_batches} micro-batches, "
                f"{chunks} group{'s' if chunks > 1 else ''} of layers a card"
            )
        elif self.strategy == "fsdp2":
            from workloads.training.parallel.sharding import shard

            shard(training)
        elif layout.data_size > 1 and self.strategy not in ZERO:
            _ddp(training, groups.data)

    def on_optimizer(self, training: Training) -> None:
        if self.strategy not in ZERO:
            return
        from workloads.training.parallel import sharding

        sharding.start_deepspeed(
            training,
            self._groups,
            ZERO.index(self.strategy),
            offload_optimizer=self.offload_optimizer,
            offload_parameters=self.offload_parameters,
        )


def _ddp(training: Training, group: Any) -> None:
    from torch.nn.parallel import DistributedDataParallel

    from workloads.training.parallel.exchange import Overlapped

    wrapper = DistributedDataParallel(
        training.model, process_group=group, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    training.wrapper = wrapper
    training.exchanges.append(Overlapped(wrapper))
    training.around_micro_batch.append(lambda last: nullcontext() if last else wrapper.no_sync())
    training.around_rehearsal.append(wrapper.no_sync)


_POWERSGD_RANK = 4
#: Uncompressed first exchanges: DDP reorders its buckets after the first.
_POWERSGD_START = 2


class GradientCompression(Technique):
    """Gradient compression: fewer bytes between cards, for gradients that are nearly the same.

    Data-parallel cards exchange their gradients in every step, and where links are slow that is
    what they wait for. *fp16* and *bf16* send gradients in 16 bits: half the bytes of fp32.
    *PowerSGD* sends for each matrix two thin ones whose product comes near it, and adds what was
    lost to the gradients of the next step. It begins with the third exchange, once buckets and
    averages have settled.
    """

    name: ClassVar[str] = "compression"
    title: ClassVar[str] = "gradient compression"
    order: ClassVar[int] = 140  # on what the strategy has put around the model
    beside: ClassVar[Any] = {"powersgd_rank": ("gradient_compression", ("powersgd",))}

    gradient_compression: Literal["none", "fp16", "bf16", "powersgd"] = choice_in_id(
        "none",
        description="How gradients travel between data-parallel cards (strategy ddp): as they "
        "are, in fp16 or bf16, or as products of thin matrices (powersgd).",
    )
    powersgd_rank: int | None = choice_in_id(
        None, ge=1, description=f"Columns of powersgd's thin matrices. Left out: {_POWERSGD_RANK}."
    )

    _state: Any = None  # of torch's communication hook
    _last: Any = None  # exchange that was started
    _numbers: int = 0  # of gradients exchanged through the hook
    _bytes: int = 0

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        whole = tensor_size(job.parameters, job.cards) == job.cards
        if job.cards == 1 or whole:
            yield Refusal(
                setting="gradient_compression",
                reason="one card exchanges no gradients"
                if job.cards == 1
                else "cards that share one copy of the model exchange activations and no gradients",
                hint="write cards: 2 or more with strategy: ddp, or leave it out",
            )

    def on_cards(self, training: Training) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        name, group = self.gradient_compression, training.wrapper.process_group
        hook: Any = powerSGD_hook.powerSGD_hook
        if name == "powersgd":
            training.begins_anew = "powersgd keeps what it has not sent yet on each card"
            self._state = powerSGD_hook.PowerSGDState(
                process_group=group,
                matrix_approximation_rank=self.powersgd_rank or _POWERSGD_RANK,
                start_powerSGD_iter=_POWERSGD_START,
            )
        else:
            hook, self._state = getattr(default_hooks, f"{name}_compress_hook"), group

        def exchange(bucket: Any) -> Any:
            self._numbers += bucket.buffer().numel()
            self._bytes += bucket.buffer().nbytes
            # PowerSGD continues in callbacks: with two exchanges in flight, ranks may order their
            # collectives differently and mismatch them.
            if name == "powersgd" and self._last is not None:
                self._last.wait()
            self._last = hook(self._state, bucket)
            return self._last

        # A lambda: DDP refuses annotations that are not its own.
        training.wrapper.register_comm_hook(None, lambda state, bucket: exchange(bucket))

    def after_steps(self, training: Training) -> None:
        if not self._numbers:
            raise BadConfiguration("no gradients were exchanged through the compression")
        text = f"{self.gradient_compression}: {2 * self._numbers} bytes sent for {self._bytes}"
        text += " of gradients"
        if self.gradient_compression == "powersgd":
            sent = self._state.total_numel_after_compression
            gradients = self._state.total_numel_before_compression
            rank = self.powersgd_rank or _POWERSGD_RANK
            text = f"powersgd of rank {rank}: {sent} numbers sent for {gradients} gradients"
        training.details["gradient_compression"] = text


SPECS = (Strategy, GradientCompression)
