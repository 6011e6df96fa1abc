"""Data loading."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from workloads.base import BadConfiguration, JobDescription, Refusal
from workloads.settings import setting
from workloads.techniques.base import DataPlan, Inputs, StepBatch, Technique

if TYPE_CHECKING:
    from workloads.devices.base import Copies, SideCopies

#: Batches that each worker holds ready, unless told.
_PREFETCH = 2


class DataLoading(Technique):
    """Data loading: batches made while the card computes, and copied while it computes.

    Putting samples into tensors is the host's work. Done in turn, the card waits for it; worker
    processes make the next batches in the meantime and hold some ready (prefetch). A copy to a card
    is queued like any other work only from page-locked ("pinned") memory, and only then does it pay
    not to wait for it (non-blocking). Still the work of a step begins behind the copy of its batch;
    copied ahead, on a stream of its own while the card computes the step before, it is there
    already. The share ``data_s`` of a step shows what is left of all this.
    """

    name: ClassVar[str] = "data-loading"
    title: ClassVar[str] = "data loading"
    order: ClassVar[int] = 30
    beside: ClassVar[Any] = {
        "prefetch_batches": ("data_workers", ()),
        "non_blocking_copies": ("pin_memory", (True,)),
        "copy_ahead": ("pin_memory", (True,)),
    }
    capabilities: ClassVar[Any] = {
        "pin_memory": "pinned_memory",
        "non_blocking_copies": "pinned_memory",
        "copy_ahead": "side_copies",
    }

    data_workers: int = setting(
        0,
        role="choice",
        always_in_id=True,
        ge=0,
        le=64,
        description="Processes that make batches ahead; 0: the training process makes each batch "
        "when it needs it.",
    )
    prefetch_batches: int | None = setting(
        None,
        role="choice",
        always_in_id=True,
        ge=1,
        description=f"Batches that each worker holds ready. Left out: {_PREFETCH}.",
    )
    pin_memory: bool = setting(
        False,
        role="choice",
        always_in_id=True,
        description="Put batches into page-locked memory before they are copied.",
    )
    non_blocking_copies: bool = setting(
        False,
        role="choice",
        always_in_id=True,
        description="Do not wait for copies of batches to the card (with pin_memory).",
    )
    copy_ahead: bool = setting(
        False,
        role="choice",
        description="Copy the next batch on a stream of its own while the card computes (with "
        "pin_memory).",
    )

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        if self.copy_ahead and self.non_blocking_copies:
            yield Refusal(
                setting="non_blocking_copies",
                reason="batches that are copied ahead are waited for by the card alone",
                hint="leave out one of copy_ahead and non_blocking_copies",
            )

    def on_data(self, data: DataPlan) -> None:
        if self.non_blocking_copies:
            data.move = lambda inputs: _move(inputs, data.device.torch_device)
        if self.copy_ahead:
            data.feed = lambda make: ahead(self._feed(data, make), data.device.side_copies())
        elif self.data_workers or self.pin_memory:
            data.feed = lambda make: self._feed(data, make)

    def _feed(self, data: DataPlan, make: Callable[[int], StepBatch]) -> Iterator[StepBatch]:
        from torch.utils.data import DataLoader

        workers: dict[str, Any] = {}
        if self.data_workers:
            # Forked, so that samples and functions are simply there; a fork must not touch a card,
            # and does not: batches are on the host.
            workers = {
                "num_workers": self.data_workers,
                "prefetch_factor": self.prefetch_batches or _PREFETCH,
                "multiprocessing_context": "fork",
            }
        loader: DataLoader[Any] = DataLoader(
            _Steps(make),  # type: ignore[arg-type]
            batch_size=None,
            sampler=itertools.count(data.first_step),  # type: ignore[arg-type]
            pin_memory=self.pin_memory,
            **workers,
        )
        made_by: set[int] = set()
        batches = iter(loader)

        def stop() -> None:
            nonlocal batches
            del batches  # the loader's iterator ends its processes when nobody holds it

        data.ending.callback(stop)

        def read() -> Iterator[StepBatch]:
            while True:
                pid, batch = next(batches)
                made_by.add(pid)
                if self.data_workers:
                    if os.getpid() in made_by:
                        raise BadConfiguration("batches were made by the training process itself")
                    data.details["data_workers"] = f"{len(made_by)} processes made batches"
                yield batch

        return read()


def ahead(batches: Iterator[StepBatch], copies: SideCopies) -> Iterator[StepBatch]:
    """Each batch on its card, handed out when the copy of the next one is queued."""

    def begin() -> tuple[StepBatch, Copies]:
        batch = next(batches)
        tensors = [t for part in batch.micro_batches for t in part.tensors().values()]
        return batch, copies.begin(tensors)

    coming = begin()
    while True:
        batch, copied = coming
        there = iter(copies.arrived(copied))
        coming = begin()
        parts = tuple(
            Inputs(**{name: next(there) for name in part.tensors()}) for part in batch.micro_batches
        )
        yield replace(batch, micro_batches=parts)


class _Steps:
    """The batch of each step, and the process that made it."""

    def __init__(self, make: Callable[[int], StepBatch]) -> None:
        self._make = make

    def __getitem__(self, step: int) -> tuple[int, StepBatch]:
        return os.getpid(), self._make(step)


def _move(inputs: Inputs, card: str) -> Inputs:
    moved = {name: tensor.to(card, non_blocking=True) for name, tensor in inputs.tensors().items()}
    return Inputs(**moved)


SPECS = (DataLoading,)
