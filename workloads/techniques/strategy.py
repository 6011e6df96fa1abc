"""Strategies: how several cards train one model together.

DDP keeps the whole model on each card and averages gradients while they are computed. ZeRO splits
what would be the same on all cards: the optimizer's state (1), gradients too (2), weights too (3),
for less memory and more exchange; ZeRO 0 is DDP by DeepSpeed, to compare with. What is split can
also lie in the host's memory (offload). Tensor parallelism splits every matrix and is bound by the
links between cards; with ``tensor_parallel`` below the number of cards, DDP connects the groups.

Whatever the strategy, the same samples are learned from in the same order, and at an equal global
batch the losses are those of one card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

from workloads.finetuning_method import method_name
from workloads.parallel.deepspeed_config import deepspeed_config
from workloads.parallel.layout import tensor_size
from workloads.parallel.tensor_rules import tensor_refusals
from workloads.refusal import Asked, Refusal
from workloads.settings import setting
from workloads.techniques.base import Loading, Technique, Training

_ZERO = ("zero0", "zero1", "zero2", "zero3")


class Strategy(Technique):
    """Strategy of sharing among the cards of a gang."""

    name: ClassVar[str] = "strategy"
    title: ClassVar[str] = "strategy on several cards"
    order: ClassVar[int] = 130  # cards share what the others have made

    strategy: Literal["ddp", "zero0", "zero1", "zero2", "zero3", "tensor-parallel"] | None = (
        setting(
            None,
            role="choice",
            loads=True,
            always_in_id=True,
            also_called={
                "deepspeed": "zero2",
                "fsdp": "zero3",
                "dp": "ddp",
                "data-parallel": "ddp",
                "tp": "tensor-parallel",
            },
            description="How several cards train together: ddp (PyTorch's data-parallel), zero0 to "
            "zero3 (DeepSpeed), tensor-parallel (every matrix split over all cards). Left out: "
            "ddp. batch_size is per data-parallel card.",
        )
    )
    tensor_parallel: int | None = setting(
        None,
        role="choice",
        loads=True,
        always_in_id=True,
        ge=1,
        description="Cards that split each matrix; ddp connects the groups (data × tensor). Such a "
        "group works on batch_size samples together.",
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

    # ------------------------------------------------------------ in the plan

    def refusals(self, asked: Asked) -> Iterable[Refusal]:
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
        if tensor > 1:
            yield from self._with_tensor_parallel(asked)
        if self.strategy in _ZERO:
            yield from self._with_deepspeed(asked, tensor)

    def _one_card(self) -> Iterator[Refusal]:
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if value != info.default and (name, value) != ("tensor_parallel", 1):
                yield Refusal(
                    setting=name,
                    reason="the job has one card, and a strategy takes several",
                    hint=f"write cards: 2 or more, or leave {name} out",
                )

    def _offload(self) -> Iterator[Refusal]:
        allowed = {"offload_optimizer": _ZERO[1:], "offload_parameters": _ZERO[3:]}
        for name, strategies in allowed.items():
            if getattr(self, name) and self.strategy not in strategies:
                yield Refusal(
                    setting=name,
                    reason=f"strategy {self.strategy or 'ddp'} keeps everything on the cards",
                    hint=f"write strategy: {' or '.join(strategies)}",
                )

    def _with_tensor_parallel(self, asked: Asked) -> Iterator[Refusal]:
        parameters = asked.parameters
        method = method_name(parameters)
        if method not in ("full", "lora"):
            yield _cannot("method", f"{method} over split matrices; full and lora do")
        if parameters.get("autocast") == "fp16":
            yield _cannot("autocast", "loss scaling over split matrices")
        if parameters.get("save_adapter"):
            yield _cannot("save_adapter", "keeping an adapter that is split over cards")

    def _with_deepspeed(self, asked: Asked, tensor: int) -> Iterator[Refusal]:
        parameters = asked.parameters
        if tensor > 1:
            yield _cannot("tensor_parallel", f"{self.strategy} of split matrices; ddp does")
        method = method_name(parameters)
        if method == "qlora" or (method.startswith("qat") and self.strategy == "zero3"):
            yield _cannot("method", f"{method} under {self.strategy}; strategy ddp does")
        if parameters.get("autocast", "none") != "none":
            yield Refusal(
                setting="autocast",
                reason="DeepSpeed switches torch's autocast off inside its engine",
                hint="write precision: bf16 (fp32 master weights), or strategy: ddp",
                unsupported=True,
            )
        if parameters.get("optimizer", "adamw") != "adamw":
            yield _cannot("optimizer", f"{parameters['optimizer']} under DeepSpeed; adamw does")
        if asked.precision == "fp16":
            yield _cannot("precision", "fp16 weights under DeepSpeed; bf16 does")

    # ------------------------------------------------------------ in the job

    def before_load(self, loading: Loading) -> None:
        if self.strategy in _ZERO:
            from workloads.parallel import deepspeed_engine

            deepspeed_engine.announce(loading.device.spec.torch_type)

    def on_cards(self, training: Training) -> None:
        if training.cards == 1:
            return
        from workloads.parallel.layout import make_groups

        layout = training.layout
        groups = make_groups(layout)
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
        if layout.data_size > 1 and self.strategy not in _ZERO:
            _ddp(training, groups.data)

    def on_optimizer(self, training: Training) -> None:
        if self.strategy not in _ZERO:
            return
        from workloads.parallel import deepspeed_engine

        config = deepspeed_config(
            stage=_ZERO.index(self.strategy),
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
        deepspeed_engine.start(training, config)


def _cannot(setting: str, what: str) -> Refusal:
    return Refusal(setting=setting, reason=f"this version has no {what}", unsupported=True)


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


SPEC = Strategy
