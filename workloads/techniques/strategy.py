"""Strategies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from workloads.base import JobDescription, Metric, Refusal
from workloads.parallel.deepspeed_config import deepspeed_config
from workloads.parallel.layout import Groups, tensor_size
from workloads.parallel.pipeline_rules import (
    CHUNKS,
    idle_share,
    layout_refusals,
    note,
    pipeline_refusals,
)
from workloads.parallel.strategy_rules import ZERO, combination_refusals
from workloads.parallel.tensor_rules import tensor_refusals
from workloads.settings import setting
from workloads.techniques.base import DataPlan, Loading, Technique, Training

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

    strategy: (
        Literal["ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "tensor-parallel", "pipeline"]
        | None
    ) = setting(
        None,
        role="choice",
        loads=True,
        always_in_id=True,
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
    data_parallel: int | None = setting(
        None,
        role="choice",
        loads=True,
        ge=1,
        description="Copies of the model, each of which works on a part of the batch. Left out: "
        "cards / (tensor_parallel × pipeline_parallel).",
    )
    tensor_parallel: int | None = setting(
        None,
        role="choice",
        loads=True,
        always_in_id=True,
        ge=1,
        description="Cards that split each matrix; the strategy connects the groups (data × "
        "tensor). Such a group works on batch_size samples together.",
    )
    pipeline_parallel: int | None = setting(
        None,
        role="choice",
        loads=True,
        ge=1,
        description="Stages that the layers are cut into (strategy pipeline), which work on "
        "batch_size samples together, in gradient_accumulation micro-batches, each padded to "
        "max_length. Left out: all cards that data and tensor leave.",
    )
    pipeline_schedule: Literal["1f1b", "interleaved"] = setting(
        "1f1b",
        role="choice",
        description="Order of the passes in a pipeline: 1f1b alternates one forward and one "
        "backward pass; interleaved gives each card several groups of layers, so that the pipeline "
        "fills in smaller steps.",
    )
    pipeline_chunks: int | None = setting(
        None,
        role="choice",
        ge=2,
        description="Groups of layers on each card under the interleaved schedule. Left out: "
        f"{CHUNKS}.",
    )
    offload_optimizer: bool = setting(
        False,
        role="choice",
        always_in_id=True,
        description="Keep the optimizer's state in host memory and update there (zero1 to zero3).",
    )
    offload_parameters: bool = setting(
        False,
        role="choice",
        always_in_id=True,
        description="Keep weights in host memory between uses (zero3).",
    )

    _groups: list[Groups] = PrivateAttr(default_factory=list)  # once they are formed
    _length: list[int] = PrivateAttr(default_factory=list)  # of every sample in a pipeline

    # ------------------------------------------------------------ in the plan

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        if asked.cards == 1:
            yield from self._one_card()
            return
        tensor = tensor_size(asked.parameters, asked.cards)
        if self.strategy == "tensor-parallel" and self.tensor_parallel not in (None, tensor):
            yield Refusal(
                setting="tensor_parallel",
                reason=f"strategy tensor-parallel splits matrices over all {asked.cards} cards",
                hint="leave it out, or write strategy: ddp for data × tensor",
            )
            return
        whole = self.strategy == "tensor-parallel"
        yield from tensor_refusals(asked, tensor, "strategy" if whole else "tensor_parallel")
        yield from self._offload()
        yield from self._without_pipeline()
        if asked.cards % tensor == 0:
            wrong = list(layout_refusals(asked))
            yield from wrong or pipeline_refusals(asked)
        yield from combination_refusals(asked, self.strategy, tensor)

    def notes(self, asked: JobDescription) -> Iterable[str]:
        if told := note(asked):
            yield told

    def _one_card(self) -> Iterator[Refusal]:
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if value != info.default and (not name.endswith("_parallel") or value != 1):
                yield Refusal(
                    setting=name,
                    reason="the job has one card, and a strategy takes several",
                    hint=f"write cards: 2 or more, or leave {name} out",
                )

    def _without_pipeline(self) -> Iterator[Refusal]:
        """Settings of a pipeline in a job that has none."""
        for name in ("pipeline_parallel", "pipeline_schedule", "pipeline_chunks"):
            value = getattr(self, name)
            usual = (type(self).model_fields[name].default, 1)
            if self.strategy != "pipeline" and value not in usual:
                yield Refusal(
                    setting=name,
                    reason=f"strategy {self.strategy or 'ddp'} cuts no layers into stages",
                    hint=f"write strategy: pipeline, or leave {name} out",
                )
        if self.pipeline_chunks and self.pipeline_schedule == "1f1b":
            yield Refusal(
                setting="pipeline_chunks",
                reason="schedule 1f1b has one group of layers on each card",
                hint="write pipeline_schedule: interleaved, or leave pipeline_chunks out",
            )

    def _offload(self) -> Iterator[Refusal]:
        allowed = {"offload_optimizer": ZERO[1:], "offload_parameters": ZERO[3:]}
        for name, strategies in allowed.items():
            if getattr(self, name) and self.strategy not in strategies:
                yield Refusal(
                    setting=name,
                    reason=f"strategy {self.strategy or 'ddp'} keeps everything on the cards",
                    hint=f"write strategy: {' or '.join(strategies)}",
                )

    # ------------------------------------------------------------ in the job

    def before_load(self, loading: Loading) -> None:
        if self.strategy in ZERO:
            from workloads.parallel import deepspeed_engine

            deepspeed_engine.announce(loading.device.spec.torch_type)

    def on_data(self, data: DataPlan) -> None:
        if self.strategy == "pipeline":
            collate, length = data.task.function("collate"), data.form.max_length
            data.collate = lambda samples: collate(samples, data.form, fixed=True)
            data.details["padded_to"] = f"{length} tokens: stages hand on tensors of one shape"
            self._length.append(length)

    def on_cards(self, training: Training) -> None:
        if training.cards == 1:
            return
        from workloads.parallel.layout import make_groups

        layout = training.layout
        groups = make_groups(layout)
        self._groups.append(groups)
        training.details["strategy"] = self.strategy or "ddp"
        training.details["data_parallel"] = str(layout.data_size)
        training.details["tensor_parallel"] = str(layout.tensor)
        if layout.tensor > 1:
            from workloads.parallel.exchange import Stamped
            from workloads.parallel.tensor import split

            exchange = Stamped(training.device)
            training.exchanges.append(exchange)
            plan = split(training.model, layout, groups, exchange)
            training.details["tensor_parallel_plan"] = plan
        if layout.pipeline > 1:
            self._cut(training, groups)
        elif self.strategy == "fsdp2":
            from workloads.parallel.fully_sharded import shard

            shard(training)
        elif layout.data_size > 1 and self.strategy not in ZERO:
            _ddp(training, groups.data)

    def _cut(self, training: Training, groups: Groups) -> None:
        from workloads.parallel.pipeline import cut

        stages, micro_batches = training.layout.pipeline, training.micro_batches
        schedule = self.pipeline_schedule
        chunks = (self.pipeline_chunks or CHUNKS) if schedule == "interleaved" else 1
        cut(training, groups, schedule=schedule, chunks=chunks, length=self._length[-1])
        training.metrics[_IDLE.name] = idle_share(stages, micro_batches, chunks)
        training.details["pipeline_parallel"] = str(stages)
        training.details["pipeline"] = (
            f"{schedule}, {micro_batches} micro-batches, "
            f"{chunks} group{'s' if chunks > 1 else ''} of layers a card"
        )

    def on_optimizer(self, training: Training) -> None:
        if self.strategy not in ZERO:
            return
        from workloads.parallel import deepspeed_engine

        config = deepspeed_config(
            stage=ZERO.index(self.strategy),
            device=training.device.name,
            precision=training.precision,
            batch_size=training.batch_size,
            micro_batches=training.micro_batches,
            data_size=training.layout.data_size,
            trained=sum(parameter.numel() for parameter in training.trainable()),
            learning_rate=training.learning_rate,
            max_gradient_norm=training.max_gradient_norm,
            offload_optimizer=self.offload_optimizer,
            offload_parameters=self.offload_parameters,
        )
        split = training.layout.tensor > 1
        deepspeed_engine.start(training, config, self._groups[-1] if split else None)


def _ddp(training: Training, group: Any) -> None:
    """Average gradients over ``group`` while they are computed."""
    from torch.nn.parallel import DistributedDataParallel

    from workloads.parallel.exchange import Overlapped

    wrapper = DistributedDataParallel(
        training.model, process_group=group, broadcast_buffers=False, gradient_as_bucket_view=True
    )

    def exchange(last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else wrapper.no_sync()

    training.wrapper = wrapper
    training.exchanges.append(Overlapped(wrapper))
    training.around_micro_batch.append(exchange)
    training.around_rehearsal.append(wrapper.no_sync)


SPECS = (Strategy,)
