"""Gradient compression."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PrivateAttr

from workloads.base import BadConfiguration, JobDescription, Refusal
from workloads.parallel.layout import model_parallel_size
from workloads.parallel.strategy_rules import driven_by_deepspeed
from workloads.settings import setting
from workloads.techniques.base import Technique, Training

if TYPE_CHECKING:
    import torch

_POWERSGD_RANK = 4
#: Exchanges that are left whole: DDP orders its buckets anew after the first.
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

    gradient_compression: Literal["none", "fp16", "bf16", "powersgd"] = setting(
        "none",
        role="choice",
        always_in_id=True,
        description="How gradients travel between data-parallel cards (strategy ddp): as they "
        "are, in fp16 or bf16, or as products of thin matrices (powersgd).",
    )
    powersgd_rank: int | None = setting(
        None,
        role="choice",
        always_in_id=True,
        ge=1,
        description=f"Columns of powersgd's thin matrices. Left out: {_POWERSGD_RANK}.",
    )

    _hook: list[Any] = PrivateAttr(default_factory=list)

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        if self.gradient_compression == "none":
            return
        strategy = asked.parameters.get("strategy") or "ddp"
        whole = model_parallel_size(asked.parameters, asked.cards) == asked.cards
        if asked.cards == 1 or whole:
            yield Refusal(
                setting="gradient_compression",
                reason="one card exchanges no gradients"
                if asked.cards == 1
                else "cards that share one copy of the model exchange activations and no gradients",
                hint="write cards: 2 or more with strategy: ddp, or leave it out",
            )
        elif strategy != "ddp":
            owner = "DeepSpeed's" if driven_by_deepspeed(asked) else "PyTorch's"
            yield Refusal(
                setting="gradient_compression",
                reason=f"strategy {strategy} exchanges gradients in {owner} own way",
                hint="write strategy: ddp",
                unsupported=True,
            )

    def on_cards(self, training: Training) -> None:
        if self.gradient_compression == "none":
            return
        wrapper = training.wrapper
        if self.gradient_compression == "powersgd":
            training.begins_anew = "powersgd keeps what it has not sent yet on each card"
            hook: Any = _PowerSgd(wrapper.process_group, self.powersgd_rank or _POWERSGD_RANK)
        else:
            hook = _Short(wrapper.process_group, self.gradient_compression)
        # A lambda: DDP refuses annotations that are not its own.
        wrapper.register_comm_hook(None, lambda state, bucket: hook.exchange(bucket))
        self._hook.append(hook)

    def after_steps(self, training: Training) -> None:
        for hook in self._hook:
            if not hook.exchanges:
                raise BadConfiguration("no gradients were exchanged through the compression")
            training.details["gradient_compression"] = hook.summary()


class _Short:
    """Gradients in 16 bits."""

    def __init__(self, group: Any, name: str) -> None:
        import torch

        self._group, self._name = group, name
        self._dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
        self.exchanges = 0
        self._given = self._sent = 0  # bytes

    def exchange(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """For DDP's communication hook: the bucket's average over all ranks, some time later."""
        import torch.distributed as dist

        gradients = bucket.buffer()
        short = gradients.to(self._dtype).div_(self._group.size())
        self.exchanges += 1
        self._given += gradients.nbytes
        self._sent += short.nbytes
        done = dist.all_reduce(short, group=self._group, async_op=True).get_future()  # type: ignore[union-attr]

        def longer(future: Any) -> torch.Tensor:
            gradients.copy_(future.value()[0])
            averaged: torch.Tensor = gradients
            return averaged

        result: torch.futures.Future[torch.Tensor] = done.then(longer)
        return result

    def summary(self) -> str:
        return f"{self._name}: {self._sent} bytes sent for {self._given} of gradients"


class _PowerSgd:
    """Gradients as products of thin matrices, what is lost kept for the next exchange."""

    def __init__(self, group: Any, rank: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self._hook = powerSGD_hook.powerSGD_hook
        self._state = powerSGD_hook.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=_POWERSGD_START,
        )
        self._rank = rank
        self._before: Any = None  # the exchange that was begun last
        self.exchanges = 0

    def exchange(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """For DDP's communication hook: the bucket's average over all ranks, some time later."""
        self.exchanges += 1
        # An exchange goes on in callbacks. With two under way, ranks may begin their parts in
        # different orders, and the backend pairs what does not belong together.
        if self._before is not None:
            self._before.wait()
        result: torch.futures.Future[torch.Tensor] = self._hook(self._state, bucket)
        self._before = result
        return result

    def summary(self) -> str:
        sent = self._state.total_numel_after_compression
        given = self._state.total_numel_before_compression
        return f"powersgd of rank {self._rank}: {sent} numbers sent for {given} gradients"


SPECS = (GradientCompression,)
