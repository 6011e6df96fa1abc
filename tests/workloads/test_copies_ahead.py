"""Batches copied ahead: queued behind no work, used by none before they are there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from finetuning_cases import losses, request, trained
from generation_cases import Worker

from workloads.devices import device_for
from workloads.devices.base import Copies, SideCopies
from workloads.devices.cpu import CpuDevice
from workloads.training import loop
from workloads.training.technique import Inputs, StepBatch
from workloads.training.techniques.batches import DataLoading, ahead


class _Late:
    """Copies hold no data until their arrival is asked for, and the order of calls is recorded."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._begun, self._arrived = itertools.count(), itertools.count()

    def begin(self, tensors: Sequence[torch.Tensor]) -> Copies:
        """Queue copies."""
        self.events.append(("copy", next(self._begun)))
        return [torch.full_like(tensor, -1) for tensor in tensors], [t.clone() for t in tensors]

    def arrived(self, copies: Copies) -> Sequence[torch.Tensor]:
        """Fill the copies."""
        self.events.append(("wait", next(self._arrived)))
        there, given = copies
        for target, source in zip(there, given, strict=True):
            target.copy_(source)
        return there


class _Beside(CpuDevice):
    """A CPU that copies like a card with a stream for it."""

    def __init__(self) -> None:
        super().__init__()
        self.way = _Late()

    def side_copies(self) -> SideCopies:
        """The recorded way."""
        return self.way


def _batches() -> Iterator[StepBatch]:
    for number in itertools.count():
        parts = tuple(
            Inputs(
                input_ids=torch.tensor([[number, part]]),
                labels=torch.tensor([[part, number]]),
                attention_mask=torch.ones(1, 2) if part else None,
            )
            for part in range(2)
        )
        yield StepBatch(
            micro_batches=parts, items=number, real_tokens=4, computed_tokens=4, loss_tokens=1.0
        )


def test_a_copy_is_queued_before_the_work_it_runs_beside() -> None:
    """The work of each step comes behind the wait for its own batch alone, and behind the copy of
    the next; every tensor arrives in its place."""
    way = _Late()
    for number, (batch, plain) in enumerate(
        zip(ahead(_batches(), way), itertools.islice(_batches(), 4), strict=False)
    ):
        way.events.append(("work", number))
        assert batch.items == plain.items and batch.shape == plain.shape
        for part, given in zip(batch.micro_batches, plain.micro_batches, strict=True):
            assert part.tensors().keys() == given.tensors().keys()
            for name, tensor in part.tensors().items():
                assert torch.equal(tensor, given.tensors()[name])
        if number == 2:
            break
    assert way.events == [
        ("copy", 0),
        *(event for n in range(3) for event in (("wait", n), ("copy", n + 1), ("work", n))),
    ]


@pytest.mark.slow
def test_a_job_learns_the_same_from_batches_copied_ahead() -> None:
    """The training loop reads no batch before it is there, in micro-batches too."""
    device = _Beside()
    job = request(learning_rate=1e-2, pin_memory=True, copy_ahead=True)
    found = loop.run(job, replace(Worker().context(), device=device))
    assert losses(found) == pytest.approx(losses(trained(learning_rate=1e-2)), rel=1e-5)
    steps = len(losses(found))
    assert [event for event, _ in device.way.events] == ["copy", *["wait", "copy"] * steps]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA card")
def test_a_card_has_each_batch_when_its_work_begins() -> None:
    """On a card: batches far larger than what a copy takes are whole when work reads them."""
    way = device_for("cuda").side_copies()
    numbers = [torch.full((2**22,), n).pin_memory() for n in range(8)]
    coming = way.begin(numbers[:1])
    for n in range(8):
        (there,) = way.arrived(coming)
        coming = way.begin(numbers[(n + 1) % 8 :][:1])
        assert int(there.sum()) == n * 2**22


def test_only_what_is_asked_for_is_copied_ahead() -> None:
    """Without the setting no way beside the work is made."""

    class _Plan:
        feed = move = device = None

    plan = _Plan()
    DataLoading().on_data(cast("Any", plan))
    assert plan.feed is None and plan.move is None
